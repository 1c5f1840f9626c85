"""Token-budget continuous batching with chunked prefill, and preemption by recomputation.

Each step has a budget of tokens. Sequences that decode get their one token first, so that nobody's
prompt freezes another's stream; what is left of the budget goes to unfinished prompts and then to
the queue (``policy.waiting``), as far as the streams can wait for it (``policy.step_budget``). Of
what prompts get, half may go to one that is shorter than the one whose turn it is, running or
waiting: so a short prompt never waits for the whole of a long one, and prompts of one length are
computed one after the other.

When the pool runs out of blocks the least urgent running sequence gives up its blocks and is
computed again later: it loses time, never output. For that the running ones keep the order of the
urgency that they were admitted with, and of arrival; shares, which change with each step, do not
count, or two tenants would take blocks from each other for ever. The most urgent sequence always
advances, because no sequence is accepted that the whole pool could not hold, so every sequence
ends.

``plan`` decides and allocates, the caller computes, ``commit`` records. Nothing here knows of
tensors or text; time is given to it.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

from tokenpath.policy.blocks import BlockPool, Entry
from tokenpath.policy.fairness import OUTPUT_COST, Fairness, Shares
from tokenpath.policy.planning import Planning
from tokenpath.policy.prefix import BlockHasher, block_hash, chain_root
from tokenpath.policy.restoring import Restoring
from tokenpath.policy.sequence import Sequence, SequenceState, StepPlan
from tokenpath.policy.speculation import Drafts
from tokenpath.policy.step_budget import StepBudget
from tokenpath.policy.tenant_caps import TenantCaps
from tokenpath.policy.tiers import Tiers
from tokenpath.policy.waiting import WaitingQueue
from tokenpath.protocol.errors import ContextLengthError, InvalidRequestError, OverloadedError

_ALL_MAY_WAIT = 1 << 30
_LOOK_AHEAD = 8
"""Longer prompts that a shorter one may be admitted before, while another is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The scheduler's bounds; all at least 1."""

    max_step_tokens: int
    """Token budget of one step."""
    max_running: int
    """Sequences in one batch."""
    block_tokens: int
    """Tokens of one KV block."""
    num_blocks: int
    max_context_tokens: int
    """Most tokens of one sequence, prompt and output."""
    prefix_cache: bool = True
    max_waiting: int = _ALL_MAY_WAIT
    """Sequences in the queue, beyond which none is added."""
    fairness: Fairness = field(default_factory=Fairness)

    def __post_init__(self) -> None:
        for name in ("max_step_tokens", "max_running", "block_tokens", "num_blocks", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")


def _urgency(sequence: Sequence) -> tuple[int, int]:
    return sequence.urgency, sequence.arrival


class Scheduler:
    """Owns the waiting and running sequences and their blocks. Single-threaded."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        hasher: BlockHasher = block_hash,
        tiers: Tiers | None = None,
        drafts: Drafts | None = None,
        run: bytes = b"",
        step_budget: StepBudget | None = None,
    ) -> None:
        """``tiers`` keeps what the pool evicts, if there are any; it needs the prefix cache.

        ``drafts`` guesses what decoding sequences will go on with; without it nobody does.
        ``run`` is random bytes of this process; see ``policy.prefix.identity_root``. With a
        ``step_budget``, which somebody has to tell how long steps took, prompts are computed only
        as fast as streams can wait for them.
        """
        self.config = config
        self.pool = BlockPool(config.num_blocks, on_evict=None if tiers is None else tiers.save)
        self._restoring: Restoring | None = None
        if tiers is not None and config.prefix_cache:
            self._restoring = Restoring(tiers, block_tokens=config.block_tokens, run=run)
        self._drafts = drafts
        self.preemptions_total = 0
        self.prompt_tokens_total = 0
        """Prompt tokens of every sequence that was ever admitted, counted once each."""
        self.cached_prompt_tokens_total = 0
        """Of those, the tokens found in the prefix cache, or its tiers, at the first admission."""
        self._hasher = hasher
        self._sequences: dict[str, Sequence] = {}
        fairness = config.fairness
        self._shares = Shares(fairness.weights, counting=fairness.by_tokens)
        self._waiting = WaitingQueue(fairness, self._shares)
        self._caps = TenantCaps(
            max_running=fairness.tenant_max_running, max_blocks=fairness.tenant_max_blocks
        )
        self._step_budget = step_budget
        self._running: list[Sequence] = []
        self._chains: dict[str, _Chain] = {}
        self._arrivals = 0

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences in the queue, preempted ones included."""
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Tokens that the queue still has to compute, before any cache hit."""
        return self._waiting.tokens

    @property
    def tenants(self) -> int:
        """Tenants with live sequences."""
        return self._shares.tenants

    @property
    def blocks_used(self) -> int:
        """Blocks held by live sequences."""
        return self.pool.used

    @property
    def blocks_cached(self) -> int:
        """Reusable blocks held by nobody."""
        return self.pool.cached

    @property
    def blocks_total(self) -> int:
        """Size of the pool."""
        return self.pool.total

    @property
    def capacity_tokens(self) -> int:
        """Most tokens one sequence may ever have."""
        pool_tokens = self.config.num_blocks * self.config.block_tokens
        return min(self.config.max_context_tokens, pool_tokens)

    def get(self, request_id: str) -> Sequence | None:
        """The live sequence of that id."""
        return self._sequences.get(request_id)

    def uncached(self, sequence: Sequence) -> int:
        """Tokens of a live sequence that are neither computed nor known to be in the cache.

        0 for one that tiers may yet bring something for.
        """
        if self._restoring is not None and (
            sequence.state is SequenceState.WAITING or self._restoring.pending(sequence)
        ):
            return 0
        cached = len(self._match(sequence)) * self.config.block_tokens
        return len(sequence.token_ids) - max(cached, sequence.computed)

    def add(
        self,
        request_id: str,
        prompt: Ids[int],
        *,
        max_tokens: int,
        priority: int = 0,
        cache_key: tuple[str, str] = ("", ""),
        tenant: str = "",
        now: float = 0.0,
    ) -> Sequence:
        """Queue a sequence, which arrived ``now``.

        Raises:
            InvalidRequestError: the prompt is empty, ``max_tokens`` is below 1, or the id is live.
            ContextLengthError: prompt and output could not fit, even alone.
            OverloadedError: the queue is full.
        """
        if request_id in self._sequences:
            raise InvalidRequestError(f"request id {request_id!r} is already running")
        if not prompt:
            raise InvalidRequestError("the prompt is empty; it needs at least one token")
        if max_tokens < 1:
            raise InvalidRequestError(f"max_tokens is {max_tokens}; it must be at least 1")
        if len(prompt) + max_tokens > self.capacity_tokens:
            raise ContextLengthError(
                f"{len(prompt)} prompt tokens and {max_tokens} output tokens exceed "
                f"the {self.capacity_tokens} tokens that a sequence may have here"
            )
        if len(self._waiting) >= self.config.max_waiting:
            raise OverloadedError(
                f"the engine's queue is full: {self.config.max_waiting} requests wait in it",
                retry_after_s=1.0,
            )
        sequence = Sequence(
            request_id=request_id,
            token_ids=list(prompt),
            prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            priority=priority,
            arrival=self._arrivals,
            cache_key=cache_key,
            tenant=tenant,
            queued_at=now,
            urgency=priority,
        )
        self._arrivals += 1
        self._sequences[request_id] = sequence
        self._chains[request_id] = _Chain(chain_root(cache_key))
        self._shares.join(tenant)
        self._waiting.add(sequence)
        return sequence

    def plan(self, now: float = 0.0) -> StepPlan:
        """Choose the next step's chunks and allocate their blocks; empty when there is no work.

        ``now`` is on the clock of those given to ``add``, from which waiting is counted.
        With tiers, blocks are copied out of the pool and into it meanwhile, and a plan may be empty
        because everybody waits for them.
        """
        planning = Planning(self.config.max_step_tokens, now)
        if self._restoring is not None:
            self._restoring.new_step()
        decoding = [s for s in self._running if s.uncomputed == 1]
        prefilling = [s for s in self._running if s.uncomputed > 1]
        self._extend_all(decoding, planning)
        if self._step_budget is not None:
            planning.allowance = self._step_budget.allowance(planning.tokens)
        if prefilling:
            prefilling.sort(key=self._turn)
            first = prefilling[0]
            with planning.half():
                shortest = min(prefilling, key=lambda sequence: sequence.uncomputed)
                if shortest is not first:
                    self._extend_all([shortest], planning)
                self._admit(planning, shorter_than=first.uncomputed)
            self._extend_all(prefilling, planning)
        self._admit(planning)
        if self._drafts is not None:
            self._speculate(self._drafts, planning)
        if self._step_budget is not None and planning.limited:
            self._step_budget.limited_total += 1
        return planning.plan()

    def commit(self, plan: StepPlan, sampled: Mapping[str, Ids[int]]) -> None:
        """Record that the chunks were computed; ``sampled`` has token ids per sampling chunk.

        The last of them is new; those before it are the chunk's first drafted tokens, which
        sampling has confirmed. What was computed for the other drafted tokens is forgotten.

        A plan of fewer chunks than were planned is allowed: the others were not computed, and are
        planned again.
        """
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if sequence.state is not SequenceState.RUNNING:
                continue
            sequence.computed = chunk.start + chunk.known
            if chunk.samples:
                tokens = sampled[sequence.request_id]
                confirmed = len(tokens) - 1
                assert tuple(tokens[:-1]) == chunk.drafted[:confirmed], "tokens nobody drafted"
                sequence.computed += confirmed
                sequence.token_ids += tokens
                self._shares.charge(sequence.tenant, OUTPUT_COST * len(tokens))
            if self.config.prefix_cache:
                self._register(sequence)
            if chunk.drafted:
                self._trim(sequence)

    def finish(self, request_id: str) -> bool:
        """End a sequence, whatever its state, and free what it holds. False if there is none.

        Not to be called between ``plan`` and ``commit``.
        """
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        del self._chains[request_id]
        if self._restoring is not None:
            self._restoring.forget(sequence)
        if sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
            self.pool.release(sequence.blocks)
            sequence.blocks = []
            if not sequence.output_tokens and not sequence.preemptions:
                self._shares.charge(sequence.tenant, -sequence.uncomputed)
        else:
            self._waiting.remove(sequence)
        self._shares.leave(sequence.tenant)
        sequence.state = SequenceState.FINISHED
        return True

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` naming the first broken invariant."""
        self.pool.check_integrity(s.blocks for s in self._sequences.values())
        assert len(self._running) <= self.config.max_running, "too many sequences run"
        assert sorted(self._running, key=_urgency) == self._running, "running is out of order"
        self._waiting.check_integrity()
        self._shares.check_integrity(Counter(s.tenant for s in self._sequences.values()))
        queued = {s.request_id: s for s in (*self._running, *self._waiting)}
        assert queued == self._sequences, "a live sequence is neither running nor waiting"
        for sequence in self._waiting:
            assert sequence.state is SequenceState.WAITING, f"{sequence.request_id} does not wait"
            assert not sequence.blocks, f"waiting {sequence.request_id} holds blocks"
            assert not sequence.computed, f"waiting {sequence.request_id} has computed tokens"
        for sequence in self._running:
            assert sequence.state is SequenceState.RUNNING, f"{sequence.request_id} does not run"
            assert len(set(sequence.blocks)) == len(sequence.blocks), "a block is listed twice"
            assert sequence.computed <= len(sequence.blocks) * self.config.block_tokens, (
                f"{sequence.request_id} has computed tokens without a block"
            )
            assert sequence.uncomputed >= 1, f"{sequence.request_id} has nothing left to compute"
        if self._restoring is not None:
            self._restoring.check_integrity(
                {s.request_id for s in self._running}, set(self._sequences)
            )

    def _turn(self, sequence: Sequence) -> tuple[int, float, int]:
        """Order in which running sequences have their prompts computed."""
        return sequence.urgency, self._shares.of(sequence.tenant), sequence.arrival

    def _extend_all(self, sequences: Iterable[Sequence], planning: Planning) -> None:
        for sequence in sequences:
            running = sequence.state is SequenceState.RUNNING
            if running and not planning.has(sequence) and planning.budget:
                self._extend(sequence, planning)

    def _extend(self, sequence: Sequence, planning: Planning) -> None:
        """Give a running sequence its next chunk, preempting less urgent ones to make room."""
        if not self._restored(sequence):
            return
        length = planning.room(sequence.computed, sequence.uncomputed)
        if not length:
            return
        missing = self._blocks_for(sequence.computed + length) - len(sequence.blocks)
        while (yielding := self._caps.must_yield(sequence, self._running, missing)) is not None:
            self._preempt(yielding, planning)
            if yielding is sequence:
                return
        while not self._grow(sequence, sequence.computed + length):
            victim = self._running[-1]
            self._preempt(victim, planning)
            if victim is sequence:
                return
        self._take(sequence, length, planning)

    def _admit(self, planning: Planning, *, shorter_than: int | None = None) -> None:
        """Move sequences from the queue into the batch while budget, slots and blocks last.

        With ``shorter_than``, only those with fewer tokens left to compute. Those that are passed
        over keep their places: slots and blocks that they will need are not given away.
        """
        if planning.preempted:
            return
        promised = sum(self._blocks_missing(s) for s in self._running)
        passed = 0
        for sequence in self._waiting.in_order(planning.now):
            full = len(self._running) + passed >= self.config.max_running
            if not planning.budget or full or passed > _LOOK_AHEAD:
                return
            matched = self._match(sequence)
            if self.config.prefix_cache and self._being_computed(sequence, len(matched), planning):
                continue
            fresh = self._blocks_for(len(sequence.token_ids) + 1) - len(matched)
            if not self._may_start(sequence, matched, fresh):
                continue
            pinned = sum(self.pool.is_cached(entry.block) for entry in matched)
            if promised + fresh + pinned > self.pool.available and self._running:
                return
            start = len(matched) * self.config.block_tokens
            left = len(sequence.token_ids) - start
            if shorter_than is not None and left >= shorter_than:
                passed += 1
                promised += fresh + pinned
                continue
            if not planning.room(start, left):
                return
            if self._restoring is not None and self._restoring.awaits(sequence, len(matched)):
                promised += fresh + pinned
                continue
            self._start(sequence, matched, planning)
            if self._restored(sequence):
                length = planning.room(sequence.computed, sequence.uncomputed)
                grown = self._grow(sequence, sequence.computed + length)
                assert grown, "an admitted sequence must find the blocks it was admitted for"
                self._take(sequence, length, planning)
            promised += self._blocks_missing(sequence)

    def _speculate(self, drafts: Drafts, planning: Planning) -> None:
        """Lengthen chunks of decoding sequences by guesses of what follows.

        They take what budget is left, and blocks that nobody waits for in this step.
        """
        decoding = [c for c in planning.chunks.values() if c.known == 1 and c.samples]
        if not decoding or not planning.budget:
            return
        sequences = [chunk.sequence for chunk in decoding]
        guesses = drafts.guess(sequences, planning.tokens, planning.budget)
        for chunk in decoding:
            sequence = chunk.sequence
            room = min(planning.budget, sequence.max_tokens - sequence.output_tokens - 1)
            guess = tuple(guesses.get(sequence.request_id, ()))[:room]
            tokens = len(sequence.token_ids) + len(guess)
            missing = self._blocks_for(tokens) - len(sequence.blocks)
            capped = self._caps.must_yield(sequence, self._running, missing) is not None
            if guess and not capped and self._grow(sequence, tokens):
                planning.lengthen(chunk, guess)

    def _may_start(self, sequence: Sequence, matched: list[Entry], fresh: int) -> bool:
        """Whether the tenant's caps let one more of its sequences run."""
        tenant, caps = sequence.tenant, self._caps
        promised = 0
        if caps.max_blocks is not None:
            mine = (s for s in self._running if s.tenant == tenant)
            promised = sum(self._blocks_missing(s) for s in mine)
        shared = [entry.block for entry in matched]
        return caps.may_start(tenant, self._running, promised=promised, shared=shared, fresh=fresh)

    def _start(self, sequence: Sequence, matched: list[Entry], planning: Planning) -> None:
        sequence.urgency = self._waiting.urgency(sequence, planning.now)
        self._waiting.remove(sequence)
        self._shares.admitted(sequence.tenant)
        for entry in matched:
            self.pool.hold(entry.block)
        sequence.blocks = [entry.block for entry in matched]
        sequence.computed = len(matched) * self.config.block_tokens
        sequence.state = SequenceState.RUNNING
        self._chains[sequence.request_id].entries = list(matched)
        insort(self._running, sequence, key=_urgency)
        planning.admitted.append(sequence)
        if sequence.cached_prompt_tokens is None:
            sequence.cached_prompt_tokens = sequence.computed
            self.prompt_tokens_total += sequence.prompt_tokens
            self.cached_prompt_tokens_total += sequence.computed
            self._shares.charge(sequence.tenant, sequence.uncomputed)
        if self._restoring is not None:
            self._restoring.begin(sequence, len(matched))

    def _restored(self, sequence: Sequence) -> bool:
        """Whether a running sequence has all that the tiers can give it, after giving it some."""
        restoring = self._restoring
        if restoring is None:
            return True
        due = restoring.due(sequence)
        if due:
            blocks = self.pool.allocate(due)
            if blocks is None:
                restoring.give_up(sequence)
                return True
            count = restoring.restore(sequence, blocks)
            self.pool.release(blocks[count:])
            sequence.blocks += blocks[:count]
            sequence.computed += count * self.config.block_tokens
            self._register(sequence)
            if sequence.cached_prompt_tokens is not None and not sequence.preemptions:
                sequence.cached_prompt_tokens += count * self.config.block_tokens
                self.cached_prompt_tokens_total += count * self.config.block_tokens
        return not restoring.pending(sequence)

    def _preempt(self, victim: Sequence, planning: Planning) -> None:
        self._running.remove(victim)
        planning.withdraw(victim)
        planning.preempted.append(victim)
        self.pool.release(victim.blocks)
        victim.blocks = []
        victim.computed = 0
        victim.preemptions += 1
        victim.state = SequenceState.WAITING
        self.preemptions_total += 1
        if self._restoring is not None:
            self._restoring.requeued(victim)
        self._waiting.add(victim)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_tokens)

    def _blocks_missing(self, sequence: Sequence) -> int:
        """Blocks that a running sequence still needs for the tokens it is known to have.

        None where it holds more, for guesses that a failed step did not compute.
        """
        return max(0, self._blocks_for(len(sequence.token_ids)) - len(sequence.blocks))

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Make the sequence's blocks cover ``tokens`` tokens; False if the pool is out."""
        missing = self._blocks_for(tokens) - len(sequence.blocks)
        if missing <= 0:
            return True
        taken = self.pool.allocate(missing)
        if taken is None:
            return False
        sequence.blocks.extend(taken)
        return True

    def _trim(self, sequence: Sequence) -> None:
        """Give back the blocks that only unconfirmed tokens needed."""
        kept = self._blocks_for(len(sequence.token_ids))
        self.pool.release(sequence.blocks[kept:])
        del sequence.blocks[kept:]

    def _match(self, sequence: Sequence) -> list[Entry]:
        """Cached blocks of the sequence's beginning, leaving at least one token to compute."""
        if not self.config.prefix_cache:
            return []
        count = (len(sequence.token_ids) - 1) // self.config.block_tokens
        hashes = self._hashes(sequence, count)
        tokens = (self._tokens_of(sequence, index) for index in range(count))
        return self.pool.match(hashes[:count], tokens, sequence.cache_key)

    def _being_computed(self, sequence: Sequence, matched: int, planning: Planning) -> bool:
        """Whether this very step computes the sequence's next block for another sequence.

        Waiting one step for that block is cheaper than computing it twice: requests that arrive
        together with one system prompt, and the ``n`` choices of one request, share the work.
        """
        if matched >= (len(sequence.token_ids) - 1) // self.config.block_tokens:
            return False
        return self._hashes(sequence, matched + 1)[matched] in planning.completing

    def _take(self, sequence: Sequence, length: int, planning: Planning) -> None:
        if not length:
            return
        planning.take(sequence, length)
        if self.config.prefix_cache:
            first = sequence.computed // self.config.block_tokens
            last = (sequence.computed + length) // self.config.block_tokens
            planning.completing.update(self._hashes(sequence, last)[first:last])

    def _hashes(self, sequence: Sequence, count: int) -> list[int]:
        """Chain hashes of at least the first ``count`` blocks; each is computed once."""
        chain = self._chains[sequence.request_id]
        while len(chain.hashes) < count:
            parent = chain.hashes[-1] if chain.hashes else chain.root
            tokens = self._tokens_of(sequence, len(chain.hashes))
            chain.hashes.append(self._hasher(parent, tokens))
        return chain.hashes

    def _tokens_of(self, sequence: Sequence, index: int) -> tuple[int, ...]:
        size = self.config.block_tokens
        return tuple(sequence.token_ids[index * size : (index + 1) * size])

    def _register(self, sequence: Sequence) -> None:
        """Make the sequence's newly completed blocks findable, up to a hash collision."""
        chain = self._chains[sequence.request_id]
        full = sequence.computed // self.config.block_tokens
        while chain.entries is not None and len(chain.entries) < full:
            index = len(chain.entries)
            entry = self.pool.register(
                sequence.blocks[index],
                self._hashes(sequence, index + 1)[index],
                self._tokens_of(sequence, index),
                chain.entries[-1] if chain.entries else None,
                sequence.cache_key,
                None if self._restoring is None else self._restoring.name(sequence, index),
            )
            if entry is None:
                chain.entries = None
            else:
                chain.entries.append(entry)


class _Chain:
    """A sequence's block hashes, and the pool's entries for those of its blocks that are known."""

    __slots__ = ("entries", "hashes", "root")

    def __init__(self, root: int) -> None:
        self.root = root
        self.hashes: list[int] = []
        self.entries: list[Entry] | None = []
        """None after a hash collision: what follows cannot be registered."""
