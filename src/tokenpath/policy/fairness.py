"""Whose turn it is: the tokens that each tenant was served, as one virtual time for all.

A tenant's *share* is what it was served so far, in tokens over its weight; the least served goes
first. The prompt is charged when a sequence is admitted, so that the tokens it will take count
before they are computed, and output as it comes. ``now`` is the share of whoever was admitted last,
which was the least of all that waited. A tenant that comes to the queue starts there: time without
requests is no credit, and whoever is ahead does not get back by staying away for a moment.

Pure counting: nothing here knows of sequences or clocks.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

OUTPUT_COST: Final = 2
"""An output token costs twice one of the prompt: it is sampled in one step and read in the next."""
MAX_REMEMBERED: Final = 1024
"""Tenants without requests whose share is remembered, because it is ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fairness:
    """How one engine is shared, from the spec. The default is one tenant, and no ageing."""

    by_tokens: bool = False
    """Whether tenants are served in turn; else by priority and arrival alone."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of tenants that get more or less than 1."""
    priorities: Literal["shared", "own"] = "shared"
    """Whether a request's priority counts against everybody's, or only within its tenant's."""
    priority_ageing_s: float | None = None
    """A waiting request's priority improves by one every so often; None: never."""
    tenant_max_running: int | None = None
    tenant_max_blocks: int | None = None

    def __post_init__(self) -> None:
        for tenant, weight in self.weights.items():
            if not (weight > 0 and math.isfinite(weight)):
                raise ValueError(f"the weight of {tenant!r} must be a number above 0")
        if self.priority_ageing_s is not None and not self.priority_ageing_s > 0:
            raise ValueError("priority_ageing_s must be above 0")
        for name in ("tenant_max_running", "tenant_max_blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1")


class Shares:
    """What every tenant was served. Single-threaded."""

    def __init__(
        self, weights: Mapping[str, float] | None = None, *, counting: bool = True
    ) -> None:
        """Without ``counting`` every share is 0 for ever, so that nobody's turn depends on it."""
        self._weights = dict(weights or {})
        self._counting = counting
        self._served: dict[str, float] = {}
        self._live: dict[str, int] = {}
        self._now = 0.0

    @property
    def tenants(self) -> int:
        """How many have live sequences."""
        return len(self._live)

    @property
    def remembered(self) -> int:
        """How many are known, with live sequences or without."""
        return len(self._served.keys() | self._live.keys())

    def of(self, tenant: str) -> float:
        """A tenant's share; that of one who is not known is ``now``."""
        return self._served.get(tenant, self._now)

    def join(self, tenant: str) -> None:
        """A tenant has one more live sequence."""
        self._live[tenant] = self._live.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        """It has one less. Forgets who is not ahead of those that come new."""
        self._live[tenant] -= 1
        if self._live[tenant]:
            return
        del self._live[tenant]
        if not self._live:
            self._served.clear()
            self._now = 0.0
            return
        idle = self._served.keys() - self._live.keys()
        for other in [name for name in idle if self._served[name] <= self._now]:
            del self._served[other]
        ahead = self._served.keys() - self._live.keys()
        for other in heapq.nsmallest(len(ahead) - MAX_REMEMBERED, ahead, key=self.of):
            del self._served[other]

    def queued(self, tenant: str) -> None:
        """A tenant that had nothing in the queue has something now."""
        if self._counting:
            self._served[tenant] = max(self.of(tenant), self._now)

    def admitted(self, tenant: str) -> None:
        """The queue's next was this tenant's: from its share newcomers start."""
        self._now = max(self._now, self.of(tenant))

    def charge(self, tenant: str, tokens: float) -> None:
        """Count tokens served; negative ones give back what was charged and never served."""
        if self._counting:
            self._served[tenant] = self.of(tenant) + tokens / self._weights.get(tenant, 1.0)

    def check_integrity(self, live: Mapping[str, int]) -> None:
        """Raise ``AssertionError`` unless ``live`` has the counts of live sequences."""
        assert self._live == dict(live), "the shares count other sequences than there are"
        idle = self._served.keys() - self._live.keys()
        assert len(idle) <= MAX_REMEMBERED, "too many idle tenants are remembered"
