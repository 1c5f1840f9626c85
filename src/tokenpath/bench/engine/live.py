"""Steps of many sequences at once, with a scheduler of the measurement's own, under a clock.

As in ``first_token``, scheduler and forward passes are those that serve; sampler and detokenizer
are left out, and the likeliest token is taken.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenpath.engine.runner import ModelRunner
from tokenpath.policy.scheduler import Scheduler
from tokenpath.policy.step_budget import StepBudget


@dataclass(slots=True)
class Timeline:
    """When one sequence came, and when each of its tokens did; in seconds on one clock."""

    came_s: float
    tokens_s: list[float] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        """From its coming to its first token."""
        return self.tokens_s[0] - self.came_s

    @property
    def gaps_s(self) -> list[float]:
        """Between successive tokens."""
        return [b - a for a, b in zip(self.tokens_s, self.tokens_s[1:], strict=False)]


class Live:
    """Sequences of random tokens on one runner."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        step_budget: StepBudget | None,
        *,
        seed: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``step_budget`` is the scheduler's."""
        self.timelines: dict[str, Timeline] = {}
        self._runner = runner
        self._scheduler = scheduler
        self._step_budget = step_budget
        self._random = random.Random(seed)  # noqa: S311 - prompts are no secrets
        self._clock = clock

    def now(self) -> float:
        """On the clock of all times here."""
        return self._clock()

    def end(self) -> None:
        """Withdraw whatever is still going on."""
        for name in self.timelines:
            self._scheduler.finish(name)

    def add(
        self, name: str, prompt_tokens: int, max_tokens: int, *, tenant: str = "", came_s: float
    ) -> None:
        """Queue a sequence that came at ``came_s``."""
        vocab = self._runner.config.vocab_size
        prompt = self._random.choices(range(vocab // 2, vocab), k=prompt_tokens)
        self._scheduler.add(name, prompt, max_tokens=max_tokens, tenant=tenant, now=came_s)
        self.timelines[name] = Timeline(came_s)

    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._scheduler.running or self._scheduler.waiting)

    def step(self) -> None:
        """Compute one step, and finish what has all its tokens."""
        started = self._clock()
        plan = self._scheduler.plan(started)
        rows = iter(self._runner.run(plan))
        sampling = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        sampled = {s.request_id: [int(row.argmax())] for s, row in zip(sampling, rows, strict=True)}
        self._scheduler.commit(plan, sampled)
        now = self._clock()
        if self._step_budget is not None:
            self._step_budget.observe(plan, now - started)
        for sequence in sampling:
            self.timelines[sequence.request_id].tokens_s.append(now)
            if sequence.output_tokens == sequence.max_tokens:
                self._scheduler.finish(sequence.request_id)
