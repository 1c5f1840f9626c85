"""From a checkpoint to packed weights, a few rows at a time, and from packed weights to a decoder.

``Packer`` and ``PackedLoader`` are the two ``WeightLoader``s of native programs: the first reads,
rounds and packs, and need not have more of the checkpoint in memory than the rows in work; the
second finds everything packed already and touches no checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from tokenpath.engine.kernels.base import KernelBackend
from tokenpath.engine.kernels.packed import (
    Bytes,
    Floats,
    PackedMatrix,
    PackedWeights,
    room_for,
)
from tokenpath.engine.kernels.quantize import BLOCK, GROUP, Bits, Int4Weight, take_int4, to_int4
from tokenpath.engine.loading import Progress, TensorBook
from tokenpath.engine.parallel.share import ALL, Share
from tokenpath.models.layout import EMBEDDING
from tokenpath.models.local import LocalModel
from tokenpath.models.quantized.matrix import QuantizedMatrix
from tokenpath.models.weights import StoredMatrix, open_matrix, read_tensor

TABLE_BITS: Bits = 8
"""Of embeddings, and so of a head that is the same matrix."""
_INTERLEAVED = 16
"""Gate's and partner's rows alternate in so many, so that one panel has both of its channels."""
_WEIGHTS_AT_A_TIME = 1 << 20
"""What one thread has in float32 at a time; 4 MB, and three of them with codes and source."""

Matrix = StoredMatrix | QuantizedMatrix
Rounded = tuple[npt.NDArray[Any], ...]
"""Rows of a matrix as ``pack_int8`` (codes and scales) or ``pack_int4`` takes them."""


class PackedLoader:
    """A ``WeightLoader`` of weights that are packed already."""

    def __init__(self, weights: PackedWeights, backend: KernelBackend) -> None:
        self.backend = backend
        self.dtype = torch.float32
        self._weights = weights

    def linear(self, names: Seq[str], rows: Seq[int], columns: int, *, bias: bool) -> PackedMatrix:
        del rows, columns, bias
        return self._weights.matrix(_joined(names))

    def gate_up(
        self, names: tuple[str, str], rows: int, columns: int, *, bias: bool
    ) -> PackedMatrix:
        del rows, columns, bias
        return self._weights.matrix(_joined(names))

    def table(self, name: str, rows: int, columns: int) -> PackedMatrix:
        del rows, columns
        return self._weights.matrix(name)

    def tied(self, table: PackedMatrix) -> PackedMatrix:
        return table

    def norm(self, name: str, size: int, *, offset: float = 0.0) -> torch.Tensor:
        del size, offset
        # A copy: torch has no tensors that cannot be written.
        return torch.from_numpy(self._weights.vector(name).copy())


class Packer:
    """A ``WeightLoader`` that packs on several threads what it is asked for.

    What it hands out is complete after ``finish``. Close it, or use it as a context manager: it
    has threads.
    """

    def __init__(
        self,
        model: LocalModel,
        bits: Bits,
        *,
        memory: Bytes,
        backend: KernelBackend,
        native: Any,
        threads: int,
        progress: Progress | None = None,
    ) -> None:
        """``memory`` is zeros, and as large as ``packed_bytes`` says."""
        self.backend = backend
        self.dtype = torch.float32
        self._model = model
        self._bits: Bits = bits
        self._native = native
        self._progress = progress
        self.weights = PackedWeights(memory, (), panel=native.PANEL)
        self._share = backend.share
        self._book = TensorBook(model, self._share)
        self._fast_types = frozenset(native.gguf_types())
        # One thread of ours is one of torch's: they would else be multiplied with each other.
        self._torch_threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(
            threads, initializer=torch.set_num_threads, initargs=(1,), thread_name_prefix="packing"
        )
        self._futures: list[Future[None]] = []
        self._packed = 0
        own = (model.tensors[name] for name in self._book.own)
        self._total = sum(tensor.elements for tensor in own) // self._share.parts
        self._counting = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._torch_threads)

    def finish(self) -> PackedWeights:
        """Wait until all is packed. Raises ``ModelFileError`` for what went wrong or is left."""
        for future in self._futures:
            future.result()
        self._book.finish()
        return self.weights

    def linear(self, names: Seq[str], rows: Seq[int], columns: int, *, bias: bool) -> PackedMatrix:
        share = self._share
        held = [share.held(count) for count in rows]
        matrix = self._room_for(_joined(names), self._bits, sum(held), columns, bias=bias)
        begin = 0
        for name, count, room in zip(names, rows, held, strict=True):
            source, own = self._open(f"{name}.weight", count, columns), share.rows(count)
            rounded = partial(self._rounded_from, own.start, self._bits, source)
            self._pack(matrix, begin, len(own), self._bits, rounded)
            if matrix.bias is not None:
                shift = self._read(f"{name}.bias", count)
                matrix.bias[begin : begin + len(own)] = shift[own.start : own.stop]
            begin += room
        return matrix

    def gate_up(
        self, names: tuple[str, str], rows: int, columns: int, *, bias: bool
    ) -> PackedMatrix:
        own = self._share.rows(rows)
        both = 2 * len(own)
        matrix = self._room_for(_joined(names), self._bits, both, columns, bias=bias)
        pair = [self._open(f"{name}.weight", rows, columns) for name in names]

        def rounded(begin: int, end: int) -> Rounded:
            halves = [
                self._rounded_from(own.start, self._bits, s, begin // 2, end // 2) for s in pair
            ]
            return tuple(_alternating(*parts) for parts in zip(*halves, strict=True))

        self._pack(matrix, 0, both, self._bits, rounded)
        if matrix.bias is not None:
            shifts = (self._read(f"{name}.bias", rows)[own.start : own.stop] for name in names)
            matrix.bias[:both] = _alternating(*shifts)
        return matrix

    def table(self, name: str, rows: int, columns: int) -> PackedMatrix:
        held, own = self._share.held(rows), self._share.rows(rows)
        matrix = self._room_for(name, TABLE_BITS, held, columns, bias=False)
        source = self._open(name, rows, columns)
        rounded = partial(self._rounded_from, own.start, TABLE_BITS, source)
        self._pack(matrix, 0, len(own), TABLE_BITS, rounded)
        return matrix

    def tied(self, table: PackedMatrix) -> PackedMatrix:
        return table

    def norm(self, name: str, size: int, *, offset: float = 0.0) -> torch.Tensor:
        vector = self.weights.add_vector(name, size)
        vector[:] = self._read(name, size) + np.float32(offset)
        return torch.from_numpy(vector)

    def _room_for(
        self, name: str, bits: Bits, rows: int, columns: int, *, bias: bool
    ) -> PackedMatrix:
        panels = -(-rows // self._native.PANEL)
        size = panels * self._native.panel_bytes(bits, columns)
        return self.weights.add_matrix(name, bits, rows, columns, size, bias=bias)

    def _open(self, name: str, rows: int, columns: int) -> Matrix:
        self._book.claim(name, (rows, columns))
        return open_matrix(self._model, name)

    def _read(self, name: str, size: int) -> Floats:
        self._book.claim(name, (size,))
        values: Floats = read_tensor(self._model, name).float().numpy()
        self._count(size)
        return values

    def _pack(
        self,
        matrix: PackedMatrix,
        first: int,
        count: int,
        bits: Bits,
        rounded: Callable[[int, int], Rounded],
    ) -> None:
        """Pack ``count`` rows from ``first``, a panel's border, on; ``rounded`` makes them."""
        panel = self._native.PANEL
        size = self._native.panel_bytes(bits, matrix.columns)
        step = max(panel, _WEIGHTS_AT_A_TIME // matrix.columns // panel * panel)

        def part(begin: int) -> None:
            end = min(count, begin + step)
            rows = rounded(begin, end)
            start, stop = (first + begin) // panel, -(-(first + end) // panel)
            data = matrix.data[start * size : stop * size]
            if bits == 8:  # noqa: PLR2004 - 8 bits
                codes, scale = rows
                self._native.pack_int8(codes, data)
                matrix.scale[first + begin : first + end] = scale
            else:
                self._native.pack_int4(*rows, data)
            self._count((end - begin) * matrix.columns)

        self._futures += [self._pool.submit(part, begin) for begin in range(0, count, step)]

    def _rounded_from(
        self, first: int, bits: Bits, source: Matrix, begin: int, end: int
    ) -> Rounded:
        """Rows counted from ``first``, where this rank's own begin."""
        return self._rounded(bits, source, first + begin, first + end)

    def _rounded(self, bits: Bits, source: Matrix, begin: int, end: int) -> Rounded:
        rows, columns = end - begin, source.info.shape[1]
        if isinstance(source, QuantizedMatrix):
            return self._rounded_codes(bits, source, begin, end)
        fast = source.gguf_type in self._fast_types
        if bits == 8:  # noqa: PLR2004 - 8 bits
            codes, scale = np.empty((rows, columns), np.int8), np.empty(rows, np.float32)
            if fast:
                self._native.gguf_int8(source.gguf_type, source.stored(begin, end), codes, scale)
            else:
                self._native.round_int8(source.floats(begin, end), codes, scale)
            return codes, scale
        if source.gguf_type == "Q4_K":
            whole, units = (rows, columns // GROUP), (rows, columns // GROUP // BLOCK)
            taken = (
                np.empty((rows, columns), np.uint8),
                np.empty(whole, np.uint8),
                np.empty(whole, np.uint8),
                np.empty(units, np.uint16),
                np.empty(units, np.uint16),
            )
            self._native.take_q4_k(source.stored(begin, end), *taken)
            return taken
        if fast:
            floats = np.empty((rows, columns), np.float32)
            self._native.dequantize(source.gguf_type, source.stored(begin, end), floats)
        else:
            floats = source.floats(begin, end)
        return _arrays(to_int4(torch.from_numpy(floats)))

    def _rounded_codes(self, bits: Bits, source: QuantizedMatrix, begin: int, end: int) -> Rounded:
        """Four bits or less are taken over as they are; rounding them again would add errors."""
        if bits == 8:  # noqa: PLR2004 - 8 bits
            floats = source.floats(begin, end)
            codes, scale = np.empty(floats.shape, np.int8), np.empty(len(floats), np.float32)
            self._native.round_int8(floats, codes, scale)
            return codes, scale
        held = source.code_rows(begin, end)
        if held is not None:
            return _arrays(take_int4(held.codes, held.scale, held.zero))
        return _arrays(to_int4(source.rows(begin, end)))

    def _count(self, numbers: int) -> None:
        with self._counting:
            self._packed += numbers
            if self._progress is not None:
                self._progress("packing weights", min(1.0, self._packed / self._total))


def packed_bytes(model: LocalModel, bits: Bits, native: Any, share: Share = ALL) -> int:
    """Memory that suffices for a share's packed weights: exact but for shared panels."""
    panel = native.PANEL
    sizes: list[int] = []
    for name, tensor in model.tensors.items():
        if not share.has(name, model.config):
            continue
        if len(tensor.shape) == 1:
            # A bias is rounded up to whole panels, and begins a page with its matrix. A norm is
            # whole in every part.
            sizes.append(-(-tensor.shape[0] // panel) * panel * 4)
            continue
        rows = -(-share.held(tensor.shape[0]) // panel) * panel
        its_bits = TABLE_BITS if name == EMBEDDING else bits
        sizes += [rows // panel * native.panel_bytes(its_bits, tensor.shape[1]), rows * 4]
    return room_for(sizes)


def _arrays(weight: Int4Weight) -> Rounded:
    """For ``pack_int4``, which knows half precision as its bits."""
    return tuple(
        part.view(torch.uint16).numpy() if part.dtype == torch.float16 else part.numpy()
        for part in weight.parts
    )


def _joined(names: Seq[str]) -> str:
    return "+".join(names)


def _alternating(gate: npt.NDArray[Any], up: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rows of two arrays, 16 by 16."""
    rest = gate.shape[1:]
    pairs = [part.reshape(-1, _INTERLEAVED, *rest) for part in (gate, up)]
    return np.stack(pairs, 1).reshape(2 * len(gate), *rest)
