"""What prefix reuse is worth: the time to a first token under a long prompt that callers share.

Callers come one after the other with the same system prompt and a few tokens of their own. The
first pays for the system prompt; the others find its blocks in the pool. Each round has a new one.
"""

from __future__ import annotations

import random
import statistics

import msgspec

from tokenpath.bench.engine.first_token import FirstToken, Say, median_s, turns
from tokenpath.bench.engine.works import OWN_TOKENS, SHARERS, Sharing
from tokenpath.engine.runner import ModelRunner
from tokenpath.policy.scheduler import Scheduler, SchedulerConfig
from tokenpath.protocol.errors import EngineError


class SharingFigure(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over all callers and rounds; times are to the first token."""

    shared_tokens: int
    own_tokens: int
    """Of each caller, after the shared ones."""
    cached_tokens: int
    """Found by a later caller, the median."""
    first_s: float
    """Of the caller that finds nothing."""
    later_s: float
    ratio: float
    """How many times sooner the later callers have their first token."""

    def ratios(self, name: str) -> dict[str, float]:
        """As ``TaskFigure``."""
        return {name: self.ratio}

    def sentence(self) -> str:
        """As ``TaskFigure``."""
        return (
            f"first token after {self.first_s * 1000:,.0f} ms for the first caller, "
            f"{self.later_s * 1000:,.0f} ms for the next ones ({self.ratio:.1f} times faster)"
        )


def measure(
    runner: ModelRunner, work: Sharing, *, step_tokens: int, rounds: int, seed: int, say: Say
) -> SharingFigure:
    """Run a work. Raises ``EngineError`` if the later callers did not find the prompt."""
    rng = random.Random(seed)  # noqa: S311 - prompts are no secrets
    vocab = runner.config.vocab_size
    size = runner.block_tokens
    config = SchedulerConfig(
        max_step_tokens=step_tokens,
        max_running=1,
        block_tokens=size,
        num_blocks=work.sequences * -(-work.sequence_tokens // size),
        max_context_tokens=work.sequence_tokens,
    )

    def ids(count: int) -> list[int]:
        return rng.choices(range(vocab // 2, vocab), k=count)

    first: list[FirstToken] = []
    later: list[FirstToken] = []
    for number in range(1, rounds + 1):
        say(f"{work.name}: round {number} of {rounds}")
        shared = ids(work.tokens)
        prompts = [shared + ids(OWN_TOKENS) for _ in range(1 + SHARERS)]
        found = turns(runner, Scheduler(config), None, prompts)
        first += found[:1]
        later += found[1:]
    cached = int(statistics.median(one.cached_tokens for one in later))
    if cached < work.tokens - size:
        raise EngineError(f"{work.name} found {cached} tokens in the cache, so it is no result")
    return SharingFigure(
        shared_tokens=work.tokens,
        own_tokens=OWN_TOKENS,
        cached_tokens=cached,
        first_s=median_s(first),
        later_s=median_s(later),
        ratio=median_s(first) / median_s(later),
    )
