"""What a long prompt does to streams: their worst gap while it is computed beside them.

Streams decode, then a prompt of random tokens comes. All gaps between the streams' tokens are
taken from then until the prompt's first token, once with no bound but the step's budget of tokens,
and once with the spec's default target.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from tokenpath.bench.engine.first_token import Say
from tokenpath.bench.engine.live import Live
from tokenpath.bench.engine.works import STREAM_TOKENS, STREAMS, Stalling
from tokenpath.config.spec import EngineSettings
from tokenpath.engine.runner import ModelRunner
from tokenpath.policy.scheduler import Scheduler, SchedulerConfig
from tokenpath.policy.step_budget import StepBudget

_QUIET_STEPS = 24
"""Of the streams alone, before the prompt comes."""
_PROMPT = "prompt"


class StallingFigure(msgspec.Struct, frozen=True, kw_only=True):
    """Gaps between the tokens of any stream. The worst are over all rounds, the rest medians."""

    streams: int
    prompt_tokens: int
    step_tokens: int
    target_s: float
    quiet_gap_s: float
    """Without the prompt."""
    unbounded_worst_s: float
    unbounded_prompt_s: float
    """From the prompt's coming to its first token."""
    worst_s: float
    """With the target."""
    p99_s: float
    prompt_s: float

    def ratios(self, name: str) -> dict[str, float]:
        """As ``TaskFigure``."""
        return {f"{name}_worst_gap_s": self.worst_s}

    def sentence(self) -> str:
        """As ``TaskFigure``."""
        return (
            f"worst gap of {self.streams} streams {self.unbounded_worst_s * 1000:,.0f} ms without "
            "bound, "
            f"{self.worst_s * 1000:,.0f} ms (p99 {self.p99_s * 1000:,.0f}) with a target of "
            f"{self.target_s * 1000:,.0f} ms; {self.quiet_gap_s * 1000:,.0f} ms without the "
            f"prompt, whose first token came after {self.unbounded_prompt_s:,.1f} s and "
            f"{self.prompt_s:,.1f} s"
        )


@dataclass(frozen=True, slots=True)
class _Run:
    quiet_s: float
    gaps_s: list[float]
    prompt_s: float


def measure(
    runner: ModelRunner, work: Stalling, *, step_tokens: int, rounds: int, seed: int, say: Say
) -> StallingFigure:
    """Run a work."""
    target_s = EngineSettings().target_itl_s
    assert target_s is not None, "the spec's default is a target"
    unbounded: list[_Run] = []
    bounded: list[_Run] = []
    for number in range(1, rounds + 1):
        say(f"{work.name}: round {number} of {rounds}, unbounded")
        unbounded.append(_run(runner, work, step_tokens, None, seed))
        say(f"{work.name}: round {number} of {rounds}, with a target of {target_s:g} s")
        bounded.append(_run(runner, work, step_tokens, target_s, seed))
    every = sorted(gap for run in bounded for gap in run.gaps_s)
    return StallingFigure(
        streams=STREAMS,
        prompt_tokens=work.tokens,
        step_tokens=step_tokens,
        target_s=target_s,
        quiet_gap_s=statistics.median(run.quiet_s for run in (*unbounded, *bounded)),
        unbounded_worst_s=max(gap for run in unbounded for gap in run.gaps_s),
        unbounded_prompt_s=statistics.median(run.prompt_s for run in unbounded),
        worst_s=every[-1],
        p99_s=every[int(0.99 * (len(every) - 1))],
        prompt_s=statistics.median(run.prompt_s for run in bounded),
    )


def _run(
    runner: ModelRunner, work: Stalling, step_tokens: int, target_s: float | None, seed: int
) -> _Run:
    size = runner.block_tokens
    step_budget = None if target_s is None else StepBudget(target_s)
    scheduler = Scheduler(
        SchedulerConfig(
            max_step_tokens=step_tokens,
            max_running=STREAMS + 1,
            block_tokens=size,
            num_blocks=runner.num_blocks,
            max_context_tokens=runner.num_blocks * size,
            prefix_cache=False,
        ),
        step_budget=step_budget,
    )
    live = Live(runner, scheduler, step_budget, seed=seed)
    length = work.stream_tokens - STREAM_TOKENS
    for index in range(STREAMS):
        live.add(f"stream-{index}", STREAM_TOKENS, length, came_s=live.now())
    for _ in range(_QUIET_STEPS):
        live.step()
    first = live.timelines["stream-0"]
    quiet_s = statistics.median(first.gaps_s[-_QUIET_STEPS // 2 :])
    began = len(first.tokens_s) - 1
    live.add(_PROMPT, work.tokens, 1, came_s=live.now())
    prompt = live.timelines[_PROMPT]
    while not prompt.tokens_s:
        live.step()
    # Every stream has a token of every step, so one stream's gaps are all of theirs.
    gaps_s = [b - a for a, b in pairwise(first.tokens_s[began:])]
    live.end()
    return _Run(quiet_s, gaps_s, prompt.first_s)
