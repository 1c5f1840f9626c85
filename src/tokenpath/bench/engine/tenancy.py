"""What sharing by served tokens is worth to a tenant beside one with ten times its load.

Both send requests of one size at a steady pace, together more than the engine can serve, so that a
queue grows for as long as the measurement lasts. The light tenant's times are taken with requests
served in order of arrival, and with tenants served in turn.
"""

from __future__ import annotations

import time

import msgspec

from tokenpath.bench.engine.first_token import Say
from tokenpath.bench.engine.live import Live
from tokenpath.bench.engine.works import TENANT_OUTPUT_TOKENS, TENANT_RUNNING, Tenancy
from tokenpath.engine.runner import ModelRunner
from tokenpath.policy.fairness import Fairness
from tokenpath.policy.scheduler import Scheduler, SchedulerConfig

HEAVY = 10
"""Requests of the heavy tenant for one of the light."""
OVERLOAD = 1.5
"""The load, in terms of what the engine can do."""
_LIGHT_REQUESTS = 16
"""Of the light tenant, in each round."""
_PROBE_REQUESTS = 2 * TENANT_RUNNING


class TenantTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant's, over all its requests of all rounds."""

    requests: int
    ttft_p50_s: float
    ttft_p99_s: float
    gap_p50_s: float
    gap_p99_s: float


class TenancyFigure(msgspec.Struct, frozen=True, kw_only=True):
    """Times of both tenants, with requests in order of arrival and with tenants in turn."""

    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    """Of both tenants together."""
    capacity_per_s: float
    """What the engine was measured to serve."""
    alone: TenantTimes
    """The light tenant without the heavy one."""
    light_unfair: TenantTimes
    heavy_unfair: TenantTimes
    light: TenantTimes
    heavy: TenantTimes

    def ratios(self, name: str) -> dict[str, float]:
        """As ``TaskFigure``."""
        return {f"{name}_light_ttft_p99_s": self.light.ttft_p99_s}

    def sentence(self) -> str:
        """As ``TaskFigure``."""
        return (
            f"beside {HEAVY} times its load a tenant's first tokens come after p99 "
            f"{self.light_unfair.ttft_p99_s * 1000:,.0f} ms in order of arrival, "
            f"{self.light.ttft_p99_s * 1000:,.0f} ms in turn, "
            f"{self.alone.ttft_p99_s * 1000:,.0f} ms alone; gaps p99 "
            f"{self.light_unfair.gap_p99_s * 1000:,.0f}, "
            f"{self.light.gap_p99_s * 1000:,.0f} and {self.alone.gap_p99_s * 1000:,.0f} ms"
        )


def measure(
    runner: ModelRunner, work: Tenancy, *, step_tokens: int, rounds: int, seed: int, say: Say
) -> TenancyFigure:
    """Run a work."""
    say(f"{work.name}: what the engine can do")
    capacity_per_s = _capacity(runner, work, step_tokens, seed)
    interval_s = (HEAVY + 1) / (OVERLOAD * capacity_per_s)
    times: dict[tuple[bool, int], list[Live]] = {}
    for number in range(1, rounds + 1):
        for fair, heavy in ((False, HEAVY), (True, HEAVY), (True, 0)):
            say(
                f"{work.name}: round {number} of {rounds}, "
                f"{'in turn' if fair else 'in order of arrival'}, {heavy} to 1"
            )
            run = _run(runner, work, step_tokens, fair, heavy, interval_s, seed)
            times.setdefault((fair, heavy), []).append(run)
    return TenancyFigure(
        prompt_tokens=work.tokens,
        output_tokens=TENANT_OUTPUT_TOKENS,
        requests_per_s=OVERLOAD * capacity_per_s,
        capacity_per_s=capacity_per_s,
        alone=_times(times[True, 0], "light"),
        light_unfair=_times(times[False, HEAVY], "light"),
        heavy_unfair=_times(times[False, HEAVY], "heavy"),
        light=_times(times[True, HEAVY], "light"),
        heavy=_times(times[True, HEAVY], "heavy"),
    )


def _live(runner: ModelRunner, step_tokens: int, seed: int, *, fair: bool) -> Live:
    size = runner.block_tokens
    scheduler = Scheduler(
        SchedulerConfig(
            max_step_tokens=step_tokens,
            max_running=TENANT_RUNNING,
            block_tokens=size,
            num_blocks=runner.num_blocks,
            max_context_tokens=runner.num_blocks * size,
            prefix_cache=False,
            fairness=Fairness(by_tokens=fair),
        )
    )
    return Live(runner, scheduler, None, seed=seed)


def _capacity(runner: ModelRunner, work: Tenancy, step_tokens: int, seed: int) -> float:
    """Requests/s of a full batch."""
    live = _live(runner, step_tokens, seed, fair=False)
    began = live.now()
    for index in range(_PROBE_REQUESTS):
        live.add(f"{index}", work.tokens, TENANT_OUTPUT_TOKENS, came_s=began)
    while live.busy():
        live.step()
    return _PROBE_REQUESTS / (live.now() - began)


def _run(
    runner: ModelRunner,
    work: Tenancy,
    step_tokens: int,
    fair: bool,
    heavy: int,
    interval_s: float,
    seed: int,
) -> Live:
    live = _live(runner, step_tokens, seed, fair=fair)
    began = live.now()
    coming = [
        (began + index * interval_s / max(heavy, 1), f"heavy-{index}")
        for index in range(heavy * _LIGHT_REQUESTS)
    ]
    # Between two of the heavy tenant's.
    coming += [
        (began + (index + 0.55) * interval_s, f"light-{index}") for index in range(_LIGHT_REQUESTS)
    ]
    coming.sort(reverse=True)
    while coming or live.busy():
        while coming and coming[-1][0] <= live.now():
            came_s, name = coming.pop()
            tenant = name.partition("-")[0]
            live.add(name, work.tokens, TENANT_OUTPUT_TOKENS, tenant=tenant, came_s=came_s)
        if live.busy():
            live.step()
        else:
            time.sleep(max(0.0, coming[-1][0] - live.now()))
    return live


def _times(runs: list[Live], tenant: str) -> TenantTimes:
    found = [
        timeline
        for live in runs
        for name, timeline in live.timelines.items()
        if name.startswith(tenant)
    ]
    firsts = sorted(timeline.first_s for timeline in found)
    gaps = sorted(gap for timeline in found for gap in timeline.gaps_s)

    def at(values: list[float], fraction: float) -> float:
        return values[round(fraction * (len(values) - 1))]

    return TenantTimes(
        requests=len(found),
        ttft_p50_s=at(firsts, 0.5),
        ttft_p99_s=at(firsts, 0.99),
        gap_p50_s=at(gaps, 0.5),
        gap_p99_s=at(gaps, 0.99),
    )
