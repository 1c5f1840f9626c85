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
from tokenpath.engine.parallel.share import ALL, Share
from tokenpath.models.local import LocalModel
from tokenpath.models.weights import open_matrix, read_tensor
from tokenpath.protocol.errors import ModelFileError

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction of it that is."""


class WeightLoader(Protocol):
    """Where a family takes its weights from.

    Names are those of Hugging Face checkpoints, and shapes those of the whole model; those of
    matrices are without ``.weight`` and ``.bias``. Of every matrix a rank gets the rows of its own
    share, with zeros below them where the last part has fewer. What comes back belongs to the
    loader's own backend. Every call raises ``ModelFileError`` for a tensor that is missing or of
    another shape.
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
    share: Share = ALL
    """Tensors of other stages are not missed."""
    _used: set[str] = field(default_factory=set)

    @property
    def own(self) -> set[str]:
        """The tensors that this rank's stage has to take."""
        if self.share.stages == 1:
            return set(self.model.tensors)
        return {name for name in self.model.tensors if self.share.has(name, self.model.config)}

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
        left = sorted(self.own - self._used)
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
    _total: int = field(init=False)

    def __post_init__(self) -> None:
        self._book = TensorBook(self.model, self.backend.share)
        self._total = len(self._book.own)

    def linear(self, names: Seq[str], rows: Seq[int], columns: int, *, bias: bool) -> Linear:
        """See ``WeightLoader``."""
        share = self.backend.share
        total = sum(map(share.held, rows))
        weight = torch.zeros((total, columns), dtype=self.dtype, device=self.device)
        shift = torch.zeros(total, dtype=self.dtype, device=self.device) if bias else None
        begin = 0
        for name, count in zip(names, rows, strict=True):
            own = share.rows(count)
            end = begin + len(own)
            weight[begin:end] = self._take_rows(f"{name}.weight", (count, columns), own)
            if shift is not None:
                shift[begin:end] = self._take(f"{name}.bias", (count,))[own.start : own.stop]
            begin += share.held(count)
        linear = self.backend.linear(weight, shift)
        self.weight_bytes += linear.weight_bytes
        return linear

    def gate_up(self, names: tuple[str, str], rows: int, columns: int, *, bias: bool) -> Linear:
        """One above the other, gate first."""
        return self.linear(names, (rows, rows), columns, bias=bias)

    def table(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """See ``WeightLoader``."""
        share = self.backend.share
        own = share.rows(rows)
        taken = self._take_rows(name, (rows, columns), own)
        table = taken.to(device=self.device, dtype=self.dtype)
        if len(own) < share.held(rows):
            table = torch.cat((table, table.new_zeros(share.held(rows) - len(own), columns)))
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

    def _take_rows(self, name: str, shape: tuple[int, int], rows: range) -> torch.Tensor:
        """Some rows of a matrix; no others are read."""
        if len(rows) == shape[0]:
            return self._take(name, shape)
        self._book.claim(name, shape)
        taken = torch.from_numpy(open_matrix(self.model, name).floats(rows.start, rows.stop))
        self._count()
        return taken

    def _take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self._book.claim(name, shape)
        tensor = read_tensor(self.model, name)
        self._count()
        return tensor

    def _count(self) -> None:
        self._taken += 1
        if self.progress is not None:
            self.progress("weights", min(1.0, self._taken / self._total))
