"""How long one thing has been going on, as far as its watcher can swear to it.

The watcher looks now and then and says what is going on and how much time has passed since it last
looked. Of that only so much counts as a punctual watcher would have let pass: a machine that was
suspended, or a process that was stopped, has passed time in which nothing could have made progress,
and must not be taken for stuck when it goes on.
"""

from __future__ import annotations


class Stall:
    """The age of whatever is going on. Holds no clock."""

    def __init__(self, limit_s: float, *, most_s: float) -> None:
        """``limit_s``: older is stuck. ``most_s``: what counts at most between two looks."""
        self._limit_s = limit_s
        self._most_s = most_s
        self._what: object | None = None
        self._age_s = 0.0

    def observe(self, what: object | None, passed_s: float) -> bool:
        """Whether ``what`` is stuck now. None is nothing; anything unequal to before is young.

        ``passed_s`` is the time since the last look. What is seen for the first time began at
        some moment since then, and is taken to have begun now.
        """
        if what is None or what != self._what:
            self._what, self._age_s = what, 0.0
            return False
        self._age_s += min(max(passed_s, 0.0), self._most_s)
        return self._age_s > self._limit_s
