"""Progress for people: a bar where a terminal can redraw, plain lines in logs and pipes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichBars

from tokenpath.models.progress import Progress
from tokenpath.models.sizes import human_bytes

_LINE_EVERY_S = 5.0


def terminal_progress(stream: TextIO | None = None) -> Progress:
    """The implementation that suits ``stream`` (by default stderr, so that stdout stays data)."""
    stream = sys.stderr if stream is None else stream
    return BarProgress(stream) if stream.isatty() else LineProgress(stream)


class BarProgress:
    """Bytes, speed and time remaining, redrawn in place."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream)
        self._bars: RichBars | None = None
        self._task = TaskID(0)

    def start(self, total: int | None, label: str) -> None:
        """See ``Progress``."""
        self.finish()
        self._bars = RichBars(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bars.add_task(label, total=total)
        self._bars.start()

    def advance(self, amount: int) -> None:
        """See ``Progress``."""
        if self._bars is not None:
            self._bars.advance(self._task, amount)

    def finish(self) -> None:
        """See ``Progress``."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def note(self, text: str) -> None:
        """See ``Progress``."""
        self._console.print(text, markup=False, highlight=False)


class LineProgress:
    """A line at the start, one every few seconds, one at the end."""

    def __init__(
        self,
        stream: TextIO,
        *,
        clock: Callable[[], float] = time.monotonic,
        every_s: float = _LINE_EVERY_S,
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._every_s = every_s
        self._label: str | None = None
        self._total: int | None = None
        self._done = 0
        self._started_s = 0.0
        self._printed_s = 0.0

    def start(self, total: int | None, label: str) -> None:
        """See ``Progress``."""
        self.finish()
        self._label, self._total, self._done = label, total, 0
        self._started_s = self._printed_s = self._clock()
        size = "" if total is None else f" ({human_bytes(total)})"
        self.note(f"{label}{size} …")

    def advance(self, amount: int) -> None:
        """See ``Progress``."""
        self._done += amount
        if self._label is not None and self._clock() - self._printed_s >= self._every_s:
            self._printed_s = self._clock()
            self.note(self._line())

    def finish(self) -> None:
        """See ``Progress``."""
        if self._label is not None:
            self.note(self._line())
            self._label = None

    def note(self, text: str) -> None:
        """See ``Progress``."""
        print(text, file=self._stream, flush=True)

    def _line(self) -> str:
        seconds = self._clock() - self._started_s
        of = "" if self._total is None else f" of {human_bytes(self._total)}"
        speed = f", {human_bytes(int(self._done / seconds))}/s" if seconds > 0 else ""
        return f"{self._label}: {human_bytes(self._done)}{of}{speed}"
