"""What a file's content must be, in the two ways in which origins say it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Digest:
    """A hash by its kind: ``sha256``, or ``git``, git's id of a file's content."""

    kind: Literal["sha256", "git"]
    value: str
    """Lower-case hexadecimal."""

    def __str__(self) -> str:
        return f"{'sha256' if self.kind == 'sha256' else 'git id'} {self.value}"

    def of(self, path: Path) -> Digest:
        """The digest of the same kind that a file has."""
        if self.kind == "sha256":
            digest = hashlib.sha256()
        else:
            digest = hashlib.sha1(usedforsecurity=False)
            digest.update(f"blob {path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
        return Digest(self.kind, digest.hexdigest())
