"""Which blocks come back from the tiers for which sequence, and who waits for whom meanwhile.

A sequence in the queue whose prefix is on the disk, or with another replica that computes it, waits
until it is there; it holds no block of the pool then, so that withdrawing it leaves nothing behind.
What is on the host is copied into its blocks when it is admitted, so many blocks a step, before
anything of it is computed. Whatever does not arrive is computed. Every sequence asks once for each
time that it is queued: so it never waits for a block that leaves as soon as it has come.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from tokenpath.policy.prefix import block_identity, identity_root
from tokenpath.policy.sequence import Sequence
from tokenpath.policy.tiers import BlockName, Place, Tiers, Transfer, worth_restoring


@dataclass(slots=True)
class _Restore:
    """One live sequence's dealings with the tiers."""

    names: list[BlockName] = field(default_factory=list)
    """Of its first blocks, as far as they were needed yet."""
    asked: bool = False
    transfer: Transfer | None = None
    pending: deque[BlockName] = field(default_factory=deque)
    """On the host, to be copied next; the sequence runs but is not computed meanwhile."""


class Restoring:
    """The tiers as one scheduler uses them. Single-threaded, like the scheduler."""

    def __init__(self, tiers: Tiers, *, block_tokens: int, run: bytes = b"") -> None:
        """``run`` is mixed into the identity of blocks with an adapter; see ``identity_root``."""
        self._tiers = tiers
        self._block_tokens = block_tokens
        self._run = run
        self._of: dict[str, _Restore] = {}
        self._owners: dict[bytes, str] = {}
        """Who restores a block."""
        self._left = 0

    def new_step(self) -> None:
        """Let as many blocks be restored as fit between two steps."""
        self._left = self._tiers.step_blocks()

    def name(self, sequence: Sequence, index: int) -> BlockName:
        """Name of a sequence's full block."""
        names = self._state(sequence).names
        size = self._block_tokens
        while len(names) <= index:
            parent = names[-1].identity if names else identity_root(sequence.cache_key, self._run)
            start = len(names) * size
            token_ids = tuple(sequence.token_ids[start : start + size])
            identity = block_identity(parent, token_ids)
            names.append(BlockName(identity, parent, token_ids, sequence.cache_key))
        return names[index]

    def awaits(self, sequence: Sequence, matched: int) -> bool:
        """Whether a queued sequence should wait, its first ``matched`` blocks being in the pool.

        It waits for the disk or another replica, which it asks the first time, or for another
        sequence that is restoring the very block that it needs next.
        """
        state = self._state(sequence)
        if not state.asked:
            state.asked = True
            names = self._names_from(sequence, matched)
            places = self._tiers.find(names)
            count = self._worth(places)
            if any(place != "host" for place in places[:count]):
                state.transfer = self._tiers.bring(names[:count])
        if state.transfer is not None and not state.transfer.done:
            return True
        if matched >= self._most(sequence):
            return False
        return self.name(sequence, matched).identity in self._owners

    def begin(self, sequence: Sequence, matched: int) -> None:
        """Settle what an admitted sequence gets after its ``matched`` blocks of the pool."""
        state = self._state(sequence)
        state.transfer = None
        names = self._names_from(sequence, matched)
        places = self._tiers.find(names)
        here = itertools.takewhile(lambda place: place == "host", places)
        count = self._worth(list(here))
        for name in names[:count]:
            if name.identity in self._owners:
                break
            self._owners[name.identity] = sequence.request_id
            state.pending.append(name)
        self._tiers.pin(tuple(state.pending))

    def pending(self, sequence: Sequence) -> bool:
        """Whether a running sequence still waits for blocks of the host."""
        state = self._of.get(sequence.request_id)
        return state is not None and bool(state.pending)

    def due(self, sequence: Sequence) -> int:
        """Blocks that may be restored for it in this step."""
        state = self._of.get(sequence.request_id)
        return 0 if state is None else min(len(state.pending), self._left)

    def restore(self, sequence: Sequence, blocks: list[int]) -> int:
        """Fill ``due`` allocated blocks; returns how many were, from the first.

        If that is not all of them the sequence gets nothing more, and has the rest computed.
        """
        state = self._state(sequence)
        names = [state.pending.popleft() for _ in blocks]
        self._left -= len(names)
        count = self._tiers.restore(names, blocks)
        self._disown(names)
        if count < len(names):
            self.give_up(sequence)
        return count

    def give_up(self, sequence: Sequence) -> None:
        """Restore nothing more for a sequence until it is queued again."""
        state = self._of.get(sequence.request_id)
        if state is not None:
            self._disown(tuple(state.pending))
            state.pending.clear()
            state.transfer = None

    def requeued(self, sequence: Sequence) -> None:
        """A running sequence was sent back to the queue."""
        self.give_up(sequence)
        self._state(sequence).asked = False

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self.give_up(sequence)
        self._of.pop(sequence.request_id, None)

    def check_integrity(self, running: set[str], live: set[str]) -> None:
        """Raise ``AssertionError`` unless blocks are restored for running sequences, once each."""
        assert set(self._of) <= live, "the tiers remember a sequence that has ended"
        owned = {
            name.identity: request_id
            for request_id, state in self._of.items()
            for name in state.pending
        }
        assert owned == self._owners, "a block is restored for nobody, or for two"
        assert set(owned.values()) <= running, "a block is restored for a sequence that waits"

    def _worth(self, places: Seq[Place]) -> int:
        count = worth_restoring(places, self._tiers.costs())
        if count < len(places):
            self._tiers.declined()
        return count

    def _state(self, sequence: Sequence) -> _Restore:
        return self._of.setdefault(sequence.request_id, _Restore())

    def _most(self, sequence: Sequence) -> int:
        """Blocks that may come from anywhere: at least one token is left to compute."""
        return (len(sequence.token_ids) - 1) // self._block_tokens

    def _names_from(self, sequence: Sequence, first: int) -> list[BlockName]:
        last = self._most(sequence)
        if first >= last:
            return []
        self.name(sequence, last - 1)
        return self._state(sequence).names[first:last]

    def _disown(self, names: Seq[BlockName]) -> None:
        self._tiers.unpin(names)
        for name in names:
            del self._owners[name.identity]
