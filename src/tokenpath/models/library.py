"""The models folder: what has been pulled, where a source's files lie, and who is pulling.

::

    <models_dir>/gemma-3-270m/tokenpath.json        the manifest: complete, checked, and from where
    <models_dir>/gemma-3-270m/gemma-3-270m-….gguf
    <models_dir>/.partial/gemma-3-270m/…            a pull that has not ended yet
    <models_dir>/.partial/gemma-3-270m.lock         held by the process that pulls it

A model's folder appears by one rename, manifest included, so a folder without a manifest is not
ours and is left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import msgspec

from tokenpath.models import disk
from tokenpath.models.spelling import PulledSource
from tokenpath.protocol.errors import ModelError

MANIFEST = "tokenpath.json"
_PARTIAL = ".partial"


class Manifest(msgspec.Struct, frozen=True):
    """What is known of a pulled model."""

    source: str
    """The canonical text of the source it was pulled as."""
    origin: str
    """Where the bytes came from."""
    model: str
    """The GGUF file's name in the folder; ``.`` when the folder itself is the model."""
    files: dict[str, int]
    """Size in bytes of each file, by its path in the folder."""


class PulledModel(msgspec.Struct, frozen=True):
    """A model that is ready to be opened."""

    manifest: Manifest
    folder: Path

    @property
    def path(self) -> Path:
        """The GGUF file or the Hugging Face folder."""
        return self.folder if self.manifest.model == "." else self.folder / self.manifest.model

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return sum(self.manifest.files.values())


class Library:
    """Finds, publishes and removes the models under one folder."""

    def __init__(self, models_dir: Path) -> None:
        self._root = models_dir

    def find(self, source: PulledSource) -> PulledModel | None:
        """The pulled model of this source.

        Raises ``ModelError`` if its files are gone or have another size than when they were
        pulled: somebody else's hand, which a new pull would hide.
        """
        model = self._read(self._folder(source))
        if model is not None:
            _check_files(model)
        return model

    def models(self) -> list[PulledModel]:
        """All pulled models, by source."""
        if not self._root.is_dir():
            return []
        folders = (f for f in self._root.iterdir() if f.is_dir() and not f.name.startswith("."))
        found = (self._read(folder) for folder in folders)
        return sorted((m for m in found if m is not None), key=lambda m: m.manifest.source)

    def workspace(self, source: PulledSource) -> Path:
        """The folder, made if needed, in which an unfinished pull keeps what it has."""
        folder = self._root / _PARTIAL / _slug(source)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def publish(
        self, source: PulledSource, staged: Path, *, origin: str, model: str
    ) -> PulledModel:
        """Make ``staged``, a finished folder in the workspace, the pulled model.

        Writes its manifest, renames the folder in one step, and removes the workspace.
        """
        files = {
            path.relative_to(staged).as_posix(): path.stat().st_size
            for path in sorted(staged.rglob("*"))
            if path.is_file()
        }
        manifest = Manifest(source=source.text, origin=origin, model=model, files=files)
        disk.write_whole(staged / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
        target = self._folder(source)
        if target.exists():
            raise ModelError(f"{target} is in the way: it is not a model that was pulled; move it")
        staged.rename(target)
        disk.sync_folder(self._root)
        shutil.rmtree(self._root / _PARTIAL / _slug(source), ignore_errors=True)
        return PulledModel(manifest, target)

    def remove(self, source: PulledSource) -> int:
        """Delete the pulled model and what an unfinished pull left; returns the bytes freed.

        Touches nothing outside the models folder, not even through symbolic links.
        """
        freed = 0
        with self.lock(source):
            model = self._read(self._folder(source))
            targets = [self._root / _PARTIAL / _slug(source)]
            if model is not None:
                # Out of sight in one step, so that nobody opens a model with files missing.
                doomed = self._root / _PARTIAL / f"{_slug(source)}.removed"
                _delete(doomed)
                model.folder.rename(doomed)
                targets.append(doomed)
            for target in targets:
                freed += _size(target)
                _delete(target)
        return freed

    def partial_bytes(self, source: PulledSource) -> int:
        """What an unfinished pull of this source has on disk."""
        return _size(self._root / _PARTIAL / _slug(source))

    @contextlib.contextmanager
    def lock(
        self, source: PulledSource, *, on_wait: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Be the only process that pulls or removes this model; waits for another.

        ``on_wait`` is called once before waiting. The kernel lets go of the lock when its holder
        dies, so there is no stale lock to clean up; the empty file stays, since removing it would
        let two processes hold two locks of one name.
        """
        path = self._root / _PARTIAL / f"{_slug(source)}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _folder(self, source: PulledSource) -> Path:
        return self._root / _slug(source)

    def _read(self, folder: Path) -> PulledModel | None:
        try:
            data = (folder / MANIFEST).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            manifest = msgspec.json.decode(data, type=Manifest)
        except msgspec.DecodeError as error:
            raise ModelError(
                f"{folder / MANIFEST} is not readable ({error}); remove the folder and pull again"
            ) from error
        if ".." in PurePosixPath(manifest.model).parts or manifest.model.startswith("/"):
            raise ModelError(f"{folder / MANIFEST} names a file outside its folder")
        return PulledModel(manifest, folder)


def _check_files(model: PulledModel) -> None:
    for name, size in model.manifest.files.items():
        path = model.folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found:,} bytes instead of {size:,}"
            raise ModelError(
                f"{path} {state}; run `tokenpath models rm {model.manifest.source}` and pull again"
            )


def _slug(source: PulledSource) -> str:
    # One folder name per source: `/` cannot be in a name, `:` confuses PATH-like variables.
    return source.text.replace("/", "--").replace(":", "+")


def _delete(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def _size(folder: Path) -> int:
    if folder.is_symlink():
        return 0
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
