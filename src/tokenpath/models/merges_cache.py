"""Derived BPE merges, kept on disk: seconds of work that need doing once per model file.

A cache may be deleted, damaged or unwritable at any time. That costs the seconds again and never
changes a result: what is read back is checked whole before it is believed.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

VERSION = 1
"""Raise it whenever the same model file should give other merges than before."""

IdPair = tuple[int, int]

_DIGEST_BYTES = 32


def cache_path(cache_dir: Path, source: Path) -> Path:
    """Where the merges of a model file belong: a name that changes when the file does."""
    stat = source.stat()
    identity = f"{source.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0{VERSION}"
    return cache_dir / "merges" / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.bin"


def read_merges(path: Path, vocab_size: int) -> list[IdPair] | None:
    """Merges as pairs of token ids below ``vocab_size``; None if there are none to trust."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, payload = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if hashlib.sha256(payload).digest() != digest:
        return None
    ids = np.frombuffer(payload, dtype="<u4")
    if ids.size % 2 or (ids.size and int(ids.max()) >= vocab_size):
        return None
    return list(zip(ids[::2].tolist(), ids[1::2].tolist(), strict=True))


def write_merges(path: Path, merges: Iterable[IdPair]) -> None:
    """Write a whole file or none; another process may be reading it, or writing the same."""
    payload = np.asarray(list(merges), dtype="<u4").tobytes()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    except OSError:
        return
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(payload).digest() + payload)
        Path(temporary).replace(path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
