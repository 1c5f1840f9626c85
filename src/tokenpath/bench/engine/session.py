"""A loaded engine under a stopwatch: runs one work once.

What is timed is what serving does: ``EngineCore.step`` with its scheduler, sampler and detokenizer,
and the encoding of the step's frame for the gateway. Prompts are random, sampling is greedy, ends
of text are ignored. Token counts are read from the engine's own totals and checked.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenpath.bench.engine.roofline import Moment
from tokenpath.bench.engine.works import DECODE_STEPS, Decode, Prefill
from tokenpath.engine.batch import build_batch
from tokenpath.engine.core import EngineCore
from tokenpath.engine.runner import ModelRunner
from tokenpath.policy.sequence import StepPlan
from tokenpath.protocol.errors import EngineError
from tokenpath.protocol.events import Failed
from tokenpath.protocol.framing import encode
from tokenpath.protocol.grammar import Grammar
from tokenpath.protocol.link import StepOutput
from tokenpath.protocol.request import (
    GREEDY_TEMPERATURE,
    GenerationRequest,
    SamplingParams,
    TokenPrompt,
)

Clock = Callable[[], float]
_GRAMMAR = Grammar.json_schema(
    {
        "type": "array",
        "minItems": 200,
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 24},
                "kind": {"enum": ["function", "class", "module", "constant"]},
                "line": {"type": "integer", "minimum": 1, "maximum": 99_999},
                "score": {"type": "number"},
                "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
            },
            "required": ["name", "kind", "line", "score", "tags"],
            "additionalProperties": False,
        },
    }
)
"""Of structured works: what an extraction asks for, and longer than any work."""
_LOWEST_ID = 100
"""Below it many vocabularies have control tokens."""


class TimedRunner:
    """Stands between core and runner, and adds up the time of the forward passes."""

    def __init__(self, runner: ModelRunner, clock: Clock) -> None:
        self.runner = runner
        self.forward_s = 0.0
        self._clock = clock

    def run(self, plan: StepPlan) -> torch.Tensor:
        """As the runner's, whose batch building is not part of the forward pass."""
        batch = build_batch(plan, self.runner.block_tokens)
        started = self._clock()
        logits = self.runner.forward(batch)
        self.forward_s += self._clock() - started
        return logits


@dataclass(frozen=True, slots=True)
class Span:
    """One measurement of a work."""

    seconds: float
    tokens: int
    """Prompt tokens of a prefill, sampled tokens of decoding."""
    steps: int
    forward_s: float
    """Of ``seconds``, those in the model's forward passes."""
    context_tokens: float
    """Mean context of a decoding sequence over the span; that of the last token of a prefill."""
    limits: tuple[Moment, ...]
    """The machine's, just before and just after; empty if they were not measured."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def overhead(self) -> float:
        """Fraction of the time outside of the forward passes."""
        return 1.0 - self.forward_s / self.seconds


class Session:
    """Runs works on one engine. Nothing else may use the engine meanwhile."""

    def __init__(
        self,
        core: EngineCore,
        runner: TimedRunner,
        *,
        step_tokens: int,
        seed: int,
        clock: Clock = time.perf_counter,
    ) -> None:
        """``step_tokens`` is the scheduler's budget of a step."""
        self._core = core
        self._runner = runner
        self._step_tokens = step_tokens
        self.probe: Callable[[], Moment] | None = None
        """Measures the machine before and after each work, if it is set."""
        self._clock = clock
        self._random = random.Random(seed)  # noqa: S311 - prompts are no secrets
        self._numbers = itertools.count()

    def warm_up(self) -> None:
        """Touch what a first use allocates, with a short prompt and a few steps of two."""
        for _ in range(2):
            self._submit(32, 8)
        while self._core.has_work():
            self._step()

    def measure(self, work: Prefill | Decode) -> Span:
        """Run a work once. Raises ``EngineError`` if the engine did not do exactly that work."""
        return self._prefill(work) if isinstance(work, Prefill) else self._decode(work)

    def _prefill(self, work: Prefill) -> Span:
        before, forward = self._core.stats(), self._runner.forward_s
        limits = self._limits()
        started = self._clock()
        self._submit(work.tokens, 1)
        while self._core.has_work():
            self._step()
        seconds = self._clock() - started
        limits += self._limits()
        after = self._core.stats()
        computed = after.prompt_tokens_total - before.prompt_tokens_total
        computed -= after.cached_prompt_tokens_total - before.cached_prompt_tokens_total
        _check(work.name, "prompt tokens", computed, work.tokens)
        _check(
            work.name,
            "sampled tokens",
            after.generated_tokens_total - before.generated_tokens_total,
            1,
        )
        return Span(
            seconds=seconds,
            tokens=computed,
            steps=after.steps_total - before.steps_total,
            forward_s=self._runner.forward_s - forward,
            context_tokens=float(work.tokens),
            limits=limits,
        )

    def _decode(self, work: Decode) -> Span:
        core = self._core
        prompts = work.prompts(self._step_tokens)
        start = before = core.stats()
        grammar = _GRAMMAR if work.structured else None
        live = [self._submit(length, work.sequence_tokens - length, grammar) for length in prompts]
        try:
            # The step that computes the last prompt is the first in which every sequence samples.
            sampled = 0
            while sampled < work.sequences:
                self._step()
                after = core.stats()
                sampled = after.generated_tokens_total - before.generated_tokens_total
                before = after
            forward = self._runner.forward_s
            begun_tokens = before.generated_tokens_total - start.generated_tokens_total
            limits = self._limits()
            started = self._clock()
            for _ in range(DECODE_STEPS):
                self._step()
            seconds = self._clock() - started
            limits += self._limits()
            after = core.stats()
        finally:
            for request_id in live:
                core.abort(request_id)
        sampled = after.generated_tokens_total - before.generated_tokens_total
        _check(work.name, "sampled tokens", sampled, work.sequences * DECODE_STEPS)
        _check(work.name, "steps", after.steps_total - before.steps_total, DECODE_STEPS)
        _check(work.name, "preemptions", after.preemptions_total - start.preemptions_total, 0)
        return Span(
            seconds=seconds,
            tokens=sampled,
            steps=DECODE_STEPS,
            forward_s=self._runner.forward_s - forward,
            context_tokens=(sum(prompts) + begun_tokens) / work.sequences + (DECODE_STEPS - 1) / 2,
            limits=limits,
        )

    def _limits(self) -> tuple[Moment, ...]:
        return () if self.probe is None else (self.probe(),)

    def _submit(self, prompt_tokens: int, max_tokens: int, grammar: Grammar | None = None) -> str:
        """Queue a request of random tokens; returns its id."""
        vocab = self._core.card.vocab_size
        lowest = min(_LOWEST_ID, vocab // 2)
        request_id = f"bench-{next(self._numbers)}"
        request = GenerationRequest(
            request_id=request_id,
            model=self._core.card.name,
            prompt=TokenPrompt(self._random.choices(range(lowest, vocab), k=prompt_tokens)),
            sampling=SamplingParams(
                max_tokens=max_tokens,
                temperature=GREEDY_TEMPERATURE,
                ignore_eos=grammar is None,
                grammar=grammar,
            ),
        )
        self._core.submit(request)
        return request_id

    def _step(self) -> None:
        """One step and its frame. Raises ``EngineError`` if it failed a request."""
        events = self._core.step()
        encode(StepOutput(events))
        for event in events:
            if isinstance(event, Failed):
                raise EngineError(f"a request of the benchmark failed: {event.error.message}")


def _check(work: str, what: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise EngineError(f"{work} had {found} {what} instead of {wanted}, so it is no result")
