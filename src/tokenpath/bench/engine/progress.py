"""What a measurement is doing now: a line that is redrawn on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tokenpath.models.progress import Progress as PullProgress
from tokenpath.models.progress_terminal import terminal_progress

_QUARTERS = 4
"""A log is told of a load's progress so many times."""


class Reporter:
    """Use it as a context manager; nothing of it stays on a terminal."""

    def __init__(self, model: str, console: Console | None = None) -> None:
        self.pulling: PullProgress = terminal_progress()
        """For a model that must be downloaded first."""
        self._model = model
        self._console = Console(stderr=True) if console is None else console
        self._live: Live | None = None
        self._told: tuple[str, int] | None = None

    def loading(self, what: str, fraction: float) -> None:
        """As ``build_engine`` calls it."""
        text = f"loading {self._model}: {what}"
        if self._console.is_terminal:
            self._show(f"{text} {fraction:.0%}")
            return
        quarter = (what, int(fraction * _QUARTERS))
        if quarter != self._told:
            self._told = quarter
            self._show(f"{text} {fraction:.0%}")

    def say(self, text: str) -> None:
        """A few words on what begins now."""
        self._show(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def _show(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(Text(text), soft_wrap=True)
            return
        if self._live is None:
            # Redrawn by this call alone: a thread of its own would take time from what is measured.
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(Text(text), refresh=True)
