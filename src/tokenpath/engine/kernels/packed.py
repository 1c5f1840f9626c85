"""Weights as the native kernels read them: one stretch of memory, and what lies where in it.

The stretch is what ``packed_file`` writes and reads, byte for byte, so that a second start is a
copy from the disk's cache into memory. Nothing here knows torch's layers or a checkpoint's formats.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

HEADER_BYTES = 4096
"""Left free at the beginning, for the file's own header."""
_ALIGNED = 4096


class Piece(msgspec.Struct, frozen=True):
    """Where one matrix or vector lies; offsets are from the beginning of the memory."""

    name: str
    bits: int
    """8 or 4; 32 for a vector of float32, which has ``data`` only and one row."""
    rows: int
    columns: int
    data: int
    bytes: int
    """Of ``data``."""
    scale: int | None = None
    """float32 of every row, in whole panels; 8 bits only."""
    bias: int | None = None
    """float32 of every row, in whole panels."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A ``Linear`` or an embedding table for native programs, which alone can compute with it."""

    bits: int
    rows: int
    columns: int
    data: Bytes
    scale: Floats
    """[rows in whole panels]; empty for 4 bits."""
    bias: Floats | None

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights as held."""
        return self.data.nbytes + self.scale.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: object) -> Any:  # noqa: ARG002 - the protocol's
        """Never possible: torch does not know the layout."""
        raise TypeError("packed weights are multiplied by the native program only")


class PackedWeights:
    """Memory with pieces in it: full if it was read, filling up while it is packed."""

    def __init__(self, memory: Bytes, pieces: Iterable[Piece], *, panel: int) -> None:
        """``panel`` is the number of rows that the kernels keep together."""
        self.memory = memory
        self._pieces = {piece.name: piece for piece in pieces}
        self._panel = panel
        self.used = max((_end(p, panel) for p in self._pieces.values()), default=HEADER_BYTES)
        """Bytes from the beginning to the end of the last piece."""

    @property
    def pieces(self) -> Mapping[str, Piece]:
        """By name."""
        return self._pieces

    def add_matrix(
        self, name: str, bits: int, rows: int, columns: int, size: int, *, bias: bool
    ) -> PackedMatrix:
        """Room for a matrix of ``size`` packed bytes, all zeros still."""
        per_row = -(-rows // self._panel) * self._panel * 4
        data = self._take(size)
        scale = self._take(per_row) if bits == 8 else None  # noqa: PLR2004 - 8 bits
        shift = self._take(per_row) if bias else None
        self._pieces[name] = Piece(name, bits, rows, columns, data, size, scale, shift)
        return self.matrix(name)

    def add_vector(self, name: str, size: int) -> Floats:
        """Room for float32 numbers, all zeros still."""
        self._pieces[name] = Piece(name, 32, 1, size, self._take(size * 4), size * 4)
        return self.vector(name)

    def matrix(self, name: str) -> PackedMatrix:
        """A matrix by name. Raises ``KeyError``."""
        piece = self._pieces[name]
        padded = -(-piece.rows // self._panel) * self._panel
        return PackedMatrix(
            piece.bits,
            piece.rows,
            piece.columns,
            self.memory[piece.data : piece.data + piece.bytes],
            np.zeros(0, np.float32) if piece.scale is None else self._floats(piece.scale, padded),
            None if piece.bias is None else self._floats(piece.bias, padded),
        )

    def vector(self, name: str) -> Floats:
        """A vector by name. Raises ``KeyError``."""
        piece = self._pieces[name]
        return self._floats(piece.data, piece.columns)

    def _take(self, size: int) -> int:
        offset = -(-self.used // _ALIGNED) * _ALIGNED
        if offset + size > self.memory.nbytes:
            raise MemoryError("more weights than were expected")
        self.used = offset + size
        return offset

    def _floats(self, offset: int, count: int) -> Floats:
        return self.memory[offset : offset + 4 * count].view(np.float32)


def room_for(sizes: Iterable[int]) -> int:
    """Bytes of memory for pieces of these sizes, in whatever order."""
    return HEADER_BYTES + sum(-(-size // _ALIGNED) * _ALIGNED for size in sizes)


def huge_memory(size: int) -> Bytes:
    """Zeroed memory on huge pages where the system has them; taken when it is first written.

    Weights are read from end to end in every step: with pages of 4 kB, looking up addresses would
    cost a part of the bandwidth.
    """
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    on_huge_pages(memory)
    return np.frombuffer(memory, np.uint8, size)


def on_huge_pages(memory: mmap.mmap) -> None:
    """Ask the system to hold memory in huge pages, if it has any."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)


def _end(piece: Piece, panel: int) -> int:
    per_row = -(-piece.rows // panel) * panel * 4
    ends = [piece.data + piece.bytes]
    ends += [offset + per_row for offset in (piece.scale, piece.bias) if offset is not None]
    return max(ends)
