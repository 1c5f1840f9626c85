"""Token-budget continuous batching with chunked prefill, and preemption by recomputation.

Each step has a budget of tokens. Sequences that decode get their one token first, so that nobody's
prompt freezes another's stream; what is left of the budget goes to unfinished prompts and then to
the queue, in order of (priority, arrival). When the pool runs out of blocks the least urgent
running sequence gives up its blocks and is computed again later: it loses time, never output. The
most urgent sequence always advances, because no sequence is accepted that the whole pool could not
hold, so every sequence ends.

``plan`` decides and allocates, the caller computes, ``commit`` records. Nothing here knows of
tensors, text or time.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass

from tokenpath.policy.blocks import BlockPool, Entry
from tokenpath.policy.prefix import BlockHasher, block_hash, chain_root
from tokenpath.policy.restoring import Restoring
from tokenpath.policy.sequence import Chunk, Sequence, SequenceState, StepPlan
from tokenpath.policy.speculation import Drafts
from tokenpath.policy.tiers import Tiers
from tokenpath.protocol.errors import ContextLengthError, InvalidRequestError


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

    def __post_init__(self) -> None:
        for name in ("max_step_tokens", "max_running", "block_tokens", "num_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")


def _urgency(sequence: Sequence) -> tuple[int, int]:
    return sequence.priority, sequence.arrival


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
    ) -> None:
        """``tiers`` keeps what the pool evicts, if there are any; it needs the prefix cache.

        ``drafts`` guesses what decoding sequences will go on with; without it nobody does.
        ``run`` is random bytes of this process; see ``policy.prefix.identity_root``.
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
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._chains: dict[str, _Chain] = {}
        self._arrivals = 0
        self._waiting_tokens = 0

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
        return self._waiting_tokens

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

    def add(
        self,
        request_id: str,
        prompt: Ids[int],
        *,
        max_tokens: int,
        priority: int = 0,
        cache_key: tuple[str, str] = ("", ""),
    ) -> Sequence:
        """Queue a sequence.

        Raises:
            InvalidRequestError: the prompt is empty, ``max_tokens`` is below 1, or the id is live.
            ContextLengthError: prompt and output could not fit, even alone.
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
        sequence = Sequence(
            request_id=request_id,
            token_ids=list(prompt),
            prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            priority=priority,
            arrival=self._arrivals,
            cache_key=cache_key,
        )
        self._arrivals += 1
        self._sequences[request_id] = sequence
        self._chains[request_id] = _Chain(chain_root(cache_key))
        self._enqueue(sequence)
        return sequence

    def plan(self) -> StepPlan:
        """Choose the next step's chunks and allocate their blocks; empty when there is no work.

        With tiers, blocks are copied out of the pool and into it meanwhile, and a plan may be empty
        because everybody waits for them.
        """
        draft = _Draft(self.config.max_step_tokens)
        if self._restoring is not None:
            self._restoring.new_step()
        decoding = [s for s in self._running if s.uncomputed == 1]
        prefilling = [s for s in self._running if s.uncomputed > 1]
        for sequence in (*decoding, *prefilling):
            if sequence.state is SequenceState.RUNNING and draft.budget:
                self._extend(sequence, draft)
        if not draft.preempted:
            self._admit(draft)
        if self._drafts is not None:
            self._speculate(self._drafts, draft)
        return StepPlan(tuple(draft.chunks.values()), tuple(draft.preempted), tuple(draft.admitted))

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
        else:
            self._dequeue(sequence)
        sequence.state = SequenceState.FINISHED
        return True

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` naming the first broken invariant."""
        self.pool.check_integrity(s.blocks for s in self._sequences.values())
        assert len(self._running) <= self.config.max_running, "too many sequences run"
        assert sorted(self._running, key=_urgency) == self._running, "running is out of order"
        assert sorted(self._waiting, key=_urgency) == self._waiting, "waiting is out of order"
        assert self._waiting_tokens == sum(s.uncomputed for s in self._waiting), (
            "waiting_tokens is not the sum over the queue"
        )
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

    def _extend(self, sequence: Sequence, draft: _Draft) -> None:
        """Give a running sequence its next chunk, preempting less urgent ones to make room."""
        if not self._restored(sequence):
            return
        length = min(sequence.uncomputed, draft.budget)
        while not self._grow(sequence, sequence.computed + length):
            victim = self._running[-1]
            self._preempt(victim, draft)
            if victim is sequence:
                return
        self._take(sequence, length, draft)

    def _admit(self, draft: _Draft) -> None:
        """Move sequences from the queue into the batch while budget, slots and blocks last."""
        promised = sum(self._blocks_missing(s) for s in self._running)
        position = 0
        while position < len(self._waiting) and draft.budget:
            if len(self._running) >= self.config.max_running:
                return
            sequence = self._waiting[position]
            matched = self._match(sequence)
            if self.config.prefix_cache and self._being_computed(sequence, len(matched), draft):
                position += 1
                continue
            fresh = self._blocks_for(len(sequence.token_ids) + 1) - len(matched)
            pinned = sum(self.pool.is_cached(entry.block) for entry in matched)
            if promised + fresh + pinned > self.pool.available and self._running:
                return
            if self._restoring is not None and self._restoring.awaits(sequence, len(matched)):
                promised += fresh + pinned
                position += 1
                continue
            self._start(sequence, matched, draft)
            if not self._restored(sequence):
                promised += self._blocks_missing(sequence)
                continue
            length = min(sequence.uncomputed, draft.budget)
            grown = self._grow(sequence, sequence.computed + length)
            assert grown, "an admitted sequence must find the blocks it was admitted for"
            self._take(sequence, length, draft)
            promised += self._blocks_missing(sequence)

    def _speculate(self, drafts: Drafts, draft: _Draft) -> None:
        """Lengthen chunks of decoding sequences by guesses of what follows.

        They take what budget is left, and blocks that nobody waits for in this step.
        """
        decoding = [c for c in draft.chunks.values() if c.known == 1 and c.samples]
        if not decoding or not draft.budget:
            return
        guesses = drafts.guess([chunk.sequence for chunk in decoding], draft.rows, draft.budget)
        for chunk in decoding:
            sequence = chunk.sequence
            room = min(draft.budget, sequence.max_tokens - sequence.output_tokens - 1)
            guess = tuple(guesses.get(sequence.request_id, ()))[:room]
            if guess and self._grow(sequence, len(sequence.token_ids) + len(guess)):
                draft.lengthen(chunk, guess)

    def _start(self, sequence: Sequence, matched: list[Entry], draft: _Draft) -> None:
        self._dequeue(sequence)
        for entry in matched:
            self.pool.hold(entry.block)
        sequence.blocks = [entry.block for entry in matched]
        sequence.computed = len(matched) * self.config.block_tokens
        sequence.state = SequenceState.RUNNING
        self._chains[sequence.request_id].entries = list(matched)
        insort(self._running, sequence, key=_urgency)
        draft.admitted.append(sequence)
        if sequence.cached_prompt_tokens is None:
            sequence.cached_prompt_tokens = sequence.computed
            self.prompt_tokens_total += sequence.prompt_tokens
            self.cached_prompt_tokens_total += sequence.computed
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

    def _preempt(self, victim: Sequence, draft: _Draft) -> None:
        self._running.remove(victim)
        draft.withdraw(victim)
        draft.preempted.append(victim)
        self.pool.release(victim.blocks)
        victim.blocks = []
        victim.computed = 0
        victim.preemptions += 1
        victim.state = SequenceState.WAITING
        self.preemptions_total += 1
        if self._restoring is not None:
            self._restoring.requeued(victim)
        self._enqueue(victim)

    def _enqueue(self, sequence: Sequence) -> None:
        insort(self._waiting, sequence, key=_urgency)
        self._waiting_tokens += sequence.uncomputed

    def _dequeue(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        self._waiting_tokens -= sequence.uncomputed

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_tokens)

    def _blocks_missing(self, sequence: Sequence) -> int:
        """Blocks that a running sequence still needs for the tokens it is known to have."""
        return self._blocks_for(len(sequence.token_ids)) - len(sequence.blocks)

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

    def _being_computed(self, sequence: Sequence, matched: int, draft: _Draft) -> bool:
        """Whether this very step computes the sequence's next block for another sequence.

        Waiting one step for that block is cheaper than computing it twice: requests that arrive
        together with one system prompt, and the ``n`` choices of one request, share the work.
        """
        if matched >= (len(sequence.token_ids) - 1) // self.config.block_tokens:
            return False
        return self._hashes(sequence, matched + 1)[matched] in draft.completing

    def _take(self, sequence: Sequence, length: int, draft: _Draft) -> None:
        draft.take(sequence, length)
        if self.config.prefix_cache:
            first = sequence.computed // self.config.block_tokens
            last = (sequence.computed + length) // self.config.block_tokens
            draft.completing.update(self._hashes(sequence, last)[first:last])

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


class _Draft:
    """A plan in the making."""

    __slots__ = ("admitted", "budget", "chunks", "completing", "preempted")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.chunks: dict[str, Chunk] = {}
        self.preempted: list[Sequence] = []
        self.admitted: list[Sequence] = []
        self.completing: set[int] = set()
        """Hashes of the blocks that the planned chunks complete."""

    @property
    def rows(self) -> int:
        """Tokens planned so far."""
        return sum(chunk.length for chunk in self.chunks.values())

    def take(self, sequence: Sequence, length: int) -> None:
        self.chunks[sequence.request_id] = Chunk(sequence, sequence.computed, length)
        self.budget -= length

    def lengthen(self, chunk: Chunk, drafted: tuple[int, ...]) -> None:
        longer = Chunk(chunk.sequence, chunk.start, chunk.length + len(drafted), drafted)
        self.chunks[chunk.sequence.request_id] = longer
        self.budget -= len(drafted)

    def withdraw(self, sequence: Sequence) -> None:
        chunk = self.chunks.pop(sequence.request_id, None)
        if chunk is not None:
            self.budget += chunk.length
