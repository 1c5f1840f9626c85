"""The time to a first token, prompt after prompt, with a scheduler of the measurement's own.

Scheduler, tiers and forward passes are those that serve; sampler and detokenizer are left out,
because a first token costs little of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenpath.engine.kv_tiers.tiers import KvTiers
from tokenpath.engine.runner import ModelRunner
from tokenpath.policy.scheduler import Scheduler

_WAIT_S = 0.005
Say = Callable[[str], None]
"""Told what is being done."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """One prompt's first token."""

    seconds: float
    """From its submission."""
    cached_tokens: int
    """Of the prompt, those that were not computed."""


def turns(
    runner: ModelRunner,
    scheduler: Scheduler,
    tiers: KvTiers | None,
    prompts: Sequence[Sequence[int]],
) -> list[FirstToken]:
    """Each prompt alone, up to its first token."""
    found = []
    for prompt in prompts:
        started = time.perf_counter()
        sequence = scheduler.add("bench", prompt, max_tokens=1)
        while not sequence.output_tokens:
            plan = scheduler.plan()
            planned = time.perf_counter()
            if not plan.chunks:
                if tiers is not None:
                    tiers.wait(_WAIT_S)
                continue
            rows = runner.run(plan)
            sampled = {"bench": [int(rows[0].argmax())]} if len(rows) else {}
            scheduler.commit(plan, sampled)
            if tiers is not None:
                tiers.computed(plan.tokens, time.perf_counter() - planned)
        found.append(FirstToken(time.perf_counter() - started, sequence.cached_prompt_tokens or 0))
        scheduler.finish("bench")
    return found


def median_s(found: Sequence[FirstToken]) -> float:
    """The median time."""
    return statistics.median(first.seconds for first in found)
