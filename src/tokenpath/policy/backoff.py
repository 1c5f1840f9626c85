"""When a replica that ended is started again, and when it is given up.

A replica that never gets ready is broken (a wrong file, too little memory): a few attempts, then it
is given up with its reason, because restarting for ever only hides it. One that was ready and then
died is worth restarting always, but more slowly each time until it has stayed up for a while.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BackoffConfig:
    """How patient the supervisor is."""

    initial_s: float = 0.5
    """Pause before the first restart."""
    factor: float = 2.0
    """Each further pause is this many times longer."""
    max_s: float = 30.0
    """Longest pause."""
    stable_s: float = 60.0
    """A run that was ready for this long is forgiven all failures before it."""
    failed_starts: int = 5
    """After this many starts in a row that never got ready, give up."""


class Backoff:
    """Counts the failures of one replica. Holds no clock: durations come in, a pause comes out."""

    def __init__(self, config: BackoffConfig) -> None:
        self.config = config
        self._next_s = config.initial_s
        self._failed_starts = 0

    def after_exit(self, ready_s: float | None) -> float | None:
        """Seconds to wait before the next start, or None to give up.

        ``ready_s`` is how long the run that just ended had been ready, None if it never was.
        """
        config = self.config
        if ready_s is None:
            self._failed_starts += 1
            if self._failed_starts >= config.failed_starts:
                return None
        else:
            self._failed_starts = 0
            if ready_s >= config.stable_s:
                self._next_s = config.initial_s
        pause = min(self._next_s, config.max_s)
        self._next_s = min(pause * config.factor, config.max_s)
        return pause
