"""KV blocks outside the pool: their names, what may hold them, and when one is worth bringing back.

A block that the pool evicts can be kept in slower memory and copied back when its prefix returns.
That pays where copying is faster than computing the tokens again, which is decided here from rates
that were measured: nothing about a machine, a model or a disk is assumed. What holds the blocks is
a ``Tiers``, which the engine implements (``engine/kv_tiers``) and a simulator may.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Place = Literal["host", "disk", "peer"]
"""Where a block is: in memory beside the pool, in a file, or with a replica that hands it over."""


@dataclass(frozen=True, slots=True)
class BlockName:
    """What a block's contents depend on. Equal names: equal contents."""

    identity: bytes
    """Of these tokens after exactly that prefix; see ``policy.prefix``."""
    parent: bytes
    """Identity of the prefix."""
    token_ids: tuple[int, ...]
    cache_key: tuple[str, str]


class Transfer(Protocol):
    """Blocks on their way from the disk or another replica."""

    @property
    def done(self) -> bool:
        """Whether there is nothing left to wait for, whatever has come of it."""
        ...


class Tiers(Protocol):
    """What keeps evicted blocks. Called by the scheduler, from its thread, while it plans.

    It may lose any block at any time and never hands out other contents than were saved; so a
    caller asks again before it relies on one.
    """

    def save(self, name: BlockName, block: int) -> None:
        """Keep a copy of a pool's block, which is about to be overwritten, or drop it."""

    def find(self, names: Sequence[BlockName]) -> Sequence[Place]:
        """Where the first of these blocks are: as many as are held without a gap."""
        ...

    def bring(self, names: Sequence[BlockName]) -> Transfer:
        """Start to get those of the blocks that are not on the host, so that they are."""
        ...

    def pin(self, names: Sequence[BlockName]) -> None:
        """Do not push these blocks out of the host; they are about to be restored."""

    def unpin(self, names: Sequence[BlockName]) -> None:
        """Take back ``pin``."""

    def restore(self, names: Sequence[BlockName], blocks: Sequence[int]) -> int:
        """Copy from the host into allocated blocks of the pool.

        Returns how many were copied, from the first; the others are not there, or are damaged.
        """
        ...

    def costs(self) -> Costs:
        """What copying and computing take at present."""
        ...

    def declined(self) -> None:
        """Blocks were there, and by ``costs`` not worth copying."""

    def step_blocks(self) -> int:
        """Blocks that may be restored between two steps; at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds for one block, as measured; 0 where nothing was measured yet, None for computing."""

    compute_s: float | None
    host_s: float = 0.0
    """From the host into the pool."""
    disk_s: float = 0.0
    """From the disk to the host; what the other copy costs comes on top."""
    backlog_s: float = 0.0
    """Until the disk is done with what it was asked for already."""

    def copy_s(self, place: Place) -> float:
        """To have a block in the pool that is in ``place``.

        Another replica's block is paid for by that replica, and waiting for it was decided on
        before (``policy.handover``).
        """
        return self.host_s + (self.disk_s if place == "disk" else 0.0)


def worth_restoring(places: Sequence[Place], costs: Costs) -> int:
    """How many of the blocks to bring back, from the first, so that the most time is saved.

    What comes after them is computed. All of them as long as computing was not measured: the first
    copies are what there is to learn from.
    """
    if costs.compute_s is None:
        return len(places)
    saved, best, count = 0.0, 0.0, 0
    waits = False
    for number, place in enumerate(places, 1):
        if place == "disk" and not waits:
            waits = True
            saved -= costs.backlog_s
        saved += costs.compute_s - costs.copy_s(place)
        if saved > best:
            best, count = saved, number
    return count


class Rate:
    """A running estimate of an amount per second, in which what was seen last counts most.

    An estimate that decides against being used is not measured again, and would stay wrong for ever
    after one slow moment. So ``doubt`` is called when it was decisive, and after some doubts it is
    forgotten and tried anew.
    """

    def __init__(self, *, memory: float = 0.8, doubts: int = 32) -> None:
        """``memory`` is the part of its weight that an observation keeps with each later one."""
        self._memory = memory
        self._most_doubts = doubts
        self._doubts = 0
        self._amount = 0.0
        self._seconds = 0.0

    @property
    def per_second(self) -> float | None:
        """None before anything was seen."""
        return self._amount / self._seconds if self._seconds > 0 else None

    def observe(self, amount: float, seconds: float) -> None:
        """``amount`` was done in ``seconds``."""
        if amount <= 0 or seconds <= 0:
            return
        self._amount = self._amount * self._memory + amount
        self._seconds = self._seconds * self._memory + seconds
        self._doubts = 0

    def doubt(self) -> None:
        """The estimate has kept something from being done."""
        self._doubts += 1
        if self._doubts >= self._most_doubts:
            self._doubts, self._amount, self._seconds = 0, 0.0, 0.0

    def seconds_for(self, amount: float) -> float | None:
        """Time that an amount takes."""
        rate = self.per_second
        return None if rate is None else amount / rate
