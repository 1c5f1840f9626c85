"""How a run is going, while it goes: one live line on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import asyncio
from collections import deque

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tokenpath.bench.load import Run

_LIVE_INTERVAL_S = 0.25
_PLAIN_INTERVAL_S = 10.0
_RATE_WINDOW_S = 5.0


class Progress:
    """Describes a run; the token rate is of the last seconds."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seen: deque[tuple[float, int]] = deque([(run.clock(), 0)])

    def line(self) -> str:
        """Return one sentence on the state of the run."""
        run = self._run
        if run.warming_up:
            self._seen = deque([(run.clock(), 0)])
            return f"warming up with {run.settings.warmup} requests"
        measured = run.measured
        parts = [
            f"{run.elapsed_s:.0f} s: {measured.ended}/{run.settings.requests} requests ended",
            f"{len(run.live)} in flight",
            f"about {self._tokens_per_s():,.0f} tokens/s",
            f"{measured.failed} errors",
        ]
        if measured.overflowed:
            parts.append(f"{measured.overflowed} not sent")
        return ", ".join(parts)

    def _tokens_per_s(self) -> float:
        """Output events of the last seconds, times the tokens an event was found to carry."""
        now, events = self._run.clock(), self._run.output_events
        self._seen.append((now, events))
        while len(self._seen) > 2 and now - self._seen[0][0] > _RATE_WINDOW_S:  # noqa: PLR2004 a rate needs two
            self._seen.popleft()
        since, before = self._seen[0]
        measured = self._run.measured
        ratio = 1.0
        if measured.output_events and measured.output_tokens:
            ratio = measured.output_tokens / measured.output_events
        return (events - before) * ratio / (now - since) if now > since else 0.0


async def show(run: Run, console: Console) -> None:
    """Show the progress of ``run`` until cancelled."""
    progress = Progress(run)
    if not console.is_terminal:
        while True:
            await asyncio.sleep(_PLAIN_INTERVAL_S)
            console.print(Text(progress.line()), soft_wrap=True)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            live.update(Text(progress.line()), refresh=True)
            await asyncio.sleep(_LIVE_INTERVAL_S)
