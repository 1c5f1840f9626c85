"""Packed weights on disk: packed into once, and mapped into memory by every later start.

::

    header     4096 bytes: magic, versions, the file's size, where the index is, and a CRC of these
    pieces     as ``packed.PackedWeights`` has them in memory, at the same offsets
    index      JSON: whose weights these are, the pieces, and a checksum of every 8 MiB before it

Everything is checked before it is used, data included: the pages must be touched before the first
step anyway, and a checksum at the speed of memory costs a tenth of a second for 1.5 GB. So nothing
is forced onto the disk when it is written: what a power cut leaves is found wrong, and packed anew.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from tokenpath.engine.kernels.packed import (
    HEADER_BYTES,
    Bytes,
    PackedWeights,
    Piece,
    on_huge_pages,
)

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


class PackedFile:
    """A file in the making, whose memory weights are packed into. A context manager.

    Its room on the disk is taken at the start, so that a full disk is found out before the work
    and not, as a signal, in the middle of it.
    """

    def __init__(self, path: Path, size: int) -> None:
        """``path`` should be a temporary name. Raises ``OSError``, and leaves no file then."""
        self._path = path
        self._file = path.open("x+b")
        try:
            os.posix_fallocate(self._file.fileno(), 0, size)
            mapped = mmap.mmap(self._file.fileno(), size, flags=mmap.MAP_SHARED)
        except OSError:
            self._file.close()
            path.unlink()
            raise
        on_huge_pages(mapped)
        self._mapped = mapped
        self.memory: Bytes = np.frombuffer(mapped, np.uint8)
        """For ``PackedWeights``."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    def publish(
        self,
        path: Path,
        weights: PackedWeights,
        *,
        identity: str,
        source: str,
        native: Any,
        threads: int,
    ) -> None:
        """Give a file whose memory ``weights`` fill its final name. Raises ``OSError``."""
        used, descriptor = weights.used, self._file.fileno()

        def checksum(start: int) -> int:
            first = max(start, HEADER_BYTES)
            return int(native.checksum(weights.memory[first : min(start + _BLOCK_BYTES, used)]))

        with ThreadPoolExecutor(threads) as pool:
            checksums = list(pool.map(checksum, range(0, used, _BLOCK_BYTES)))
        pieces = list(weights.pieces.values())
        index = msgspec.json.encode(Index(identity, source, pieces, checksums))
        header = _HEADER.pack(
            MAGIC,
            VERSION,
            native.PACKED_LAYOUT,
            used + len(index),
            used,
            len(index),
            zlib.crc32(index),
        )
        # Nobody touches the memory beyond what is used, so the file may end there.
        os.ftruncate(descriptor, used)
        _write_at(descriptor, memoryview(index), used)
        _write_at(descriptor, memoryview(header + _CRC.pack(zlib.crc32(header))), 0)
        self._path.replace(path)
        # Whoever maps the file next would count the same pages a second time.
        self._mapped.madvise(mmap.MADV_DONTNEED)


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
    """Map a file, read-only and shared; ``progress`` is told the fraction that is checked.

    Raises ``DamagedFileError`` for what was not written by ``write_packed`` with this identity and
    layout, or has changed since, and ``OSError`` (``FileNotFoundError`` if there is none).
    """
    with path.open("rb") as file, ThreadPoolExecutor(threads) as pool:
        descriptor = file.fileno()
        index = _index(descriptor, native.PACKED_LAYOUT)
        if index.identity != identity:
            raise DamagedFileError("it holds other weights than its name says")
        mapped = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        on_huge_pages(mapped)
        memory = np.frombuffer(mapped, np.uint8)
        weights = PackedWeights(memory, index.pieces, panel=native.PANEL)
        size = weights.used
        if len(index.block_checksums) != -(-size // _BLOCK_BYTES):
            raise DamagedFileError("its index does not cover its data")

        def block(numbered: tuple[int, int]) -> bool:
            number, expected = numbered
            start = number * _BLOCK_BYTES
            # The disk is ahead of the processor; and what is touched here is not in the first step.
            os.posix_fadvise(descriptor, start, 4 * _BLOCK_BYTES, os.POSIX_FADV_WILLNEED)
            first = max(start, HEADER_BYTES)
            return int(native.checksum(memory[first : min(start + _BLOCK_BYTES, size)])) == expected

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
