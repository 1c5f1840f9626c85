"""Keeps every answer of a sitting as a line of JSON, so that an interrupted one can go on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


class JournalError(Exception):
    """A journal that cannot be gone on with; the sentence says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One answer of one contender in one round."""

    contender: str
    round: int
    """From 1; 0 is what is measured once."""
    work: str
    value: float | None
    error: str | None
    at: str
    """UTC, ISO 8601."""


class Journal:
    """A file that begins with what the sitting is about and gets a line per entry."""

    def __init__(self, path: Path, sitting: Mapping[str, Any]) -> None:
        """Open or begin. Raises ``JournalError`` if the file is about another sitting."""
        self.path = path
        self.entries: list[Entry] = []
        if path.exists():
            self._read(dict(sitting))
        else:
            self._write({"sitting": dict(sitting)})

    def add(self, entry: Entry) -> None:
        """Keep an answer, at once."""
        self.entries.append(entry)
        self._write(asdict(entry))

    def has(self, contender: str, round_number: int, work: str) -> bool:
        """Whether this was answered, with a figure or an error."""
        return any(
            (entry.contender, entry.round, entry.work) == (contender, round_number, work)
            for entry in self.entries
        )

    def _read(self, sitting: dict[str, Any]) -> None:
        text = self.path.read_text()
        whole, _, torn = text.rpartition("\n")
        if torn:
            # The last write was cut short: what it said is measured again.
            self.path.write_text(f"{whole}\n" if whole else "")
        try:
            head, *entries = [json.loads(line) for line in whole.splitlines()]
            self.entries = [Entry(**entry) for entry in entries]
            found = head["sitting"]
        except (ValueError, TypeError, KeyError) as error:
            raise JournalError(f"{self.path} is no journal of bench-peers ({error})") from error
        if found != sitting:
            raise JournalError(
                f"{self.path} is a sitting of {found}, not of {sitting}; name another file"
            )

    def _write(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
