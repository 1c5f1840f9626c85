"""How slow work tells how far it is, without knowing whether anybody watches.

Pulling and loading take a ``Progress``; the terminal's implementations are in
``progress_terminal``, so that a server process never loads the library that draws bars.
"""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Watches one piece of work at a time: ``start``, any number of ``advance``, ``finish``."""

    def start(self, total: int | None, label: str) -> None:
        """Begin a piece of work of ``total`` bytes; None if nobody knows."""

    def advance(self, amount: int) -> None:
        """``amount`` more bytes are done; negative when some have to be done again."""

    def finish(self) -> None:
        """The work ended, well or not. Without a ``start`` before it, nothing happens."""

    def note(self, text: str) -> None:
        """Something worth a line: a retry, a wait for another process."""


class SilentProgress:
    """Nobody watches."""

    def start(self, total: int | None, label: str) -> None:
        """Ignored."""

    def advance(self, amount: int) -> None:
        """Ignored."""

    def finish(self) -> None:
        """Ignored."""

    def note(self, text: str) -> None:
        """Ignored."""
