"""The replicas' own figures, read at every scrape and kept nowhere else.

A scrape first asks every replica for its stats (``refresh``); one that does not answer in time is
shown with its last report. A replica that is gone shows no gauges (unknown is not zero), and its
counters stay. When it comes back counting from zero, what it had counted before is added, so that a
counter never falls; what it did between its last report and its end is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tokenpath.protocol.errors import TokenpathError
from tokenpath.protocol.replica import Replica, ReplicaState, ReplicaStats

ASK_TIMEOUT_S = 0.5
"""A busy engine answers between two steps; a scraper gives up after some seconds."""

_LABELS = ("model", "replica")
_ALIVE = (ReplicaState.READY, ReplicaState.DRAINING)

_GAUGES = {
    "requests_running": "Sequences in the engine's batch.",
    "requests_waiting": "Sequences in the engine's queue.",
    "waiting_tokens": "Prompt tokens of the waiting sequences that are not known to be cached.",
    "kv_blocks_used": "KV blocks held by live requests.",
    "kv_blocks_cached": "KV blocks held by nobody, reusable as a prefix, reclaimable at once.",
    "kv_blocks_total": "KV blocks in the pool.",
    "kv_host_blocks": "KV blocks evicted from the pool and kept in host memory.",
    "kv_host_bytes": "Host memory of these blocks.",
    "kv_disk_blocks": "KV blocks kept on the disk.",
    "kv_disk_bytes": "Bytes of these blocks' files.",
    "resident_bytes": "Resident memory of the engine's process.",
    "grammars_cached": "Compiled grammars that are kept.",
}
_COUNTERS = {
    "kv_saved_blocks_total": "KV blocks copied out of the pool as they were evicted.",
    "kv_restored_blocks_total": "KV blocks copied back into the pool.",
    "kv_restored_tokens_total": "Tokens of the KV blocks copied back into the pool.",
    "kv_disk_hits_total": "KV blocks read from the disk because a prefix has them.",
    "kv_corrupt_blocks_total": "KV blocks found damaged, and computed instead.",
    "kv_dropped_blocks_total": "KV blocks lost from the last tier, or never kept.",
    "handovers_total": "Prompts ordered from another replica.",
    "handover_fallbacks_total": "Prompts that another replica should have computed, and did not, "
    "or not all of it.",
    "handover_blocks_received_total": "KV blocks that another replica handed over.",
    "handover_blocks_given_total": "KV blocks handed over to another replica.",
    "handover_bytes_received_total": "Bytes of the KV blocks that another replica handed over.",
    "handover_bytes_given_total": "Bytes of the KV blocks handed over to another replica.",
    "handover_seconds_total": "Time from each order of a handover to its end, added up.",
    "prompt_tokens_total": "Prompt tokens of admitted sequences.",
    "cached_prompt_tokens_total": "Of them, those whose KV was reused.",
    "generated_tokens_total": "Tokens sampled.",
    "preemptions_total": "Sequences sent back to the queue because KV blocks ran out.",
    "steps_total": "Engine steps.",
    "step_seconds_total": "Time spent in engine steps.",
    "aborts_total": "Sequences withdrawn before their end.",
    "grammars_compiled_total": "Grammars compiled, or found wrong.",
    "grammar_hits_total": "Requests whose grammar was compiled already, or was being compiled.",
    "grammar_compile_seconds_total": "Time spent compiling grammars.",
}


@dataclass(slots=True)
class _Growing:
    """Counters of one place, summed over the lives of the replicas that held it."""

    earlier: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_COUNTERS, 0.0))
    now: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_COUNTERS, 0.0))

    def take(self, stats: ReplicaStats) -> None:
        new = {name: float(getattr(stats, name)) for name in _COUNTERS}
        if any(new[name] < self.now[name] for name in _COUNTERS):
            for name in _COUNTERS:
                self.earlier[name] += self.now[name]
        self.now = new

    def total(self, name: str) -> float:
        return self.earlier[name] + self.now[name]


class ReplicaMetrics(Collector):
    """A collector over the replicas of every model; the label ``replica`` is its place, 0, 1 …"""

    def __init__(self, replicas: Mapping[str, Sequence[Replica]]) -> None:
        self._places = {
            (model, str(place)): replica
            for model, its in replicas.items()
            for place, replica in enumerate(its)
        }
        self._growing = {place: _Growing() for place in self._places}
        self._stats: dict[tuple[str, str], ReplicaStats] = {}

    async def refresh(self, timeout_s: float = ASK_TIMEOUT_S) -> None:
        """Ask every replica for its stats now, all at once; to be awaited before a scrape."""
        places = list(self._places)
        answers = await asyncio.gather(
            *(self._ask(self._places[place], timeout_s) for place in places)
        )
        self._stats = dict(zip(places, answers, strict=True))

    @staticmethod
    async def _ask(replica: Replica, timeout_s: float) -> ReplicaStats:
        try:
            async with asyncio.timeout(timeout_s):
                return await replica.stats()
        except (TokenpathError, TimeoutError):
            return replica.last_stats

    def collect(self) -> Iterator[Metric]:
        """The metric families, from the stats of the last ``refresh``."""
        stats = {
            place: self._stats.get(place) or replica.last_stats
            for place, replica in self._places.items()
        }
        up = GaugeMetricFamily(
            "tokenpath_replica_up", "1 if the replica takes requests, else 0.", labels=_LABELS
        )
        for place, replica in self._places.items():
            self._growing[place].take(stats[place])
            up.add_metric(place, float(replica.state is ReplicaState.READY))
        yield up
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"tokenpath_{name}", text, labels=_LABELS)
            for place, replica in self._places.items():
                if replica.state in _ALIVE:
                    gauge.add_metric(place, float(getattr(stats[place], name)))
            yield gauge
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"tokenpath_{name}", text, labels=_LABELS)
            for place in self._places:
                counter.add_metric(place, self._growing[place].total(name))
            yield counter

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not ask the replicas."""
        return iter(())
