"""The queue: who is admitted next.

In order of urgency, then of the tenant's share, then of arrival. Urgency is the request's priority,
improved by one for every ``priority_ageing_s`` that it has waited, but never beyond the most
urgent that waits: so whatever is passed over for long enough comes to stand among the most urgent,
where turns are taken by shares, and a tenant with a long queue does not get ahead of others by
waiting. With priorities of their own, tenants come first and urgency orders within each.

Sequences of one tenant and one priority never change their order among themselves, so only the
first of each such line is ever compared.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from tokenpath.policy.fairness import Fairness, Shares
from tokenpath.policy.sequence import Sequence

_arrival = attrgetter("arrival")
Key = tuple[float, float, int]


class WaitingQueue:
    """The sequences that wait, preempted ones among them. Single-threaded."""

    def __init__(self, fairness: Fairness, shares: Shares) -> None:
        self._ageing_s = fairness.priority_ageing_s
        self._own = fairness.priorities == "own"
        self._shares = shares
        self._lines: dict[tuple[str, int], list[Sequence]] = {}
        """By tenant and priority, in order of arrival."""
        self._waiting: dict[str, int] = {}
        """Sequences of each tenant here."""
        self._size = 0
        self.tokens = 0
        """What they have left to compute, before any cache hit."""

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        """All, in no order that matters."""
        for line in self._lines.values():
            yield from line

    def add(self, sequence: Sequence) -> None:
        """Take a sequence, new or preempted, into its place."""
        tenant = sequence.tenant
        insort(self._lines.setdefault((tenant, sequence.priority), []), sequence, key=_arrival)
        if tenant not in self._waiting:
            self._shares.queued(tenant)
        self._waiting[tenant] = self._waiting.get(tenant, 0) + 1
        self._size += 1
        self.tokens += sequence.uncomputed

    def remove(self, sequence: Sequence) -> None:
        """Give a sequence up. Raises ``ValueError`` if it is not here."""
        where = sequence.tenant, sequence.priority
        line = self._lines.get(where, [])
        place = bisect_left(line, sequence.arrival, key=_arrival)
        if place == len(line) or line[place] is not sequence:
            raise ValueError(f"{sequence.request_id} does not wait")
        del line[place]
        if not line:
            del self._lines[where]
        self._waiting[sequence.tenant] -= 1
        if not self._waiting[sequence.tenant]:
            del self._waiting[sequence.tenant]
        self._size -= 1
        self.tokens -= sequence.uncomputed

    def urgency(self, sequence: Sequence, now: float) -> int:
        """A waiting sequence's priority with what it has gained by waiting; lower is more urgent.

        0 for all where priorities are the tenants' own: between tenants they say nothing.
        """
        return 0 if self._own else self._aged(sequence, now, self._floors())

    def in_order(self, now: float) -> Iterator[Sequence]:
        """The queue from its head, while it and the shares may change.

        A sequence that was given out may be removed and its tenant be charged before the next is
        asked for; others must stay, and no share may fall.
        """
        floors = self._floors()
        heap: list[tuple[Key, int, int]] = []
        lines = [list(line) for line in self._lines.values()]
        for index, line in enumerate(lines):
            heap.append((self._key(line[0], now, floors), index, 0))
        heapq.heapify(heap)
        while heap:
            key, index, place = heap[0]
            sequence = lines[index][place]
            current = self._key(sequence, now, floors)
            if current > key:  # its tenant was served since
                heapq.heapreplace(heap, (current, index, place))
                continue
            if place + 1 < len(lines[index]):
                following = self._key(lines[index][place + 1], now, floors)
                heapq.heapreplace(heap, (following, index, place + 1))
            else:
                heapq.heappop(heap)
            yield sequence

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` naming the first broken invariant."""
        here = list(self)
        assert self._size == len(here), "the queue's length is wrong"
        assert self.tokens == sum(s.uncomputed for s in here), (
            "waiting_tokens is not the sum over the queue"
        )
        counts: dict[str, int] = {}
        for (tenant, priority), line in self._lines.items():
            assert line, "an empty line is kept"
            assert sorted(line, key=_arrival) == line, "waiting is out of order"
            assert all(s.tenant == tenant and s.priority == priority for s in line), "a wrong line"
            counts[tenant] = counts.get(tenant, 0) + len(line)
        assert counts == self._waiting, "a tenant's sequences are miscounted"

    def _floors(self) -> dict[str, int]:
        """The most urgent priority that each tenant competes with."""
        floors: dict[str, int] = {}
        for tenant, priority in self._lines:
            floors[tenant] = min(priority, floors.get(tenant, priority))
        if not self._own and floors:
            floors = dict.fromkeys(floors, min(floors.values()))
        return floors

    def _aged(self, sequence: Sequence, now: float, floors: dict[str, int]) -> int:
        if self._ageing_s is None:
            return sequence.priority
        gained = max(0, int((now - sequence.queued_at) / self._ageing_s))
        return max(floors.get(sequence.tenant, sequence.priority), sequence.priority - gained)

    def _key(self, sequence: Sequence, now: float, floors: dict[str, int]) -> Key:
        urgency, share = self._aged(sequence, now, floors), self._shares.of(sequence.tenant)
        first, second = (share, urgency) if self._own else (urgency, share)
        return first, second, sequence.arrival
