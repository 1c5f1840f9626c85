"""Where blocks lie on the disk, and which engine may use them.

::

    <root>/.lock                          held while a folder is being chosen
    <root>/gemma-3-270m-6f1c/             of one served model
        9a0b…-0/                          blocks of one fingerprint; the number tells replicas apart
            .lock                         held by the engine that uses the folder
            4e/4e07….kv                   a block, by its identity
            ….part                        being written

Two engines never share a folder: the second one gets the next number. Everything here may be
deleted at any time, and a folder that no engine of this model could use any more is deleted at the
next start. Folders are for their owner only (0700), and so are files (0600).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_MOST_REPLICAS = 256
_SUFFIX = ".kv"
_PART = ".part"
_PREFIX_CHARACTERS = 2
_NAME_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class KeptBlock:
    """A block's file that was found at the start; not looked into."""

    identity: bytes
    path: Path
    used: float
    """When it was written or last read, in the system's time."""


class BlockFolder:
    """A folder that this process alone uses until ``close``."""

    def __init__(self, path: Path, lock: int) -> None:
        """``lock`` is a locked descriptor; ``open_folder`` makes it."""
        self.path = path
        self._lock: int | None = lock

    def file(self, identity: bytes) -> Path:
        """Where a block lies. Its folder is there after ``prepare``."""
        name = identity.hex()
        return self.path / name[:_PREFIX_CHARACTERS] / f"{name}{_SUFFIX}"

    def part(self, identity: bytes) -> Path:
        """Where a block is written before it gets its name. Makes its folder; ``OSError``."""
        path = self.file(identity)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        return path.with_suffix(_PART)

    def blocks(self, size: int) -> list[KeptBlock]:
        """All files of ``size`` bytes, those used longest ago first; others are deleted."""
        kept = []
        for entry in self._files():
            path = Path(entry.path)
            try:
                stat = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            identity = _identity(path)
            whole = entry.is_file(follow_symlinks=False) and stat.st_size == size
            if identity is None or not whole or self.file(identity) != path:
                path.unlink(missing_ok=True)
            else:
                kept.append(KeptBlock(identity, path, stat.st_mtime))
        kept.sort(key=lambda block: block.used)
        return kept

    def clear(self) -> None:
        """Delete all blocks."""
        for folder in self._folders():
            shutil.rmtree(folder.path, ignore_errors=True)

    def close(self, *, keep: bool) -> None:
        """Let others use the folder; without ``keep`` its blocks are deleted first."""
        if self._lock is None:
            return
        if not keep:
            self.clear()
        os.close(self._lock)
        self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(keep=True)

    def _folders(self) -> list[os.DirEntry[str]]:
        with os.scandir(self.path) as entries:
            return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]

    def _files(self) -> Iterator[os.DirEntry[str]]:
        for folder in self._folders():
            with os.scandir(folder.path) as entries:
                yield from list(entries)


def open_folder(root: Path, *, model: str, fingerprint: bytes) -> BlockFolder:
    """Take a free folder for blocks of this fingerprint; make it if there is none.

    Deletes what other fingerprints of the same served model have left behind. Raises ``OSError`` if
    the root cannot be written, or is not ours alone.
    """
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = root / _folder_name(model)
    own.mkdir(mode=0o700, exist_ok=True)
    if own.is_symlink() or own.stat().st_uid != os.geteuid():
        raise PermissionError(f"{own} belongs to somebody else")
    own.chmod(0o700)
    choosing = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(choosing, fcntl.LOCK_EX)
        wanted = fingerprint.hex()[:_NAME_CHARACTERS]
        for other in own.iterdir():
            if not other.name.startswith(f"{wanted}-"):
                _delete_unused(other)
        for number in range(_MOST_REPLICAS):
            path = own / f"{wanted}-{number}"
            path.mkdir(mode=0o700, exist_ok=True)
            lock = _lock(path)
            if lock is not None:
                return BlockFolder(path, lock)
    finally:
        os.close(choosing)
    raise FileExistsError(f"all {_MOST_REPLICAS} folders of {own} are in use")


def _delete_unused(folder: Path) -> None:
    with contextlib.suppress(OSError):  # it may be no folder, or not ours
        lock = _lock(folder)
        if lock is not None:
            shutil.rmtree(folder)
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock; None if another process has it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(folder / ".lock", flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _folder_name(model: str) -> str:
    """A name that a file system takes, different for different models."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip(".-")[:_NAME_CHARACTERS]
    return f"{readable or 'model'}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"


def _identity(path: Path) -> bytes | None:
    try:
        return bytes.fromhex(path.stem) if path.suffix == _SUFFIX else None
    except ValueError:
        return None
