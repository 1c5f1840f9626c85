"""What every origin hands to ``pull`` when it has all bytes of a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Staged:
    """A complete, checked model in the workspace, not yet visible to anybody."""

    folder: Path
    model: str
    """The GGUF file's name in ``folder``; ``.`` when the folder itself is the model."""
    origin: str
    """Where the bytes came from, for the manifest."""
