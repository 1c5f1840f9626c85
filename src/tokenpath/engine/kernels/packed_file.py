"""Packed weights on disk: written once after packing, read back by every later start.

::

    header     4096 bytes: magic, versions, the file's size, where the index is, and a CRC of these
    pieces     as ``packed.PackedWeights`` has them in memory, at the same offsets
    index      JSON: whose weights these are, the pieces, and a checksum of every 8 MiB before it

Everything is checked before it is used, data included: checksums are taken while the data are in
the processor's cache anyway, and cost less than a tenth of a start. So nothing is forced onto the
disk when it is written. What a power cut leaves is found wrong, and packed again.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokenpath.engine.kernels.packed import HEADER_BYTES, PackedWeights, Piece, huge_memory

MAGIC = b"TPPACKED"
VERSION = 1
"""Of the container; the layout of the weights in it has its own."""

_HEADER = struct.Struct("<8sIIQQQI")
"""Magic, version, layout, file's size, index's offset and size, index's CRC; then a CRC of this."""
_CRC = struct.Struct("<I")
_BLOCK_BYTES = 8 << 20
_MAX_INDEX_BYTES = 64 << 20


class DamagedFileError(Exception):
    """A file of packed weights that is not as it was written; the message says how."""


class Index(msgspec.Struct, frozen=True):
    """What a file says of itself."""

    identity: str
    """Of the checkpoint and the way of packing; see ``packed_cache.identity_of``."""
    source: str
    """Where the checkpoint was when it was packed."""
    pieces: list[Piece]
    block_checksums: list[int]


def write_packed(
    path: Path, weights: PackedWeights, *, identity: str, source: str, native: Any, threads: int
) -> None:
    """Write a whole file; ``path`` should be a temporary name. Raises ``OSError``."""
    data = weights.memory[: weights.used]
    starts = range(0, weights.used, _BLOCK_BYTES)
    with path.open("xb") as file, ThreadPoolExecutor(threads) as pool:
        descriptor = file.fileno()

        def block(start: int) -> int:
            part = data[start : start + _BLOCK_BYTES]
            # The header's place is zeros in memory, and written last.
            _write_at(
                descriptor,
                memoryview(part)[HEADER_BYTES if start == 0 else 0 :],
                start or HEADER_BYTES,
            )
            return int(native.checksum(part))

        checksums = list(pool.map(block, starts))
        pieces = list(weights.pieces.values())
        index = msgspec.json.encode(Index(identity, source, pieces, checksums))
        _write_at(descriptor, memoryview(index), weights.used)
        header = _HEADER.pack(
            MAGIC,
            VERSION,
            native.PACKED_LAYOUT,
            weights.used + len(index),
            weights.used,
            len(index),
            zlib.crc32(index),
        )
        _write_at(descriptor, memoryview(header + _CRC.pack(zlib.crc32(header))), 0)


def read_index(path: Path, *, layout: int | None = None) -> Index:
    """What a file says of itself, checked, without its data.

    With ``layout``, one of another layout counts as damaged. Raises ``DamagedFileError``, and
    ``OSError`` if it cannot be read.
    """
    with path.open("rb") as file:
        return _index(file.fileno(), layout)


def read_packed(
    path: Path,
    *,
    identity: str,
    native: Any,
    threads: int,
    progress: Callable[[float], None] = lambda _fraction: None,
) -> PackedWeights:
    """Read a file into memory of this process; ``progress`` is told the fraction that is read.

    Raises ``DamagedFileError`` for what was not written by ``write_packed`` with this identity and
    layout, or has changed since, and ``OSError`` (``FileNotFoundError`` if there is none).
    """
    with path.open("rb") as file, ThreadPoolExecutor(threads) as pool:
        descriptor = file.fileno()
        index = _index(descriptor, native.PACKED_LAYOUT)
        if index.identity != identity:
            raise DamagedFileError("it holds other weights than its name says")
        weights = PackedWeights(np.zeros(0, np.uint8), index.pieces, panel=native.PANEL)
        size = weights.used
        if len(index.block_checksums) != -(-size // _BLOCK_BYTES):
            raise DamagedFileError("its index does not cover its data")
        weights.memory = huge_memory(size)

        def block(numbered: tuple[int, int]) -> bool:
            number, expected = numbered
            part = weights.memory[number * _BLOCK_BYTES : (number + 1) * _BLOCK_BYTES]
            skip = HEADER_BYTES if number == 0 else 0
            _read_at(descriptor, memoryview(part)[skip:], number * _BLOCK_BYTES + skip)
            return int(native.checksum(part)) == expected

        for number, good in enumerate(pool.map(block, enumerate(index.block_checksums))):
            if not good:
                raise DamagedFileError(
                    f"the checksum of the {_BLOCK_BYTES:,} bytes from {number * _BLOCK_BYTES:,} "
                    "on is wrong"
                )
            progress((number + 1) / len(index.block_checksums))
    return weights


def _index(descriptor: int, layout: int | None) -> Index:
    size = os.fstat(descriptor).st_size
    raw = os.pread(descriptor, _HEADER.size + _CRC.size, 0)
    if len(raw) < _HEADER.size + _CRC.size or raw[: len(MAGIC)] != MAGIC:
        raise DamagedFileError("it does not begin as packed weights do")
    if zlib.crc32(raw[: _HEADER.size]) != _CRC.unpack_from(raw, _HEADER.size)[0]:
        raise DamagedFileError("its header is damaged")
    _, version, its_layout, whole, offset, count, crc = _HEADER.unpack_from(raw)
    if version != VERSION or layout not in {None, its_layout}:
        raise DamagedFileError("another version of tokenpath wrote it")
    if whole != size or offset + count != size or count > _MAX_INDEX_BYTES:
        raise DamagedFileError(f"it has {size:,} bytes instead of {whole:,}")
    text = os.pread(descriptor, count, offset)
    if zlib.crc32(text) != crc:
        raise DamagedFileError("its index is damaged")
    try:
        return msgspec.json.decode(text, type=Index)
    except msgspec.DecodeError as error:
        raise DamagedFileError(f"its index cannot be read: {error}") from error


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def _read_at(descriptor: int, into: memoryview, offset: int) -> None:
    while into:
        count = os.preadv(descriptor, [into], offset)
        if count == 0:
            raise DamagedFileError("it ends too early")
        into, offset = into[count:], offset + count
