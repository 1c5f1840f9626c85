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
from typing import Protocol

import torch

from tokenpath.engine.kernels.base import KernelBackend, Linear, Table
from tokenpath.models.local import LocalModel
from tokenpath.models.weights import read_tensor
from tokenpath.protocol.errors import ModelFileError

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction of it that is."""


class WeightLoader(Protocol):
    """Where a family takes its weights from.

    Names are those of Hugging Face checkpoints; those of matrices are without ``.weight`` and
    ``.bias``. What comes back belongs to the loader's own backend. Every call raises
    ``ModelFileError`` for a tensor that is missing or of another shape.
    """

    @property
    def backend(self) -> KernelBackend:
        """What computes with the weights."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The precision of a family's own constants."""
        ...

    def linear(self, names: Seq[str], rows: Seq[int], columns: int, *, bias: bool) -> Linear:
        """Matrices [rows, columns] with the same input, stacked into one in the order given."""
        ...

    def gate_up(self, names: tuple[str, str], rows: int, columns: int, *, bias: bool) -> Linear:
        """A gate's and its partner's matrices, [rows, columns] each, made for ``gated_input``."""
        ...

    def table(self, name: str, rows: int, columns: int) -> Table:
        """An embedding table [rows, columns]."""
        ...

    def tied(self, table: Table) -> Linear:
        """A table that is used as the head's matrix too."""
        ...

    def norm(self, name: str, size: int, *, offset: float = 0.0) -> torch.Tensor:
        """A norm's weight [size], plus ``offset``, in float32 whatever the model's dtype."""
        ...


@dataclass(slots=True)
class TensorBook:
    """Who took which tensor of a checkpoint: none may be missing, misshapen or left over."""

    model: LocalModel
    _used: set[str] = field(default_factory=set)

    def claim(self, name: str, shape: tuple[int, ...]) -> None:
        """Note that a tensor is used. Raises ``ModelFileError`` if it is not as expected."""
        info = self.model.tensors.get(name)
        if info is None:
            raise ModelFileError(
                f"{self.model.path} has no tensor {name}; its metadata calls for one of shape "
                f"{list(shape)}"
            )
        if info.shape != shape:
            raise ModelFileError(
                f"tensor {name} of {self.model.path} has shape {list(info.shape)}, but the "
                f"metadata calls for {list(shape)}"
            )
        self._used.add(name)

    def finish(self) -> None:
        """Check that nothing is left. Raises ``ModelFileError`` naming the first leftover."""
        left = sorted(self.model.tensors.keys() - self._used)
        if left:
            raise ModelFileError(
                f"the {self.model.config.family} family does not use the tensor {left[0]} of "
                f"{self.model.path}" + (f", nor {len(left) - 1} more" if len(left) > 1 else "")
            )


@dataclass(slots=True)
class CheckpointLoader:
    """A ``WeightLoader`` that reads the checkpoint and hands its tensors to a backend."""

    model: LocalModel
    backend: KernelBackend
    dtype: torch.dtype
    device: str
    progress: Progress | None = None
    weight_bytes: int = 0
    """Memory of everything handed out so far, as the backend holds it."""
    _book: TensorBook = field(init=False)
    _taken: int = 0

    def __post_init__(self) -> None:
        self._book = TensorBook(self.model)

    def linear(self, names: Seq[str], rows: Seq[int], columns: int, *, bias: bool) -> Linear:
        """See ``WeightLoader``."""
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

    def gate_up(self, names: tuple[str, str], rows: int, columns: int, *, bias: bool) -> Linear:
        """One above the other, gate first."""
        return self.linear(names, (rows, rows), columns, bias=bias)

    def table(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """See ``WeightLoader``."""
        table = self._take(name, (rows, columns)).to(device=self.device, dtype=self.dtype)
        rounded: torch.Tensor = self.backend.table(table)
        self.weight_bytes += rounded.nbytes
        return rounded

    def tied(self, table: torch.Tensor) -> Linear:
        """See ``WeightLoader``."""
        linear = self.backend.tied(table)
        # A backend that keeps the table itself takes no further memory.
        self.weight_bytes += max(0, linear.weight_bytes - table.nbytes)
        return linear

    def norm(self, name: str, size: int, *, offset: float = 0.0) -> torch.Tensor:
        """See ``WeightLoader``."""
        weight = self._take(name, (size,)).to(device=self.device, dtype=torch.float32) + offset
        self.weight_bytes += weight.nbytes
        return weight

    def finish(self) -> None:
        """Check that no tensor is left. Raises ``ModelFileError``."""
        self._book.finish()

    def _take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self._book.claim(name, shape)
        tensor = read_tensor(self.model, name)
        self._taken += 1
        if self.progress is not None:
            self.progress("weights", self._taken / len(self.model.tensors))
        return tensor
