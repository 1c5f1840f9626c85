"""From a checkpoint's tensors to a backend's weights, one at a time and each accounted for.

A family asks for the tensors it needs by their canonical (Hugging Face) names and shapes, and gets
them fused, cast and packed. At no moment does more than one source tensor exist beside the final
weights, so that a model loads in little more memory than it runs in. A tensor that is missing or of
another shape, or that nobody asked for, ends the load with a sentence that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from tokenpath.engine.kernels.base import KernelBackend, Linear
from tokenpath.models.local import LocalModel
from tokenpath.models.weights import read_tensor
from tokenpath.protocol.errors import ModelFileError

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction of it that is."""


@dataclass(slots=True)
class WeightLoader:
    """Hands a family its weights and keeps the books."""

    model: LocalModel
    backend: KernelBackend
    dtype: torch.dtype
    device: str
    progress: Progress | None = None
    weight_bytes: int = 0
    """Memory of everything handed out so far, as the backend holds it."""
    parameters: int = 0
    """Numbers in the tensors read so far."""
    _used: set[str] = field(default_factory=set)

    def linear(self, names: Seq[str], rows: Seq[int], columns: int, *, bias: bool) -> Linear:
        """Matrices [rows, columns] with the same input, stacked into one in the order given.

        ``names`` are without ``.weight`` and ``.bias``.
        """
        total = sum(rows)
        weight = torch.empty((total, columns), dtype=self.dtype, device=self.device)
        shift = torch.empty(total, dtype=self.dtype, device=self.device) if bias else None
        begin = 0
        for name, count in zip(names, rows, strict=True):
            weight[begin : begin + count] = self._take(f"{name}.weight", (count, columns))
            if shift is not None:
                shift[begin : begin + count] = self._take(f"{name}.bias", (count,))
            begin += count
        linear = self.backend.linear(weight, shift)
        self.weight_bytes += linear.weight_bytes
        return linear

    def table(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """An embedding table [rows, columns]."""
        table = self._take(name, (rows, columns)).to(device=self.device, dtype=self.dtype)
        table = self.backend.table(table)
        self.weight_bytes += table.nbytes
        return table

    def head(self, name: str, rows: int, columns: int) -> Linear:
        """The matrix [rows, columns] that makes logits."""
        weight = self._take(name, (rows, columns)).to(device=self.device, dtype=self.dtype)
        linear = self.backend.head(weight)
        self.weight_bytes += linear.weight_bytes
        return linear

    def tied(self, table: torch.Tensor) -> Linear:
        """A table that is used as the head's matrix too."""
        linear = self.backend.head(table)
        # A backend that keeps the table itself takes no further memory.
        self.weight_bytes += max(0, linear.weight_bytes - table.nbytes)
        return linear

    def norm(self, name: str, size: int, *, offset: float = 0.0) -> torch.Tensor:
        """A norm's weight [size], plus ``offset``, in float32 whatever the model's dtype."""
        weight = self._take(name, (size,)).to(device=self.device, dtype=torch.float32) + offset
        self.weight_bytes += weight.nbytes
        return weight

    def finish(self) -> None:
        """Check that nothing is left. Raises ``ModelFileError`` naming the first leftover."""
        left = sorted(self.model.tensors.keys() - self._used)
        if left:
            raise ModelFileError(
                f"the {self.model.config.family} family does not use the tensor {left[0]} of "
                f"{self.model.path}" + (f", nor {len(left) - 1} more" if len(left) > 1 else "")
            )

    def _take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self.model.tensors:
            raise ModelFileError(
                f"{self.model.path} has no tensor {name}; its metadata calls for one of shape "
                f"{list(shape)}"
            )
        tensor = read_tensor(self.model, name)
        if tuple(tensor.shape) != shape:
            raise ModelFileError(
                f"tensor {name} of {self.model.path} has shape {list(tensor.shape)}, but the "
                f"metadata calls for {list(shape)}"
            )
        self._used.add(name)
        self.parameters += tensor.numel()
        if self.progress is not None:
            self.progress("weights", len(self._used) / len(self.model.tensors))
        return tensor
