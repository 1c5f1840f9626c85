"""Which inputs the next step of a pooling engine reads.

Inputs have no order among themselves, and none needs another; so a step is filled to its budget of
tokens from all live requests. A request with thousands of inputs must not hold up one with a single
input: the next input is always taken from the request that has been served the fewest tokens, and a
new request starts level with the one that has been served least. Of a request the longest inputs
come first, so that inputs of like length meet in a step.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class PoolingJob:
    """The inputs of one request that no step has taken yet. Owned and mutated by the queue."""

    request_id: str
    priority: int
    """Lower is served first; only equal ones share."""
    arrival: int
    served: int
    """Tokens taken so far, on top of where the others stood when it came."""
    waiting: list[tuple[int, int]] = field(default_factory=list)
    """(tokens, place) of each input, the longest last."""
    started: bool = False
    """Whether any of its inputs was taken."""

    @property
    def waiting_tokens(self) -> int:
        return sum(tokens for tokens, _ in self.waiting)


@dataclass(frozen=True, slots=True)
class Taken:
    """One input of a step."""

    request_id: str
    place: int
    tokens: int


class PoolingQueue:
    """The waiting inputs of all requests. Plain data, no clock: the same calls, the same steps."""

    def __init__(self, *, max_step_tokens: int, max_step_inputs: int) -> None:
        """Bounds of one step; a single input may be longer than the first."""
        self._max_step_tokens = max_step_tokens
        self._max_step_inputs = max_step_inputs
        self._jobs: dict[str, PoolingJob] = {}
        self._arrivals = 0

    @property
    def waiting_jobs(self) -> int:
        """Requests of which no input was taken yet."""
        return sum(not job.started for job in self._jobs.values())

    @property
    def jobs(self) -> int:
        """Requests of which some input waits."""
        return len(self._jobs)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of all inputs that were not taken yet."""
        return sum(job.waiting_tokens for job in self._jobs.values())

    def add(self, request_id: str, lengths: Sequence[int], *, priority: int = 0) -> None:
        """Queue a request's inputs, of at least one token each."""
        level = min(
            (job.served for job in self._jobs.values() if job.priority == priority), default=0
        )
        self._jobs[request_id] = PoolingJob(
            request_id=request_id,
            priority=priority,
            arrival=self._arrivals,
            served=level,
            waiting=sorted((tokens, -place) for place, tokens in enumerate(lengths)),
        )
        self._arrivals += 1

    def remove(self, request_id: str) -> None:
        """Forget what is left of a request; an unknown one is ignored."""
        self._jobs.pop(request_id, None)

    def waiting_of(self, request_id: str) -> int:
        """How many inputs of a request wait; 0 for an unknown one."""
        job = self._jobs.get(request_id)
        return 0 if job is None else len(job.waiting)

    def take(self) -> list[Taken]:
        """The next step's inputs, which then wait no more; empty if nothing waits."""
        taken: list[Taken] = []
        room = self._max_step_tokens
        heap = [(job.priority, job.served, job.arrival, job) for job in self._jobs.values()]
        heapq.heapify(heap)
        while heap and len(taken) < self._max_step_inputs:
            job = heapq.heappop(heap)[-1]
            index = len(job.waiting) if not taken else _longest_within(job.waiting, room)
            if index == 0:
                continue  # Nothing of it fits into what is left of this step.
            tokens, place = job.waiting.pop(index - 1)
            job.served += tokens
            job.started = True
            room -= tokens
            taken.append(Taken(job.request_id, -place, tokens))
            if job.waiting:
                heapq.heappush(heap, (job.priority, job.served, job.arrival, job))
            else:
                del self._jobs[job.request_id]
        return taken


def _longest_within(waiting: Sequence[tuple[int, int]], room: int) -> int:
    """One more than the index of the longest input of at most ``room`` tokens; 0 for none."""
    return bisect_right(waiting, (room, 1))
