"""From observations to figures: exact percentiles, token totals, goodput.

Only requests that ended well count towards latencies; the others are counted as errors, so that a
server cannot look fast by failing. Everything kept is bounded.
"""

from __future__ import annotations

import random
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from tokenpath.bench.observe import Observation, RequestError
from tokenpath.protocol.errors import SpecError

MAX_SAMPLES = 5_000_000
"""Values kept of one quantity, 40 MB. Beyond it a uniform sample of that many is kept, and said."""

QUANTILES = (0.5, 0.9, 0.99)


class Distribution(msgspec.Struct, frozen=True):
    """A quantity's figures; seconds unless its name says otherwise. None when there are none."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None
    exact: bool
    """False when more values came than are kept: the percentiles are then of a sample."""


def quantiles(values: Sequence[float], fractions: Iterable[float]) -> list[float]:
    """Return the quantiles of one or more values, interpolated linearly between neighbours.

    ``fractions`` are within 0..1. This is NumPy's default method.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    found = []
    for fraction in fractions:
        place = fraction * (len(ordered) - 1)
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        low, high = float(ordered[below]), float(ordered[above])
        found.append(low + (high - low) * (place - below))
    return found


class Samples:
    """Values of one quantity: count, sum and maximum exactly, and the values up to a bound."""

    def __init__(self, bound: int = MAX_SAMPLES) -> None:
        self._bound = bound
        self._kept = array("d")
        self._count = 0
        self._sum = 0.0
        self._max = float("-inf")
        # Not for secrets: which values a sample keeps.
        self._random = random.Random(0)  # noqa: S311

    def extend(self, values: Sequence[float]) -> None:
        """Add values."""
        if not values:
            return
        self._sum += sum(values)
        self._max = max(self._max, *values)
        room = max(0, self._bound - len(self._kept))
        self._kept.extend(values[:room])
        self._count += min(room, len(values))
        for value in values[room:]:
            self._count += 1
            place = self._random.randrange(self._count)
            if place < self._bound:
                self._kept[place] = value

    def add(self, value: float) -> None:
        """Add one value."""
        self.extend((value,))

    def distribution(self) -> Distribution:
        """Return the figures so far."""
        if not self._count:
            return Distribution(0, None, None, None, None, None, exact=True)
        p50, p90, p99 = quantiles(self._kept, QUANTILES)
        return Distribution(
            count=self._count,
            mean=self._sum / self._count,
            p50=p50,
            p90=p90,
            p99=p99,
            max=self._max,
            exact=self._count <= self._bound,
        )


class Limits(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a request must meet to count as good, in seconds; None does not ask."""

    ttft: float | None = None
    """Until the first output event."""
    itl: float | None = None
    """The longest gap between its output events."""
    tpot: float | None = None
    """Mean time per output token after the first event."""
    e2e: float | None = None
    """Until the end of the response."""

    @classmethod
    def parse(cls, text: str) -> Limits:
        """Read ``ttft=0.5,itl=0.1,tpot=0.05,e2e=30``. Raises ``SpecError``."""
        found: dict[str, float] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*(ttft|itl|tpot|e2e)\s*=\s*(\d+(?:\.\d*)?|\.\d+)\s*", part)
            if match is None:
                raise SpecError(
                    "--limits must be like ttft=0.5,itl=0.1,tpot=0.05,e2e=30 (seconds), "
                    f"not {part[:40]!r}"
                )
            if match[1] in found:
                raise SpecError(f"--limits names {match[1]} twice")
            found[match[1]] = float(match[2])
        return cls(**found)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a finished request measured, in seconds from the moment it was sent."""

    ttft: float
    e2e: float
    gaps: Sequence[float]
    tpot: float | None
    """None when the server reported no usage or there was one token."""

    def meets(self, limits: Limits) -> bool:
        """Whether it is within all limits. An unknown figure does not meet a limit."""
        longest = max(self.gaps, default=0.0)
        return (
            (limits.ttft is None or self.ttft <= limits.ttft)
            and (limits.e2e is None or self.e2e <= limits.e2e)
            and (limits.itl is None or longest <= limits.itl)
            and (limits.tpot is None or (self.tpot is not None and self.tpot <= limits.tpot))
        )


@dataclass(slots=True)
class Measurements:
    """Everything measured in a run, added to as requests end."""

    limits: Limits = field(default_factory=Limits)
    ttft: Samples = field(default_factory=Samples)
    itl: Samples = field(default_factory=Samples)
    tpot: Samples = field(default_factory=Samples)
    e2e: Samples = field(default_factory=Samples)
    lateness: Samples = field(default_factory=Samples)
    """Open loop: from the moment a request was due until it was sent."""
    loop_lag: Samples = field(default_factory=Samples)
    """How late the generator's own event loop woke up, looked at all the time."""
    sent: int = 0
    completed: int = 0
    good: int = 0
    interrupted: int = 0
    """In flight when the run was stopped by hand."""
    overflowed: int = 0
    """Open loop: due while ``--max-in-flight`` were running, and therefore not sent."""
    errors: Counter[tuple[str, int | None, str | None]] = field(default_factory=Counter)
    error_examples: dict[tuple[str, int | None, str | None], str] = field(default_factory=dict)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    output_events: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    without_usage: int = 0
    without_cached_count: int = 0
    without_output: int = 0
    """Ended well, but no event carried tokens: they have no time to first token."""
    unexpected_lengths: int = 0
    """Answers with another number of tokens than was asked for."""
    planned_prompt_tokens: int = 0
    """What the prompts behind ``prompt_tokens`` were meant to have."""

    @property
    def failed(self) -> int:
        """Requests that ended in an error."""
        return self.errors.total()

    @property
    def ended(self) -> int:
        """Requests that ended, well or not."""
        return self.completed + self.failed

    def add(
        self,
        observed: Observation,
        *,
        sent_at: float,
        ended_at: float,
        asked_prompt: int,
        asked_output: int,
    ) -> None:
        """Count a request that ended by itself (not one that was interrupted)."""
        if observed.error is not None:
            self._add_error(observed.error)
            return
        self.completed += 1
        self.output_events += observed.output_events
        self.finish_reasons[observed.finish_reason or "unknown"] += 1
        output = self._add_usage(observed, asked_prompt, asked_output)
        self.e2e.add(ended_at - sent_at)
        if observed.first_output_at is None or observed.last_output_at is None:
            self.without_output += 1
            return
        tpot = None
        if output is not None and output > 1:
            tpot = (observed.last_output_at - observed.first_output_at) / (output - 1)
            self.tpot.add(tpot)
        answer = Answer(observed.first_output_at - sent_at, ended_at - sent_at, observed.gaps, tpot)
        self.ttft.add(answer.ttft)
        self.itl.extend(answer.gaps)
        self.good += answer.meets(self.limits)

    def _add_error(self, error: RequestError) -> None:
        key = (str(error.kind), error.status, error.code)
        self.errors[key] += 1
        self.error_examples.setdefault(key, error.message[:300])

    def _add_usage(self, observed: Observation, asked_prompt: int, asked_output: int) -> int | None:
        usage = observed.usage
        if usage is None or usage.prompt_tokens is None or usage.completion_tokens is None:
            self.without_usage += 1
            return None
        self.prompt_tokens += usage.prompt_tokens
        self.output_tokens += usage.completion_tokens
        self.unexpected_lengths += usage.completion_tokens != asked_output
        self.planned_prompt_tokens += asked_prompt
        if usage.cached_tokens is None:
            self.without_cached_count += 1
        else:
            self.cached_tokens += usage.cached_tokens
        return usage.completion_tokens
