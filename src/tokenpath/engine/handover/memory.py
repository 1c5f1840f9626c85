"""The memory that blocks are handed over in, and the bound on how much of it there is.

Between processes of one machine both sides map the same memory: the receiver makes it, without a
name, and passes it over the connection. It is gone when both have let go of it, however they end.
Its size is sealed, so that neither side can take away what the other is reading.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class NoRoomError(Exception):
    """Memory of the right size was not to be had; the message says why."""


class Budget:
    """Bytes that may be taken by all handovers together. Thread-safe."""

    def __init__(self, total_bytes: int) -> None:
        self._left = total_bytes
        self._lock = threading.Lock()

    @property
    def left(self) -> int:
        """Bytes that can be taken now."""
        return self._left

    def take(self, count: int, size: int) -> int:
        """Take room for up to ``count`` pieces of ``size`` bytes; returns for how many."""
        with self._lock:
            taken = min(count, self._left // size)
            self._left -= taken * size
            return taken

    def give(self, size: int) -> None:
        """Give bytes back."""
        with self._lock:
            self._left += size


class Rows:
    """Memory of so many blocks."""

    def __init__(self, memory: Bytes, block_bytes: int) -> None:
        self._memory = memory
        self._block_bytes = block_bytes

    def __getitem__(self, index: int) -> Bytes:
        """A block's bytes."""
        start = index * self._block_bytes
        return self._memory[start : start + self._block_bytes]


def plain_rows(count: int, block_bytes: int) -> Rows:
    """Memory of this process; the system gives it page by page, as it is written."""
    return Rows(np.empty(count * block_bytes, np.uint8), block_bytes)


def shared_rows(count: int, block_bytes: int) -> tuple[Rows, int] | None:
    """Memory that another process can map, and its descriptor, to be closed once it was passed.

    None where the system has none (it is Linux that has).
    """
    if sys.platform != "linux":
        return None
    import fcntl  # noqa: PLC0415 - not on every system

    size = count * block_bytes
    descriptor = os.memfd_create("tokenpath-handover", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        return Rows(_mapped(descriptor, size), block_bytes), descriptor
    except OSError as error:
        os.close(descriptor)
        raise NoRoomError(f"no memory can be shared: {error.strerror}") from error


def received_rows(descriptor: int, count: int, block_bytes: int) -> Rows:
    """The same memory on the other side; closes the descriptor.

    Raises ``NoRoomError`` unless it has the right size and is sealed.
    """
    import fcntl  # noqa: PLC0415 - not on every system

    size = count * block_bytes
    try:
        with contextlib.suppress(OSError):
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if os.fstat(descriptor).st_size == size and seals & fcntl.F_SEAL_SHRINK:
                return Rows(_mapped(descriptor, size), block_bytes)
    finally:
        os.close(descriptor)
    raise NoRoomError("the memory that was passed is not of the right kind and size")


def _mapped(descriptor: int, size: int) -> Bytes:
    return np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
