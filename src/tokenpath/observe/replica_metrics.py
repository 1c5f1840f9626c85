"""The replicas' own figures, read at every scrape and kept nowhere else.

A scrape first asks every replica for its stats (``refresh``); one that does not answer in time is
shown with its last report. A replica that is gone shows no gauges (unknown is not zero), and its
counters stay. When it comes back counting from zero, what it had counted before is added, so that a
counter never falls; what it did between its last report and its end is lost.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tokenpath.protocol.errors import TokenpathError
from tokenpath.protocol.replica import RESTING, Replica, ReplicaState, ReplicaStats

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
_COUNTERS_BY_POSITION = {
    "drafted_tokens_total": "Tokens guessed and computed, by their position in the draft.",
    "accepted_tokens_total": "Of them, those that the model chose itself.",
}
_Key = tuple[str, int]
"""A counter's name, and its position; 0 where it has none."""


def _counted(stats: ReplicaStats) -> dict[_Key, float]:
    plain = {(name, 0): float(getattr(stats, name)) for name in _COUNTERS}
    return plain | {
        (name, position): float(value)
        for name in _COUNTERS_BY_POSITION
        for position, value in enumerate(getattr(stats, name), start=1)
    }


@dataclass(slots=True)
class _Growing:
    """Counters of one place, summed over the lives of the replicas that held it."""

    earlier: defaultdict[_Key, float] = field(default_factory=lambda: defaultdict(float))
    now: dict[_Key, float] = field(default_factory=dict)

    def take(self, stats: ReplicaStats) -> None:
        new = _counted(stats)
        if any(new.get(key, 0.0) < value for key, value in self.now.items()):
            self.begin_anew()
        self.now = new

    def begin_anew(self) -> None:
        """What comes next counts from zero."""
        for key, value in self.now.items():
            self.earlier[key] += value
        self.now = {}

    def total(self, name: str) -> float:
        return self._of((name, 0))

    def by_position(self, name: str) -> dict[int, float]:
        keys = sorted({key for key in (*self.earlier, *self.now) if key[0] == name})
        return {key[1]: self._of(key) for key in keys}

    def _of(self, key: _Key) -> float:
        return self.earlier.get(key, 0.0) + self.now.get(key, 0.0)


class ReplicaMetrics(Collector):
    """A collector over the replicas of every model; the label ``replica`` is its place, 0, 1 …"""

    def __init__(self, replicas: Callable[[], Mapping[str, Sequence[Replica]]]) -> None:
        """``replicas`` tells each model's replicas now; a reload puts others in their places."""
        self._replicas = replicas
        self._held: dict[tuple[str, str], Replica] = {}
        self._growing: defaultdict[tuple[str, str], _Growing] = defaultdict(_Growing)
        self._stats: dict[tuple[str, str], ReplicaStats] = {}

    def _places(self) -> dict[tuple[str, str], Replica]:
        """The replicas by their places. One that has lost its place keeps what it has counted."""
        places = {
            (model, str(place)): replica
            for model, its in self._replicas().items()
            for place, replica in enumerate(its)
        }
        for place, replica in places.items():
            before = self._held.get(place)
            if before is not None and before is not replica:
                self._growing[place].take(before.last_stats)
                self._growing[place].begin_anew()
                self._stats.pop(place, None)
        self._held = places
        return places

    async def refresh(self, timeout_s: float = ASK_TIMEOUT_S) -> None:
        """Ask every replica for its stats now, all at once; to be awaited before a scrape."""
        places = self._places()
        answers = await asyncio.gather(
            *(self._ask(replica, timeout_s) for replica in places.values())
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
        places = self._places()
        stats = {
            place: self._stats.get(place) or replica.last_stats for place, replica in places.items()
        }
        up = GaugeMetricFamily(
            "tokenpath_replica_up", "1 if the replica takes requests, else 0.", labels=_LABELS
        )
        states = GaugeMetricFamily(
            "tokenpath_replica_state",
            "1 for the state that the replica is in, 0 for the others.",
            labels=(*_LABELS, "state"),
        )
        for place, replica in places.items():
            self._growing[place].take(stats[place])
            up.add_metric(place, float(replica.state is ReplicaState.READY))
            for state in ReplicaState:
                states.add_metric((*place, state), float(replica.state is state))
        yield up
        yield states
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"tokenpath_{name}", text, labels=_LABELS)
            for place, replica in places.items():
                if replica.state in _ALIVE or (
                    name == "resident_bytes" and replica.state in RESTING
                ):
                    gauge.add_metric(place, float(getattr(stats[place], name)))
            yield gauge
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"tokenpath_{name}", text, labels=_LABELS)
            for place in places:
                counter.add_metric(place, self._growing[place].total(name))
            yield counter
        for name, text in _COUNTERS_BY_POSITION.items():
            counter = CounterMetricFamily(f"tokenpath_{name}", text, labels=(*_LABELS, "position"))
            for place in places:
                for position, total in self._growing[place].by_position(name).items():
                    counter.add_metric((*place, str(position)), total)
            yield counter

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not ask the replicas."""
        return iter(())
