"""JSON pointers as ``$ref`` writes them: ``#/$defs/node/properties/next``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote


@dataclass(frozen=True, slots=True)
class Found:
    """What a pointer leads to."""

    schema: Any
    place: str
    """The pointer in the spelling that ``child`` gives."""


def child(pointer: str, name: str) -> str:
    """The pointer to a member of what ``pointer`` leads to."""
    return f"{pointer}/{name.replace('~', '~0').replace('/', '~1')}"


def resolve(root: Any, pointer: str) -> Found | None:
    """What stands at a pointer within ``root``; None if nothing does.

    ``pointer`` is ``#`` or begins with ``#/``; its parts may be percent-encoded, as in a URI.
    """
    here, place = root, "#"
    for part in pointer.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(here, dict) and name in here:
            here = here[name]
        elif isinstance(here, list) and name.isdecimal() and int(name) < len(here):
            here = here[int(name)]
        else:
            return None
        place = child(place, name)
    return Found(here, place)
