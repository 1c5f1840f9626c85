"""Blocks that another replica hands over, as the scheduler sees them: one more tier.

A request may come with a replica that prefills (``expect``). When the scheduler asks where the
blocks of its prompt are, those that no other tier has are said to be with that replica, if they
are enough; when it asks for them, a ``Fetch`` orders them, and the sequence waits in the queue
until they have arrived. Then they are restored like any other block, and the pool's prefix cache
has them. Whatever does not arrive, or arrives damaged, is computed here.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from tokenpath.config.launch import parse_address
from tokenpath.engine.handover.fetch import Fetch, Wanted
from tokenpath.engine.handover.memory import Budget
from tokenpath.engine.kv_tiers.sealed import checksum
from tokenpath.engine.kv_tiers.tiers import Copier, KvTiers
from tokenpath.policy.handover import worth_handing_over
from tokenpath.policy.prefix import block_identity, identity_root
from tokenpath.policy.tiers import BlockName, Costs, Place, Rate, Transfer
from tokenpath.protocol.handover import Order
from tokenpath.protocol.replica import ReplicaStats
from tokenpath.protocol.request import GenerationRequest

MAX_FETCHES: Final = 32
"""Handovers at a time; prompts beyond them are computed here."""
LINGER_S: Final = 30.0
"""Blocks that arrived and that nobody took are kept so long."""
UNREACHABLE_S: Final = 5.0
"""A replica that could not be reached is not asked again before."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Expected:
    """A request whose prompt another replica may compute."""

    request: GenerationRequest
    last: bytes
    """Identity of the last whole block before the prompt's end, which stands for all of them."""
    blocks: int
    asked: bool = False


@dataclass(slots=True, eq=False)
class _Incoming:
    """A fetch, and for whom it is."""

    fetch: Fetch
    address: str
    counted: bool = False
    dropped: bool = False
    """Nothing more is wanted of it."""
    withdrawn: bool = False
    """Nobody waited for it any more while it still ran."""
    requests: set[str] = field(default_factory=set)
    left: set[bytes] = field(default_factory=set)
    """Identities of blocks that are not restored yet."""


class _Waiting:
    """What a queued sequence waits for: blocks of some fetches, and what another tier reads."""

    def __init__(
        self, others: Sequence[Transfer], until: Callable[[], bool], expire: Callable[[], bool]
    ) -> None:
        self._others = others
        self._until = until
        self._expire = expire

    @property
    def done(self) -> bool:
        return self._expire() or (self._until() and all(other.done for other in self._others))


class Arrivals:
    """What arrives, before the tiers behind the pool, if there are any. A ``policy.tiers.Tiers``.

    Not thread-safe: every call comes from the engine's thread.
    """

    def __init__(
        self,
        copier: Copier,
        inner: KvTiers | None,
        *,
        fingerprint: bytes,
        block_tokens: int,
        min_prompt_tokens: int,
        wait_s: float,
        buffer_bytes: int,
        step_bytes: int,
        tls: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``step_bytes`` may be restored between two steps; see ``config.spec`` for the others."""
        self._copier = copier
        self._inner = inner
        self._fingerprint = fingerprint
        self._block_tokens = block_tokens
        self._min_prompt_tokens = min_prompt_tokens
        self._wait_s = wait_s
        self._budget = Budget(buffer_bytes)
        self._step_blocks = max(1, step_bytes // copier.block_bytes)
        self._tls = tls
        self._clock = clock
        self._came = threading.Event()
        self._expected: dict[str, _Expected] = {}
        self._incoming: list[_Incoming] = []
        self._places: dict[bytes, tuple[_Incoming, int]] = {}
        """Where each block that is coming, or has come, is in its fetch."""
        self._offered: tuple[_Expected, int] | None = None
        """What ``find`` has just offered to get from another replica: for whom, from which block.
        The scheduler calls ``bring`` next, if it wants it."""
        self._begun: list[tuple[str, float]] = []
        self._unreachable: dict[str, float] = {}
        self._pinned: set[bytes] = set()
        self._rate = Rate()
        self._handovers = self._fallbacks = self._blocks = self._corrupt = 0
        self._seconds = 0.0

    # What the core says and asks.

    def expect(self, request: GenerationRequest) -> None:
        """A request is queued whose ``prefill_at`` may be asked for its blocks."""
        token_ids, size = request.prompt.token_ids, self._block_tokens
        blocks = (len(token_ids) - 1) // size
        # An adapter's name means other weights in another process.
        if request.adapter or not worth_handing_over(blocks * size, self._min_prompt_tokens):
            return
        identity = identity_root((request.cache_salt, ""))
        for start in range(0, blocks * size, size):
            identity = block_identity(identity, token_ids[start : start + size])
        self._expected[request.request_id] = _Expected(request, identity, blocks)

    def forget(self, request_id: str) -> None:
        """A request has ended; what comes for it alone is not wanted any more."""
        self._expected.pop(request_id, None)
        for incoming in self._incoming:
            if request_id in incoming.requests:
                incoming.requests.discard(request_id)
                if not incoming.requests:
                    self._drop(incoming)

    def begun(self) -> list[tuple[str, float]]:
        """Requests that began to wait for a handover since this was last asked, and when."""
        begun, self._begun = self._begun, []
        return begun

    def computed(self, prefill_tokens: int, seconds: float) -> None:
        """A step computed so many tokens of prompts in so much time."""
        if self._inner is not None:
            self._inner.computed(prefill_tokens, seconds)

    def wait(self, timeout_s: float) -> None:
        """Wait for a block, if any is coming."""
        if any(incoming.fetch.ended_at is None for incoming in self._incoming):
            self._came.wait(timeout_s)
            self._came.clear()
        elif self._inner is not None:
            self._inner.wait(timeout_s)

    def report(self, stats: ReplicaStats) -> ReplicaStats:
        """An engine's figures, with those of handovers among them."""
        self._collect()
        if self._inner is not None:
            stats = self._inner.report(stats)
        return msgspec.structs.replace(
            stats,
            kv_corrupt_blocks_total=stats.kv_corrupt_blocks_total + self._corrupt,
            handovers_total=self._handovers,
            handover_fallbacks_total=self._fallbacks,
            handover_blocks_received_total=self._blocks,
            handover_bytes_received_total=self._blocks * self._copier.block_bytes,
            handover_seconds_total=self._seconds,
        )

    def close(self, kept: Iterable[tuple[BlockName, int]] = (), *, keep: bool = True) -> None:
        """Withdraw every order, and close the tiers behind."""
        for incoming in list(self._incoming):
            self._drop(incoming)
        if self._inner is not None:
            self._inner.close(kept, keep=keep)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` naming the first broken invariant."""
        for identity, (incoming, index) in self._places.items():
            assert incoming in self._incoming, "a block is to come from a fetch that is gone"
            assert incoming.fetch.names[index].identity == identity, "a block is in a wrong place"
            assert identity in incoming.left, "a block is to come that was restored"
        for incoming in self._incoming:
            assert incoming.dropped or incoming.left, "a fetch is kept of which nothing is left"
        if self._inner is not None:
            self._inner.check_integrity()

    # What the scheduler asks.

    def save(self, name: BlockName, block: int) -> None:
        if self._inner is not None:
            self._inner.save(name, block)

    def find(self, names: Sequence[BlockName]) -> list[Place]:
        self._collect()
        places: list[Place] = []
        self._offered = None
        while len(places) < len(names):
            coming = self._places.get(names[len(places)].identity)
            if coming is not None and self._alive(*coming):
                incoming, index = coming
                places.append("host" if index < incoming.fetch.arrived else "peer")
                continue
            found = () if self._inner is None else self._inner.find(names[len(places) :])
            if not found:
                break
            places += found
        missing = names[len(places) :]
        expected = self._expecting(names)
        if missing and expected is not None:
            offered = self._offer(expected, len(missing))
            if offered:
                self._offered = expected, expected.blocks - len(missing)
            places += ["peer"] * offered
        return places

    def bring(self, names: Sequence[BlockName]) -> Transfer:
        others: list[Transfer] = []
        needs: list[tuple[_Incoming, int]] = []
        position = 0
        while position < len(names):
            name = names[position]
            coming = self._places.get(name.identity)
            if coming is not None and self._alive(*coming):
                needs.append(coming)
                position += 1
                continue
            rest = names[position:]
            found = [] if self._inner is None else list(self._inner.find(rest))
            if not found:
                break
            assert self._inner is not None
            others.append(self._inner.bring(rest[: len(found)]))
            position += len(found)
        expected = self._expecting(names)
        if position < len(names) and self._offered is not None:
            expected, first = self._offered
            ordered = self._fetch(expected, first, names[position:])
            if ordered is not None:
                needs.append((ordered, len(ordered.fetch.names) - 1))
        if expected is not None and needs:
            expected.asked = True
            self._begun.append((expected.request.request_id, self._clock()))
            for incoming, _ in needs:
                incoming.requests.add(expected.request.request_id)
        return self._waiting(others, needs)

    def pin(self, names: Sequence[BlockName]) -> None:
        self._pinned.update(name.identity for name in names)
        if self._inner is not None:
            self._inner.pin(names)

    def unpin(self, names: Sequence[BlockName]) -> None:
        self._pinned.difference_update(name.identity for name in names)
        if self._inner is not None:
            self._inner.unpin(names)
        self._collect()

    def restore(self, names: Sequence[BlockName], blocks: Sequence[int]) -> int:
        started, ours, count = self._clock(), 0, 0
        while count < len(names):
            coming = self._places.get(names[count].identity)
            if coming is not None and coming[1] < coming[0].fetch.arrived:
                if not self._restore_one(*coming, blocks[count]):
                    break
                count, ours = count + 1, ours + 1
                continue
            if self._inner is None:
                break
            run = 1
            while count + run < len(names) and names[count + run].identity not in self._places:
                run += 1
            restored = self._inner.restore(names[count : count + run], blocks[count : count + run])
            count += restored
            if restored < run:
                break
        self._rate.observe(ours, self._clock() - started)
        return count

    def costs(self) -> Costs:
        costs = Costs(None) if self._inner is None else self._inner.costs()
        if not costs.host_s:
            return Costs(
                costs.compute_s,
                host_s=self._rate.seconds_for(1) or 0.0,
                disk_s=costs.disk_s,
                backlog_s=costs.backlog_s,
            )
        return costs

    def declined(self) -> None:
        self._rate.doubt()
        if self._inner is not None:
            self._inner.declined()

    def step_blocks(self) -> int:
        return self._step_blocks

    # Bookkeeping.

    def _expecting(self, names: Sequence[BlockName]) -> _Expected | None:
        """The request with exactly this prompt that has not asked for its blocks yet."""
        last = names[-1].identity if names else None
        waiting = (each for each in self._expected.values() if not each.asked)
        return next((each for each in waiting if each.last == last), None)

    def _offer(self, expected: _Expected, missing: int) -> int:
        """How many of the missing blocks the other replica shall be asked for."""
        if not worth_handing_over(missing * self._block_tokens, self._min_prompt_tokens):
            return 0
        peer = expected.request.prefill_at
        assert peer is not None
        room = min(missing, self._budget.left // self._copier.block_bytes)
        down = self._clock() < self._unreachable.get(peer.address, 0.0)
        if room and not down and len(self._incoming) < MAX_FETCHES:
            return room
        expected.asked = True
        self._fallbacks += 1
        log.info(
            "a prompt of %d blocks is computed here: %s",
            expected.blocks,
            "its peer could not be reached" if down else "there is no room to receive it",
        )
        return 0

    def _fetch(
        self, expected: _Expected, first: int, names: Sequence[BlockName]
    ) -> _Incoming | None:
        request, size = expected.request, self._copier.block_bytes
        peer = request.prefill_at
        assert peer is not None
        taken = self._budget.take(len(names), size)
        if not taken:
            return None
        names = names[:taken]
        wanted = Wanted(
            address=parse_address(peer.address),
            secret=peer.secret,
            tls=self._tls,
            order=Order(
                fingerprint=self._fingerprint,
                block_bytes=size,
                token_ids=request.prompt.token_ids[: (first + taken) * self._block_tokens],
                first_block=first,
                salt=request.cache_salt,
                priority=request.priority,
                timeout_s=self._wait_s,
            ),
            names=names,
        )
        incoming = _Incoming(
            Fetch(wanted, came=self._came, clock=self._clock),
            peer.address,
            left={name.identity for name in names},
        )
        self._incoming.append(incoming)
        for index, name in enumerate(names):
            self._places[name.identity] = incoming, index
        incoming.fetch.start()
        return incoming

    def _waiting(
        self, others: Sequence[Transfer], needs: Sequence[tuple[_Incoming, int]]
    ) -> _Waiting:
        deadline = self._clock() + self._wait_s

        def arrived() -> bool:
            return not any(
                incoming.fetch.ended_at is None and index >= incoming.fetch.arrived
                for incoming, index in needs
            )

        def expired() -> bool:
            if not needs or self._clock() < deadline:
                return False
            for incoming, _ in needs:
                incoming.fetch.cancel(f"it took longer than {self._wait_s:g} s")
            return True

        return _Waiting(others, arrived, expired)

    @staticmethod
    def _alive(incoming: _Incoming, index: int) -> bool:
        """Whether a block has arrived, or still may."""
        return index < incoming.fetch.arrived or incoming.fetch.ended_at is None

    def _restore_one(self, incoming: _Incoming, index: int, block: int) -> bool:
        fetch, row = incoming.fetch, incoming.fetch.row(index)
        identity = fetch.names[index].identity
        self._take_away(incoming, identity)
        if checksum(row.data) != fetch.checksums[index]:
            self._corrupt += 1
            log.warning("a KV block from %s is damaged; it is computed again", incoming.address)
            return False
        self._copier.write(block, row)
        return True

    def _take_away(self, incoming: _Incoming, identity: bytes) -> None:
        incoming.left.discard(identity)
        self._places.pop(identity, None)
        if not incoming.left:
            self._drop(incoming)

    def _drop(self, incoming: _Incoming) -> None:
        """Want nothing more of a fetch."""
        if incoming.dropped:
            return
        incoming.dropped = True
        if incoming.fetch.arrived < len(incoming.fetch.names):
            incoming.withdrawn = incoming.fetch.cancel("nobody waits for it any more")
        for identity in incoming.left:
            self._places.pop(identity, None)
        incoming.left.clear()

    def _collect(self) -> None:
        """Take over what the fetches' threads have brought to an end."""
        for incoming in list(self._incoming):
            fetch = incoming.fetch
            if fetch.ended_at is None:
                continue
            if not incoming.counted:
                self._ended(incoming, fetch.ended_at)
            if not incoming.dropped:
                lost = [name.identity for name in fetch.names[fetch.arrived :]]
                for identity in incoming.left.intersection(lost):
                    self._take_away(incoming, identity)
                late = self._clock() >= fetch.ended_at + LINGER_S
                if late and not incoming.left & self._pinned:
                    self._drop(incoming)
            if incoming.dropped:
                self._incoming.remove(incoming)
                self._budget.give(len(fetch.names) * fetch.block_bytes)

    def _ended(self, incoming: _Incoming, ended_at: float) -> None:
        fetch = incoming.fetch
        incoming.counted = True
        self._handovers += 1
        self._blocks += fetch.arrived
        self._seconds += ended_at - fetch.started_at
        if fetch.unreachable:
            self._unreachable[incoming.address] = ended_at + UNREACHABLE_S
        if fetch.arrived < len(fetch.names) and not incoming.withdrawn:
            self._fallbacks += 1
            log.warning(
                "a handover from %s ended after %d of %d blocks, and the rest is computed here: %s",
                incoming.address,
                fetch.arrived,
                len(fetch.names),
                fetch.why or "it gave no more",
            )
