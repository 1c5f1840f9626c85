"""Progress bars of the offline engine: on stderr, or in the notebook's cell."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from tokenpath.engine.build import Progress as LoadProgress


@contextlib.contextmanager
def loading_bar(name: str, *, visible: bool) -> Iterator[LoadProgress]:
    """A bar for loading a model, as the callback that ``build_engine`` takes."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with _bars(*columns, visible=visible) as bars:
        task = bars.add_task(f"Loading {name}", total=1.0)

        def report(what: str, fraction: float) -> None:
            bars.update(task, description=f"Loading {name}: {what}", completed=fraction)

        yield report


class BatchProgress:
    """Counts finished prompts and generated tokens of one batch."""

    def __init__(self, bars: Progress, prompts: int) -> None:
        self._bars = bars
        self._task = bars.add_task("Generating", total=prompts, tokens=0, rate=0.0)
        self._tokens = 0

    def add(self, *, tokens: int, finished: int) -> None:
        """So many more."""
        self._tokens += tokens
        elapsed = self._bars.tasks[self._task].elapsed
        rate = self._tokens / elapsed if elapsed else 0.0
        self._bars.update(self._task, advance=finished, tokens=self._tokens, rate=rate)


@contextlib.contextmanager
def batch_bar(prompts: int, *, visible: bool) -> Iterator[BatchProgress]:
    """A bar over the prompts of a batch, with tokens per second."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]:,} tokens, {task.fields[rate]:,.0f}/s"),
        TimeRemainingColumn(),
    )
    with _bars(*columns, visible=visible) as bars:
        yield BatchProgress(bars, prompts)


def _bars(
    *columns: TextColumn | BarColumn | MofNCompleteColumn | TimeRemainingColumn, visible: bool
) -> Progress:
    return Progress(*columns, console=Console(stderr=True), disable=not visible)
