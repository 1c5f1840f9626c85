"""Writing so that a full disk or a power cut leaves nothing half-visible.

Space is asked for before bytes are written, and every final name appears by a rename of something
already on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
RESERVE_BYTES = 4 << 20
"""Left free for the file system's own needs and for journals."""


class NoSpaceError(Exception):
    """The disk cannot hold what is to be written; becomes a ``PullError`` in ``pull``."""

    def __init__(self, folder: Path, needed_bytes: int) -> None:
        self.folder = folder
        self.needed_bytes = needed_bytes
        self.free_bytes = shutil.disk_usage(folder).free
        super().__init__(
            f"{folder} needs {needed_bytes:,} more bytes and has {self.free_bytes:,} free"
        )


def require_space(folder: Path, needed_bytes: int) -> None:
    """Raise ``NoSpaceError`` unless ``folder``'s disk has room for ``needed_bytes`` more."""
    if needed_bytes > 0 and shutil.disk_usage(folder).free < needed_bytes + RESERVE_BYTES:
        raise NoSpaceError(folder, needed_bytes)


@contextlib.contextmanager
def writing(folder: Path, needed_bytes: int) -> Iterator[None]:
    """Turn the operating system's "disk full" inside the block into ``NoSpaceError``."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise NoSpaceError(folder, needed_bytes) from error
        raise


def sync_folder(folder: Path) -> None:
    """Make renames and new names in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path``: after a crash it holds either all of it or what it held before."""
    beside = path.with_name(path.name + ".new")
    with writing(path.parent, len(data)), beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    sync_folder(path.parent)
