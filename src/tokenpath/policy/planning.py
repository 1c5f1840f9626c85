"""A step's plan in the making: what was taken, and what is left for others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tokenpath.policy.sequence import Chunk, Sequence, StepPlan
from tokenpath.policy.step_budget import Allowance


class Planning:
    """One step's plan, while the scheduler makes it."""

    def __init__(self, budget: int, now: float) -> None:
        self.now = now
        self.budget = budget
        """Tokens that may still be planned."""
        self.allowance: Allowance | None = None
        """The time that prompts may still take; None: any."""
        self.limited = False
        """Whether a prompt got less for want of time."""
        self.chunks: dict[str, Chunk] = {}
        self.preempted: list[Sequence] = []
        self.admitted: list[Sequence] = []
        self.completing: set[int] = set()
        """Hashes of the blocks that the planned chunks complete."""

    @property
    def tokens(self) -> int:
        """Tokens that are planned."""
        return sum(chunk.length for chunk in self.chunks.values())

    def has(self, sequence: Sequence) -> bool:
        """Whether the sequence has its chunk."""
        return sequence.request_id in self.chunks

    def room(self, start: int, wanted: int) -> int:
        """How many of ``wanted`` tokens from position ``start`` on may be planned."""
        length = min(wanted, self.budget)
        if length <= 1 or self.allowance is None:
            return length
        most = self.allowance.most(start)
        self.limited = self.limited or most < length
        return min(length, most)

    @contextmanager
    def half(self) -> Iterator[None]:
        """Leave half of everything, the larger one, for those that come afterwards."""
        kept, allowance = self.budget - self.budget // 2, self.allowance
        self.budget -= kept
        aside = None if allowance is None else allowance.set_aside()
        limited = self.limited
        yield
        self.limited = limited
        self.budget += kept
        if allowance is not None and aside is not None:
            allowance.put_back(aside)

    def take(self, sequence: Sequence, length: int) -> None:
        """Plan the sequence's next ``length`` tokens, at least 1."""
        self.chunks[sequence.request_id] = Chunk(sequence, sequence.computed, length)
        self.budget -= length
        if self.allowance is not None and length > 1:
            self.allowance.take(sequence.computed, length)

    def lengthen(self, chunk: Chunk, drafted: tuple[int, ...]) -> None:
        """Let a chunk go on with tokens that are guessed."""
        longer = Chunk(chunk.sequence, chunk.start, chunk.length + len(drafted), drafted)
        self.chunks[chunk.sequence.request_id] = longer
        self.budget -= len(drafted)

    def withdraw(self, sequence: Sequence) -> None:
        """Plan nothing for a sequence after all."""
        chunk = self.chunks.pop(sequence.request_id, None)
        if chunk is not None:
            self.budget += chunk.length

    def plan(self) -> StepPlan:
        """What came of it."""
        return StepPlan(tuple(self.chunks.values()), tuple(self.preempted), tuple(self.admitted))
