"""What a step costs by its number of rows, learnt while serving.

A row is one token that a step computes. How a step's time grows with them depends on the machine,
the model and the contexts of the moment, and nobody can be asked: so it is measured, by classes of
about the same number of rows. What was never measured, or not for a while, is taken to be as much
dearer than the next smaller class as it is on an ordinary CPU; so it is tried where that promises a
gain, and is measured then.
"""

from __future__ import annotations

from bisect import bisect_left

SLOPE = 0.05
"""Of the time of one row, what each further one costs until it is measured. Measured for Qwen2.5
1.5B in int8 (docs/benchmarks.md): 0.04 to 0.05."""
_CLASSES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96, 128, 192,
            256, 384, 512, 768, 1024)  # fmt: skip
_OWN = 0.2
"""How much of the difference to a new measurement a class takes over, on a logarithmic scale."""
_SHARED = 0.1
"""How much of it all others take over: contexts grow and machines slow down for all alike."""
_OUTLIER = 2.0
"""A step that takes more than so many times what was expected counts as so much."""
_KEPT_STEPS = 1024
"""A class that is not measured for so many steps is forgotten."""


class StepCosts:
    """Seconds of a step by its rows."""

    def __init__(self, slope: float = SLOPE) -> None:
        self._slope = slope
        self._units: list[float | None] = [None] * len(_CLASSES)
        """Seconds of a class, in parts of what it should take by the slope."""
        self._seen = [0] * len(_CLASSES)
        self._steps = 0

    def measured(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        if rows < 1 or seconds <= 0:
            return
        self._steps += 1
        index = _class(rows)
        unit, known = seconds / self._expected(rows), self._units[index]
        if known is None:
            self._units[index] = unit
        else:
            ratio = max(1 / _OUTLIER, min(_OUTLIER, unit / known))
            shared = ratio**_SHARED
            self._units = [None if other is None else other * shared for other in self._units]
            self._units[index] = known * ratio**_OWN
        self._seen[index] = self._steps
        oldest = self._steps - _KEPT_STEPS
        for other, seen in enumerate(self._seen):
            if seen <= oldest:
                self._units[other] = None

    def seconds(self, rows: int) -> float | None:
        """What a step of so many rows would take; None before anything was measured."""
        index = _class(rows)
        below = [unit for unit in self._units[: index + 1] if unit is not None]
        above = [unit for unit in self._units[index + 1 :] if unit is not None]
        if not below and not above:
            return None
        return self._expected(rows) * (below[-1] if below else above[0])

    def _expected(self, rows: int) -> float:
        return 1 + self._slope * (rows - 1)


def _class(rows: int) -> int:
    """The first class that is not below ``rows``, or the last one."""
    return min(bisect_left(_CLASSES, rows), len(_CLASSES) - 1)
