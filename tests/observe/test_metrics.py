"""Gaps between tokens, and counters over replicas that come and go."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from tokenpath.observe.metrics import Metrics
from tokenpath.observe.replica_metrics import ReplicaMetrics
from tokenpath.protocol.errors import ReplicaLostError
from tokenpath.protocol.replica import ReplicaState, ReplicaStats


def value(metrics: Metrics, name: str, **labels) -> float:
    return metrics.registry.get_sample_value(name, labels) or 0.0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.floats(0, 10))))
def test_every_gap_is_counted_and_their_sum_is_the_time_they_span(events):
    metrics = Metrics()
    now = [0.0]
    meter = metrics.token_meter("m", lambda: now[0])
    tokens, first, last = {}, {}, {}
    for sequence, count, wait in events:
        now[0] += wait
        meter.arrived(sequence, count)
        if count:
            tokens[sequence] = tokens.get(sequence, 0) + count
            first.setdefault(sequence, now[0])
            last[sequence] = now[0]
    name = "tokenpath_inter_token_latency_seconds"
    gaps = sum(count - 1 for count in tokens.values())
    assert value(metrics, f"{name}_count", model="m") == gaps
    spans = sum(last[s] - first[s] for s in first)
    assert abs(value(metrics, f"{name}_sum", model="m") - spans) < 1e-6
    assert meter.first_s == min(first.values(), default=None)


class Reporting:
    def __init__(self) -> None:
        self.state = ReplicaState.READY
        self.last_stats = ReplicaStats()
        self.answer: ReplicaStats | None = None

    async def stats(self) -> ReplicaStats:
        if self.answer is None:
            raise ReplicaLostError("gone")
        return self.answer


@given(st.lists(st.lists(st.integers(0, 100), min_size=1), min_size=1))
def test_counters_grow_over_restarts(lives):
    """Each life counts from zero; what was reported of every life is in the sum."""
    replica = Reporting()
    metrics = Metrics()
    metrics.registry.register(ReplicaMetrics(lambda: {"m": [replica]}))
    shown = []
    for life in lives:
        for report in sorted(life):
            # Steps grow with every report, so that each life's first report shows as a restart.
            replica.last_stats = ReplicaStats(generated_tokens_total=report, steps_total=report)
            shown.append(value(metrics, "tokenpath_generated_tokens_total", model="m", replica="0"))
    assert shown == sorted(shown)
    assert shown[-1] <= sum(max(life) for life in lives)
    assert shown[-1] >= max(max(life) for life in lives)


async def test_a_scrape_asks_the_replica_and_falls_back_to_its_last_report():
    replica = Reporting()
    replica.last_stats = ReplicaStats(requests_running=1)
    metrics = Metrics()
    collector = ReplicaMetrics(lambda: {"m": [replica]})
    metrics.registry.register(collector)
    replica.answer = ReplicaStats(requests_running=2)
    await collector.refresh()
    assert value(metrics, "tokenpath_requests_running", model="m", replica="0") == 2
    replica.answer = None
    await collector.refresh()
    assert value(metrics, "tokenpath_requests_running", model="m", replica="0") == 1

    async def hang() -> ReplicaStats:
        return await asyncio.Future()

    replica.stats = hang
    replica.last_stats = ReplicaStats(requests_running=5)
    await collector.refresh(timeout_s=0.01)
    assert value(metrics, "tokenpath_requests_running", model="m", replica="0") == 5
