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
from tokenpath.engine.handover.arrivals import Arrivals
from tokenpath.engine.logprobs import TokenBytes
from tokenpath.engine.output import Detokenizer, End, Output, OutputStream
from tokenpath.engine.randomness import fresh_seed
from tokenpath.engine.rows import TORCH, Reducer
from tokenpath.engine.sampler import Sampled, confirmed, sample
from tokenpath.engine.sampling_state import SamplingState, states_along
from tokenpath.engine.stage_clock import StageClock
from tokenpath.engine.validation import check_request
from tokenpath.policy.foresight import Foresight
from tokenpath.policy.scheduler import Scheduler
from tokenpath.policy.sequence import Chunk, Sequence, SequenceState, StepPlan
from tokenpath.policy.speculator import Speculator
from tokenpath.policy.step_budget import StepBudget
from tokenpath.protocol.errors import (
    ContextLengthError,
    DeadlineError,
    EngineError,
    InvalidRequestError,
    ReplicaLostError,
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
    from tokenpath.engine.handover.giving import Giver, Outgoing
    from tokenpath.engine.kv_tiers.tiers import KvTiers
    from tokenpath.engine.parallel.crew import Crew

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
    allowed_s: float
    """From its arrival to the deadline."""
    handover: Outgoing | None = None
    """Where its blocks go, if another replica ordered them."""


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
        tiers: KvTiers | Arrivals | None = None,
        giver: Giver | None = None,
        crew: Crew | None = None,
        speculator: Speculator | None = None,
        forms: LiveForms | None = None,
        step_budget: StepBudget | None = None,
        max_session_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        seed_source: Callable[[], int] = fresh_seed,
        resident_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """``tiers``, ``speculator`` and ``step_budget`` are the scheduler's.

        ``reducer`` serves the sampler; ``forms`` is the speculator's and learns of live grammars.
        ``giver`` takes orders for prompts of other replicas, once somebody starts it. ``crew`` are
        the other ranks of a divided model, which end with this core. ``max_session_s`` bounds every
        request's life, whatever its own timeout.
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
        self._crew = crew
        self._arrivals = tiers if isinstance(tiers, Arrivals) else None
        self.giver = giver
        self.speculator = speculator
        """The scheduler's, if it speculates."""
        self._forms = forms
        self._step_budget = step_budget
        self._foresight = Foresight()
        self._max_session_s = math.inf if max_session_s is None else max_session_s
        self._clock = clock
        self._seed_source = seed_source
        self._resident_bytes = resident_bytes
        self._live: dict[str, _Live] = {}
        self._generated_tokens_total = 0
        self._steps_total = 0
        self._step_seconds_total = 0.0
        self._aborts_total = 0
        self._deadlines_missed_total = 0

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
            OverloadedError: the queue is full, or too many grammars are being compiled.
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
            tenant=request.tenant,
            now=arrived,
        )
        handover = None if self.giver is None else self.giver.ordered(request.request_id)
        if self._forms is not None and sampling.grammar is not None:
            self._forms.begin(request.request_id, sampling.grammar)
        allowed_s = min(request.timeout_s or math.inf, self._max_session_s)
        self._live[request.request_id] = _Live(
            request,
            sequence,
            sampling,
            output,
            StageClock(arrived),
            deadline=arrived + allowed_s,
            allowed_s=allowed_s,
            handover=handover,
        )
        if self._arrivals is not None and request.prefill_at is not None:
            self._arrivals.expect(request)

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
        plan = self._scheduler.plan(started)
        planned = self._clock()
        self._enter(plan.preempted, Stage.QUEUE, planned)
        self._enter_transfer()
        self._enter(plan.admitted, Stage.PREFILL, planned)
        if plan.chunks:
            computed = self._compute(plan)
            events += self._complete(plan, computed)
            seconds = self._clock() - started
            self._steps_total += 1
            self._step_seconds_total += seconds
            if self.speculator is not None:
                # Without planning, in which drafts are made: what those cost is their drafter's.
                self.speculator.costs.measured(plan.tokens, started + seconds - planned)
            if len(computed.chunks) == len(plan.chunks):
                self._foresight.observe(plan, seconds)
                if self._step_budget is not None:
                    self._step_budget.observe(plan, seconds)
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
        drafted, accepted = ([], []) if speculator is None else speculator.totals()
        stats = ReplicaStats(
            requests_running=scheduler.running,
            requests_waiting=scheduler.waiting,
            waiting_tokens=scheduler.waiting_tokens,
            tenants=scheduler.tenants,
            kv_blocks_used=scheduler.blocks_used,
            kv_blocks_cached=scheduler.blocks_cached,
            kv_blocks_total=scheduler.blocks_total,
            prompt_tokens_total=scheduler.prompt_tokens_total,
            cached_prompt_tokens_total=scheduler.cached_prompt_tokens_total,
            generated_tokens_total=self._generated_tokens_total,
            drafted_tokens_total=drafted,
            accepted_tokens_total=accepted,
            preemptions_total=scheduler.preemptions_total,
            steps_total=self._steps_total,
            step_seconds_total=self._step_seconds_total,
            prefill_limited_steps_total=(
                0 if self._step_budget is None else self._step_budget.limited_total
            ),
            aborts_total=self._aborts_total,
            deadlines_missed_total=self._deadlines_missed_total,
            resident_bytes=self._resident_bytes(),
            grammars_cached=0 if grammars is None else grammars.cached,
            grammars_compiled_total=0 if grammars is None else grammars.compiled_total,
            grammar_hits_total=0 if grammars is None else grammars.hits_total,
            grammar_compile_seconds_total=(
                0.0 if grammars is None else grammars.compile_seconds_total
            ),
        )
        if self.giver is not None:
            stats = self.giver.report(stats)
        return stats if self._tiers is None else self._tiers.report(stats)

    def close(self, *, trusted: bool = True, keep_kv: bool = True) -> None:
        """Let go of what outlives the process: KV blocks on the disk. The last call; takes seconds.

        Without ``trusted`` the pool is in doubt, and nothing of it is kept; without ``keep_kv``
        nothing at all.
        """
        if self.giver is not None:
            self.giver.close()
        if self._tiers is not None:
            kept = self._scheduler.pool.cached_contents() if trusted and keep_kv else ()
            self._tiers.close(kept, keep=keep_kv)
        if self._crew is not None:
            self._crew.close()

    def watch(self, broken: Callable[[Exception], None]) -> None:
        """Call this, from any thread, if the engine breaks while it does nothing."""
        if self._crew is not None:
            self._crew.watch(broken)

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
            assert (live.stages.stage in {Stage.QUEUE, Stage.KV_TRANSFER}) == waits, (
                f"{request_id} is timed as {live.stages.stage} but is {sequence.state.value}"
            )

    def _expired(self, now: float) -> list[GenerationEvent]:
        """End those whose time is over, and those whose prompt it cannot suffice for."""
        events: list[GenerationEvent] = []
        for live in tuple(self._live.values()):
            left_s = live.deadline - now
            if left_s <= 0:
                error = DeadlineError(f"the request ran past its {live.allowed_s:g} seconds")
            elif self._is_hopeless(live, left_s):
                error = DeadlineError(
                    f"the request cannot have its first token within its {live.allowed_s:g} "
                    f"seconds: {left_s:.3g} are left, too few for its prompt"
                )
            else:
                continue
            self._deadlines_missed_total += 1
            events.append(self._fail(live, error, now))
        return events

    def _is_hopeless(self, live: _Live, left_s: float) -> bool:
        sequence, least_s = live.sequence, self._foresight.least_s
        if sequence.output_tokens or least_s(sequence.uncomputed) <= left_s:
            return False
        # Only now is it worth to look for what need not be computed.
        return least_s(self._scheduler.uncached(sequence)) > left_s

    def _enter(self, sequences: Iterable[Sequence], stage: Stage, now: float) -> None:
        for sequence in sequences:
            self._live[sequence.request_id].stages.enter(stage, now)

    def _enter_transfer(self) -> None:
        if self._arrivals is None:
            return
        for request_id, since in self._arrivals.begun():
            live = self._live.get(request_id)
            if live is not None and live.stages.stage is Stage.QUEUE:
                live.stages.enter(Stage.KV_TRANSFER, since)

    def _compute(self, plan: StepPlan) -> _Computed:
        """Run and sample a plan; if that raises, one chunk after the other."""
        try:
            return self._compute_together(plan)
        except ReplicaLostError:
            raise  # it is nobody's own, and there is nobody to try with
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
        for chunk in committed.chunks:
            live = self._live[chunk.sequence.request_id]
            if live.handover is not None:
                live.handover.computed(chunk.sequence.blocks, chunk.sequence.computed)
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
        if live.handover is not None:
            live.handover.ended("its prompt was not computed to the end")
        self._release(live)
        return Finish(
            reason=end.reason,
            usage=_usage(live),
            stages=live.stages.total(now),
            matched_stop=end.matched_stop,
        )

    def _fail(self, live: _Live, error: TokenpathError, now: float) -> Failed:
        if live.handover is not None:
            live.handover.ended(error.message)
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
        if self._arrivals is not None:
            self._arrivals.forget(request_id)
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
