"""The engine loop: requests in, events out, one step at a time.

A step asks the scheduler what to compute, the runner for logits, the sampler for tokens, and turns
the tokens into events. The core is single-threaded and knows no sockets; its clock and its source
of seeds are given to it, so that a test replays any moment.

A failure belongs to one request wherever it can be told whose it is. What raises while one
request's output is made ends that request. What raises while a batch is computed is tried again
sequence by sequence, and only those that raise alone are ended. Their blocks and slots are freed in
the same step; chunks that were not computed are never committed, so that no broken keys and values
enter the prefix cache.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Protocol

import torch

from tokenpath.engine.grammar.compiler import GrammarCompiler
from tokenpath.engine.grammar.forms import LiveForms
from tokenpath.engine.logprobs import TokenBytes
from tokenpath.engine.output import Detokenizer, End, Output, OutputStream
from tokenpath.engine.randomness import fresh_seed
from tokenpath.engine.rows import TORCH, Reducer
from tokenpath.engine.sampler import Sampled, confirmed, sample
from tokenpath.engine.sampling_state import SamplingState, states_along
from tokenpath.engine.stage_clock import StageClock
from tokenpath.engine.validation import check_request
from tokenpath.policy.scheduler import Scheduler
from tokenpath.policy.sequence import Chunk, Sequence, SequenceState, StepPlan
from tokenpath.policy.speculator import Speculator
from tokenpath.protocol.errors import (
    ContextLengthError,
    DeadlineError,
    EngineError,
    InvalidRequestError,
    TokenpathError,
    UnsupportedError,
)
from tokenpath.protocol.events import (
    Failed,
    Finish,
    FinishReason,
    GenerationEvent,
    TokenDelta,
    Usage,
)
from tokenpath.protocol.pooling import PoolingRequest
from tokenpath.protocol.replica import ModelCard, ReplicaStats
from tokenpath.protocol.request import GenerationRequest, SamplingParams
from tokenpath.protocol.stages import Stage

if TYPE_CHECKING:
    from tokenpath.engine.grammar.state import CompiledGrammar, GrammarState
    from tokenpath.engine.kv_tiers.tiers import KvTiers

TIERS_WAIT_S = 0.005
"""A step with nothing to compute waits so long for a block of the disk, and then sees who has
left."""
log = logging.getLogger("tokenpath.engine")


class Runner(Protocol):
    """Computes plans; see ``engine.runner.ModelRunner``."""

    def run(self, plan: StepPlan) -> torch.Tensor:
        """Float32 ``[sampled rows, vocab]``, in the order of the plan's chunks."""
        ...


class Text(TokenBytes, Protocol):
    """The tokenizer's side that makes text of tokens."""

    def detokenizer(self, stop: Seq[str], shown: Seq[int]) -> Detokenizer:
        """A fresh one, for one sequence that ends before any of ``stop``.

        The control tokens ``shown`` have a text; others have none.
        """
        ...


@dataclass(slots=True, eq=False)
class _Live:
    """Everything the core holds of one request."""

    request: GenerationRequest
    sequence: Sequence
    sampling: SamplingState
    output: OutputStream
    stages: StageClock
    deadline: float
    """On the core's clock; infinite without a timeout."""


@dataclass(slots=True)
class _Computed:
    """What came of a plan."""

    chunks: list[Chunk] = dataclasses.field(default_factory=list)
    """Those that were computed, and sampled where they sample."""
    sampled: list[tuple[str, list[Sampled]]] = dataclasses.field(default_factory=list)
    """One token of each chunk that samples, and before it the drafted ones that it confirmed."""
    failed: list[tuple[str, TokenpathError]] = dataclasses.field(default_factory=list)


class EngineCore:
    """One model's engine. Not thread-safe: every method is called from one thread."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        text: Text,
        card: ModelCard,
        eos_ids: Collection[int],
        reducer: Reducer = TORCH,
        grammars: GrammarCompiler | None = None,
        tiers: KvTiers | None = None,
        speculator: Speculator | None = None,
        forms: LiveForms | None = None,
        clock: Callable[[], float] = time.monotonic,
        seed_source: Callable[[], int] = fresh_seed,
        resident_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """``reducer`` serves the sampler; ``tiers`` and ``speculator`` are those of the scheduler.

        ``forms`` is the speculator's, which is told of live grammars.

        ``clock`` is monotonic, in seconds; ``seed_source`` serves requests without a seed.
        """
        self.card = card
        self.grammars = grammars
        """Compiles grammars; may be used from any thread. None: they are refused."""
        self._runner = runner
        self._scheduler = scheduler
        self._text = text
        self._eos_ids = frozenset(eos_ids)
        self._reducer = reducer
        self._tiers = tiers
        self.speculator = speculator
        """The scheduler's, if it speculates."""
        self._forms = forms
        self._clock = clock
        self._seed_source = seed_source
        self._resident_bytes = resident_bytes
        self._live: dict[str, _Live] = {}
        self._generated_tokens_total = 0
        self._steps_total = 0
        self._step_seconds_total = 0.0
        self._aborts_total = 0

    def check(self, request: GenerationRequest) -> None:
        """Raise what ``submit`` would raise now, without queueing anything."""
        if request.request_id in self._live:
            raise InvalidRequestError(f"request id {request.request_id!r} is already in use")
        check_request(request, self.card.vocab_size)
        grammar = request.sampling.grammar
        if grammar is not None and self.grammars is None:
            raise UnsupportedError("this engine compiles no grammars", param=grammar.field)
        length, capacity = len(request.prompt.token_ids), self._scheduler.capacity_tokens
        if length >= capacity:
            raise ContextLengthError(
                f"the prompt has {length} tokens, but prompt and output together may have "
                f"{capacity} here"
            )

    def submit(
        self,
        request: GenerationRequest | PoolingRequest,
        *,
        arrived: float | None = None,
        grammar: CompiledGrammar | None = None,
    ) -> None:
        """Queue a request; its events come from later steps.

        ``arrived`` is when it came in, on the core's clock, if that was before this call: its time
        in the queue and its deadline count from there. ``grammar`` is the request's own, compiled;
        without it this call compiles it, or finds it compiled.

        Output is cut to what the context leaves: a request for more ends with ``length``. Whether
        to refuse it instead is the front door's choice.

        Raises:
            InvalidRequestError: a parameter is out of its range, or the id is live.
            UnsupportedError: the request is for vectors, which this engine does not make.
            ContextLengthError: the prompt leaves no room for a single token.
            OverloadedError: too many grammars are being compiled.
        """
        if isinstance(request, PoolingRequest):
            raise UnsupportedError("this engine generates text; it makes no embeddings or scores")
        if arrived is None:
            arrived = self._clock()
        self.check(request)
        params = request.sampling
        prompt = request.prompt.token_ids
        max_tokens = min(params.max_tokens, self._scheduler.capacity_tokens - len(prompt))
        end_ids = (*(() if params.ignore_eos else self._eos_ids), *params.stop_token_ids)
        seed = self._seed_source() if params.seed is None else params.seed
        sampling = SamplingState(
            params,
            prompt=prompt,
            seed=seed,
            end_ids=end_ids,
            grammar=self._begin_grammar(params, grammar),
        )
        output = OutputStream(
            params,
            make_detokenizer=lambda stop: self._text.detokenizer(stop, params.shown_token_ids),
            tokenizer=self._text,
            eos_ids=self._eos_ids,
            max_tokens=max_tokens,
        )
        sequence = self._scheduler.add(
            request.request_id,
            prompt,
            max_tokens=max_tokens,
            priority=request.priority,
            cache_key=(request.cache_salt, request.adapter or ""),
        )
        if self._forms is not None and sampling.grammar is not None:
            self._forms.begin(request.request_id, sampling.grammar)
        deadline = math.inf if request.timeout_s is None else arrived + request.timeout_s
        self._live[request.request_id] = _Live(
            request, sequence, sampling, output, StageClock(arrived), deadline
        )

    def _begin_grammar(
        self, params: SamplingParams, compiled: CompiledGrammar | None
    ) -> GrammarState | None:
        if params.grammar is None:
            return None
        if compiled is None:
            assert self.grammars is not None, "``check`` refuses a grammar without a compiler"
            compiled = self.grammars.compile(params.grammar)
        return compiled.begin(self._eos_ids, params.grammar.field)

    def abort(self, request_id: str) -> Finish | None:
        """Forget a request and free its slot and blocks at once.

        Returns how it ended: reason ``abort``, with its usage and its stages until now; None if it
        is not live. No further event of it follows. Not to be called during ``step``.
        """
        live = self._live.get(request_id)
        if live is None:
            # A submission that failed half-way may have left it with the scheduler.
            self._scheduler.finish(request_id)
            return None
        self._aborts_total += 1
        return self._finish(live, End(FinishReason.ABORT), self._clock())

    def has_work(self) -> bool:
        """Whether any request is live."""
        return bool(self._live)

    def step(self) -> list[GenerationEvent]:
        """Compute one step and return what it made, in no particular order across requests."""
        if not self._live:
            return []
        started = self._clock()
        events: list[GenerationEvent] = self._expired(started)
        plan = self._scheduler.plan()
        planned = self._clock()
        self._enter(plan.preempted, Stage.QUEUE, planned)
        self._enter(plan.admitted, Stage.PREFILL, planned)
        if plan.chunks:
            events += self._complete(plan, self._compute(plan))
            self._steps_total += 1
            seconds = self._clock() - started
            self._step_seconds_total += seconds
            if self.speculator is not None:
                self.speculator.costs.measured(plan.tokens, seconds)
        if self._tiers is not None:
            if plan.chunks:
                prefill = sum(chunk.known for chunk in plan.chunks if chunk.known > 1)
                self._tiers.computed(prefill, self._clock() - planned)
            else:
                self._tiers.wait(TIERS_WAIT_S)
        return events

    def stats(self) -> ReplicaStats:
        """The engine's state and its running totals."""
        scheduler, grammars, speculator = self._scheduler, self.grammars, self.speculator
        stats = ReplicaStats(
            requests_running=scheduler.running,
            requests_waiting=scheduler.waiting,
            waiting_tokens=scheduler.waiting_tokens,
            kv_blocks_used=scheduler.blocks_used,
            kv_blocks_cached=scheduler.blocks_cached,
            kv_blocks_total=scheduler.blocks_total,
            prompt_tokens_total=scheduler.prompt_tokens_total,
            cached_prompt_tokens_total=scheduler.cached_prompt_tokens_total,
            generated_tokens_total=self._generated_tokens_total,
            drafted_tokens_total=[] if speculator is None else [*speculator.drafted_total],
            accepted_tokens_total=[] if speculator is None else [*speculator.accepted_total],
            preemptions_total=scheduler.preemptions_total,
            steps_total=self._steps_total,
            step_seconds_total=self._step_seconds_total,
            aborts_total=self._aborts_total,
            resident_bytes=self._resident_bytes(),
            grammars_cached=0 if grammars is None else grammars.cached,
            grammars_compiled_total=0 if grammars is None else grammars.compiled_total,
            grammar_hits_total=0 if grammars is None else grammars.hits_total,
            grammar_compile_seconds_total=(
                0.0 if grammars is None else grammars.compile_seconds_total
            ),
        )
        return stats if self._tiers is None else self._tiers.report(stats)

    def close(self, *, trusted: bool = True, keep_kv: bool = True) -> None:
        """Let go of what outlives the process: KV blocks on the disk. The last call; takes seconds.

        Without ``trusted`` the pool is in doubt, and nothing of it is kept; without ``keep_kv``
        nothing at all.
        """
        if self._tiers is not None:
            kept = self._scheduler.pool.cached_contents() if trusted and keep_kv else ()
            self._tiers.close(kept, keep=keep_kv)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` naming the first broken invariant. Between steps only."""
        scheduler = self._scheduler
        scheduler.check_integrity()
        if self._tiers is not None:
            self._tiers.check_integrity()
        assert scheduler.running + scheduler.waiting == len(self._live), (
            "the scheduler and the core hold different requests"
        )
        for request_id, live in self._live.items():
            sequence = live.sequence
            assert scheduler.get(request_id) is sequence, f"{request_id} is not scheduled"
            assert sequence.output_tokens == live.output.generated == live.sampling.generated, (
                f"{request_id} has sampled, shown and scheduled different numbers of tokens"
            )
            waits = sequence.state is SequenceState.WAITING
            assert (live.stages.stage is Stage.QUEUE) == waits, (
                f"{request_id} is timed as {live.stages.stage} but is {sequence.state.value}"
            )

    def _expired(self, now: float) -> list[GenerationEvent]:
        late = [live for live in self._live.values() if live.deadline <= now]
        events: list[GenerationEvent] = []
        for live in late:
            request = live.request
            error = DeadlineError(f"the request ran past its {request.timeout_s:g} seconds")
            events.append(self._fail(live, error, now))
        return events

    def _enter(self, sequences: Iterable[Sequence], stage: Stage, now: float) -> None:
        for sequence in sequences:
            self._live[sequence.request_id].stages.enter(stage, now)

    def _compute(self, plan: StepPlan) -> _Computed:
        """Run and sample a plan; if that raises, one chunk after the other."""
        try:
            return self._compute_together(plan)
        except Exception:
            if len(plan.chunks) > 1:
                log.exception("a batch of %d sequences failed; trying each alone", len(plan.chunks))
        computed = _Computed()
        for chunk in plan.chunks:
            request_id = chunk.sequence.request_id
            try:
                alone = self._compute_together(StepPlan((chunk,)))
            except Exception as error:
                log.exception("computing request %s failed", request_id)
                computed.failed.append((request_id, _engine_error(error)))
                continue
            computed.chunks += alone.chunks
            computed.sampled += alone.sampled
            computed.failed += alone.failed
        return computed

    def _compute_together(self, plan: StepPlan) -> _Computed:
        sampling = [chunk for chunk in plan.chunks if chunk.samples]
        logits = self._runner.run(plan)
        computed = _Computed(chunks=[chunk for chunk in plan.chunks if not chunk.samples])
        if not sampling:
            return computed
        states = [
            state
            for chunk in sampling
            for state in states_along(self._live[chunk.sequence.request_id].sampling, chunk.drafted)
        ]
        drawn = iter(sample(logits, states, self._reducer))
        for chunk in sampling:
            request_id = chunk.sequence.request_id
            tokens = confirmed(chunk.drafted, list(islice(drawn, chunk.sampled_rows)))
            if isinstance(tokens, TokenpathError):
                log.error("sampling request %s failed: %s", request_id, tokens.message)
                computed.failed.append((request_id, tokens))
            else:
                computed.chunks.append(chunk)
                computed.sampled.append((request_id, tokens))
        return computed

    def _complete(self, plan: StepPlan, computed: _Computed) -> list[GenerationEvent]:
        """Commit what was computed, and make events of it."""
        committed = dataclasses.replace(plan, chunks=tuple(computed.chunks))
        tokens = {name: [one.token_id for one in drawn] for name, drawn in computed.sampled}
        self._scheduler.commit(committed, tokens)
        if self.speculator is not None:
            for chunk in computed.chunks:
                name = chunk.sequence.request_id
                if name in tokens:
                    self.speculator.verified(name, len(chunk.drafted), tokens[name])
        now = self._clock()
        events: list[GenerationEvent] = [
            self._fail(self._live[request_id], error, now) for request_id, error in computed.failed
        ]
        for request_id, drawn in computed.sampled:
            event = self._emit(self._live[request_id], drawn, now)
            if event is not None:
                events.append(event)
        return events

    def _emit(self, live: _Live, drawn: list[Sampled], now: float) -> GenerationEvent | None:
        """Make one event of a step's tokens, up to the one that ends the sequence."""
        request_id = live.request.request_id
        if live.stages.stage is Stage.PREFILL:
            live.stages.enter(Stage.DECODE, now)
        shown = Output()
        try:
            for one in drawn:
                shown = shown.then(self._show(live, one))
                if shown.end is not None:
                    break
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this request's own
            # Neither the message nor the arguments: they may quote the text.
            frames = "".join(traceback.format_tb(error.__traceback__))
            log.error("output of %s failed: %s\n%s", request_id, type(error).__name__, frames)  # noqa: TRY400 - see above
            return self._fail(live, _engine_error(error), now)
        if shown.end is None:
            return _delta(request_id, shown, None) if shown.token_ids or shown.text else None
        finish = self._finish(live, shown.end, now)
        return _delta(request_id, shown, finish)

    def _show(self, live: _Live, drawn: Sampled) -> Output:
        self._generated_tokens_total += 1
        live.sampling.record(drawn.token_id)
        grammar = live.sampling.grammar
        last = grammar is not None and grammar.finished
        return live.output.push(drawn.token_id, drawn.scores, last=last)

    def _finish(self, live: _Live, end: End, now: float) -> Finish:
        self._release(live)
        return Finish(
            reason=end.reason,
            usage=_usage(live),
            stages=live.stages.total(now),
            matched_stop=end.matched_stop,
        )

    def _fail(self, live: _Live, error: TokenpathError, now: float) -> Failed:
        self._release(live)
        return Failed(
            live.request.request_id,
            error.info(),
            stages=live.stages.total(now),
            usage=_usage(live),
        )

    def _release(self, live: _Live) -> None:
        request_id = live.request.request_id
        self._scheduler.finish(request_id)
        if self._forms is not None:
            self._forms.forget(request_id)
        if self.speculator is not None:
            self.speculator.forget(request_id)
        del self._live[request_id]


def _usage(live: _Live) -> Usage:
    return Usage(
        prompt_tokens=live.sequence.prompt_tokens,
        cached_prompt_tokens=live.sequence.cached_prompt_tokens,
        completion_tokens=live.output.generated,
    )


def _delta(request_id: str, output: Output, finish: Finish | None) -> TokenDelta:
    return TokenDelta(request_id, output.token_ids, output.text, output.logprobs, finish)


def _engine_error(error: Exception) -> TokenpathError:
    """What the client is told; the log has the rest."""
    if isinstance(error, TokenpathError):
        return error
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate" in str(error):
        return EngineError("the engine ran out of memory while it worked on this request")
    return EngineError("the engine failed while it worked on this request")
