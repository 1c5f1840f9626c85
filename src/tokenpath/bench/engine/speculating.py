"""What speculation is worth: the same answers with and without it, alternately, on one engine.

Prompts are real text, since random tokens repeat nothing; they are computed before the clock
starts. Sampling is greedy. With the native kernels the answers must be equal, token for token: if
they are not, there is no result.
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass

import msgspec

from tokenpath.bench.engine.first_token import Say
from tokenpath.bench.engine.loaded import LoadedModel
from tokenpath.bench.engine.speculating_prompts import RECORDS_SCHEMA, prompt
from tokenpath.bench.engine.works import Speculating
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


class SpeculatingFigure(msgspec.Struct, frozen=True, kw_only=True):
    """One work over all rounds; rates are medians in tokens/s."""

    plain: float
    """Without speculation."""
    speculating: float
    ratio: float
    """Median over the rounds of what speculation gained in each."""
    rounds: list[float]
    """The ratios."""
    tokens_per_step: float
    """With speculation, for each sequence."""
    drafted: int
    accepted: int

    def ratios(self, name: str) -> dict[str, float]:
        """As ``TaskFigure``."""
        return {name: self.ratio}

    def sentence(self) -> str:
        """As ``TaskFigure``."""
        return (
            f"{self.plain:,.1f} tokens/s, {self.speculating:,.1f} with speculation "
            f"({self.ratio:.2f} times; {self.tokens_per_step:.1f} tokens a step and sequence, "
            f"{self.accepted:,} of {self.drafted:,} drafted tokens accepted)"
        )


@dataclass(frozen=True, slots=True)
class _Run:
    seconds: float
    tokens: int
    steps: int
    answers: list[list[int]]


def measure(loaded: LoadedModel, work: Speculating, *, rounds: int, say: Say) -> SpeculatingFigure:
    """Run a work, each round once without and once with speculation.

    Raises ``EngineError`` if the answers differ where they must not, or the engine failed.
    """
    speculator = loaded.core.speculator
    assert speculator is not None, "the engine was loaded for this work"
    session = _Session(loaded)
    before = sum(speculator.drafted_total), sum(speculator.accepted_total)
    plain: list[_Run] = []
    speculating: list[_Run] = []
    for number in range(1, rounds + 1):
        for paused, found in ((True, plain), (False, speculating)):
            say(f"round {number} of {rounds}: {work.name}{'' if paused else ', speculating'}")
            speculator.paused = paused
            found.append(session.run(work))
    speculator.paused = True
    if loaded.runner.kernels != "torch" and plain[0].answers != speculating[-1].answers:
        raise EngineError(f"{work.name} had other answers with speculation, so it is no result")
    ratios = [
        (fast.tokens / fast.seconds) / (slow.tokens / slow.seconds)
        for slow, fast in zip(plain, speculating, strict=True)
    ]
    return SpeculatingFigure(
        plain=statistics.median(run.tokens / run.seconds for run in plain),
        speculating=statistics.median(run.tokens / run.seconds for run in speculating),
        ratio=statistics.median(ratios),
        rounds=ratios,
        tokens_per_step=statistics.median(
            run.tokens / run.steps / work.sequences for run in speculating
        ),
        drafted=sum(speculator.drafted_total) - before[0],
        accepted=sum(speculator.accepted_total) - before[1],
    )


class _Session:
    def __init__(self, loaded: LoadedModel) -> None:
        self._core = loaded.core
        self._tokenizer = loaded.local.tokenizer()
        self._template = loaded.local.chat_template()
        self._numbers = itertools.count()

    def run(self, work: Speculating) -> _Run:
        """All sequences of a work, from when each has its first token."""
        core = self._core
        answers: dict[str, list[int]] = {}
        for index in range(work.sequences):
            answers[self._submit(work, index)] = []
        while not all(answers.values()):
            self._step(answers)
        begun, steps = sum(map(len, answers.values())), core.stats().steps_total
        started = time.perf_counter()
        while core.has_work():
            self._step(answers)
        seconds = time.perf_counter() - started
        return _Run(
            seconds,
            sum(map(len, answers.values())) - begun,
            core.stats().steps_total - steps,
            list(answers.values()),
        )

    def _submit(self, work: Speculating, index: int) -> str:
        text = prompt(work.kind, index)
        if self._template is None:
            token_ids = self._tokenizer.encode(text)
        else:
            shown = self._template.render([{"role": "user", "content": text}])
            token_ids = self._tokenizer.encode(shown, add_special=False)
        request_id = f"bench-{next(self._numbers)}"
        structured = work.kind == "json"
        self._core.submit(
            GenerationRequest(
                request_id=request_id,
                model=self._core.card.name,
                prompt=TokenPrompt(token_ids),
                sampling=SamplingParams(
                    max_tokens=work.output_tokens,
                    temperature=GREEDY_TEMPERATURE,
                    ignore_eos=not structured,
                    grammar=Grammar.json_schema(RECORDS_SCHEMA) if structured else None,
                ),
            )
        )
        return request_id

    def _step(self, answers: dict[str, list[int]]) -> None:
        events = self._core.step()
        encode(StepOutput(events))
        for event in events:
            if isinstance(event, Failed):
                raise EngineError(f"a request of the benchmark failed: {event.error.message}")
            answers[event.request_id] += event.token_ids
