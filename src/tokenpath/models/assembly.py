"""Joins parts into one file so that a crash costs at most the part that was being added.

A journal beside the file records, after each part is on the disk, where that part ends. On the
next run whatever lies beyond the last recorded end is cut off and the rest is kept. The sha256 of
the whole is computed while the bytes pass.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tokenpath.models import disk
from tokenpath.protocol.errors import PullError

_CHUNK_BYTES = 1 << 20


class _Journal(msgspec.Struct):
    plan: str
    """Fingerprint of what is being assembled; another plan starts over."""
    ends: list[int] = []
    """Offset in bytes at which each finished part ends."""
    fetched_bytes: int = 0
    """What the finished parts cost to download, for a progress bar."""


class Assembly:
    """One file that grows part by part. Only one process may hold it (see ``Library.lock``)."""

    def __init__(self, path: Path, *, plan: str) -> None:
        """``path`` is the growing file; ``plan`` identifies the exact list of parts."""
        self._path = path
        self._journal_path = path.with_name(path.name + ".journal")
        self._journal = self._load(plan)
        self._hash = hashlib.sha256()
        with path.open("ab") as file:
            file.truncate(self.end)
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                self._hash.update(chunk)

    @property
    def parts(self) -> int:
        """How many parts are in the file."""
        return len(self._journal.ends)

    @property
    def end(self) -> int:
        """How long the file is."""
        return self._journal.ends[-1] if self._journal.ends else 0

    @property
    def fetched_bytes(self) -> int:
        """What the parts in the file cost to download."""
        return self._journal.fetched_bytes

    def append(self, chunks: Iterator[bytes], *, needed_bytes: int, fetched_bytes: int) -> None:
        """Add the next part, of ``needed_bytes``, which took ``fetched_bytes`` to download.

        Raises ``NoSpaceError`` on a full disk; the part is then not in the file.
        """
        disk.require_space(self._path.parent, needed_bytes)
        digest = self._hash.copy()
        with disk.writing(self._path.parent, needed_bytes), self._path.open("r+b") as file:
            # An append that failed before, in this process, may have left bytes behind.
            file.truncate(self.end)
            file.seek(self.end)
            for chunk in chunks:
                digest.update(chunk)
                file.write(chunk)
            end = file.tell()
            file.flush()
            os.fsync(file.fileno())
        journal = _Journal(
            self._journal.plan,
            [*self._journal.ends, end],
            self._journal.fetched_bytes + fetched_bytes,
        )
        disk.write_whole(self._journal_path, msgspec.json.encode(journal))
        self._journal, self._hash = journal, digest

    def finish(self, target: Path, *, expected_bytes: int, sha256: str) -> None:
        """Check the whole and move it to ``target``.

        Raises ``PullError`` if it has another size or hash than it should; it is then removed,
        since no further part can mend it.
        """
        size, digest = self.end, self._hash.hexdigest()
        if (size, digest) != (expected_bytes, sha256):
            self._path.unlink()
            self._journal_path.unlink(missing_ok=True)
            what = (
                f"{size:,} bytes instead of {expected_bytes:,}"
                if size != expected_bytes
                else f"sha256 {digest} instead of {sha256}"
            )
            raise PullError(f"{target.name}, joined from its parts, has {what}; it was not kept")
        self._path.replace(target)
        disk.sync_folder(target.parent)
        self._journal_path.unlink(missing_ok=True)

    def _load(self, plan: str) -> _Journal:
        try:
            journal = msgspec.json.decode(self._journal_path.read_bytes(), type=_Journal)
        except (FileNotFoundError, msgspec.DecodeError):
            return _Journal(plan)
        longest = self._path.stat().st_size if self._path.exists() else 0
        sound = journal.plan == plan and (not journal.ends or journal.ends[-1] <= longest)
        return journal if sound else _Journal(plan)
