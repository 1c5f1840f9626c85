"""Prometheus metrics: what the gateway counts itself, and what the replicas report.

Histograms and request counters are fed from each request's record as it ends, and from every token
as it arrives. Figures of the engine are never mirrored here: a scrape reads the replicas' own truth
(``replica_metrics``). Labels take few values: served models, routes, status codes, outcomes and
stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tokenpath.observe.log import RequestRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NO_MODEL = ""
"""Label value of a request that named no served model."""

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 5)
_WALL_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_STAGE_BUCKETS = (
    *(0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300),
)


class Metrics:
    """The gateway's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "tokenpath_requests",
            "HTTP requests that ended.",
            ["endpoint", "model", "code", "outcome"],
            registry=self.registry,
        )
        self._in_flight = Gauge(
            "tokenpath_requests_in_flight",
            "HTTP requests that the gateway is working on.",
            registry=self.registry,
        )
        self._ttft = Histogram(
            "tokenpath_time_to_first_token_seconds",
            "From a request's arrival to its first output token at the gateway.",
            ["model"],
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self._gap = Histogram(
            "tokenpath_inter_token_latency_seconds",
            "Every gap between successive output tokens of one sequence, at the gateway.",
            ["model"],
            buckets=_GAP_BUCKETS,
            registry=self.registry,
        )
        self._wall = Histogram(
            "tokenpath_request_seconds",
            "From a request's arrival to its last byte.",
            ["endpoint", "model"],
            buckets=_WALL_BUCKETS,
            registry=self.registry,
        )
        self._stage = Histogram(
            "tokenpath_stage_seconds",
            "Time of one stage of one request; 'unattributed' is what no stage measured.",
            ["stage"],
            buckets=_STAGE_BUCKETS,
            registry=self.registry,
        )

        self._cpus = Gauge(
            "tokenpath_usable_cpus",
            "CPUs' worth of time that the engines of this server have together.",
            registry=self.registry,
        )
        self._threads = Gauge(
            "tokenpath_compute_threads",
            "Compute threads of an engine; more of them than usable CPUs take each other's time.",
            ["model", "replica"],
            registry=self.registry,
        )

        self._events = Counter(
            "tokenpath_replica_events",
            "What replicas went through: ready, slept, woke, wake_failed, ended, stuck.",
            ["model", "event"],
            registry=self.registry,
        )
        self._reloads = Counter(
            "tokenpath_reloads",
            "Reloads of a model that ended.",
            ["model", "outcome"],
            registry=self.registry,
        )

    def replica_event(self, model: str, event: str) -> None:
        """A replica of a model went through something (``fleet.local.ReplicaEvent``)."""
        self._events.labels(model, event).inc()

    def reloaded(self, model: str, outcome: str) -> None:
        """A reload ended: ``done`` or ``failed``."""
        self._reloads.labels(model, outcome).inc()

    def cpus_divided(self, usable: int, threads: Mapping[str, int]) -> None:
        """Note what each model's one replica computes with."""
        self._cpus.set(usable)
        for model, count in threads.items():
            self._threads.labels(model, "0").set(count)

    def request_began(self) -> None:
        """Count a request into ``tokenpath_requests_in_flight``."""
        self._in_flight.inc()

    def request_ended(self, record: RequestRecord) -> None:
        """Count an ended request and take over its ledger."""
        self._in_flight.dec()
        model = record.model or NO_MODEL
        self._requests.labels(record.endpoint, model, str(record.status), record.outcome).inc()
        self._wall.labels(record.endpoint, model).observe(record.times.wall_s)
        if record.ttft_s is not None:
            self._ttft.labels(model).observe(record.ttft_s)
        if record.model is None:
            return  # A scrape or a refused call: its stages would drown those of real work.
        for stage, seconds in record.times.stages.items():
            self._stage.labels(stage).observe(seconds)
        self._stage.labels("unattributed").observe(max(0.0, record.times.unattributed_s))

    def token_meter(self, model: str, clock: Callable[[], float]) -> TokenMeter:
        """A meter for the sequences of one call."""
        return TokenMeter(self._gap.labels(model), clock)

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format (``CONTENT_TYPE``)."""
        return generate_latest(self.registry)


class TokenMeter:
    """Notes when a call's tokens arrive at the gateway, sequence by sequence.

    Tokens that arrive in one event arrived together: the first of them has the gap since the
    event before, the others have gaps of zero. So the histogram's count is tokens less one per
    sequence, whatever the events carried.
    """

    def __init__(self, gaps: Histogram, clock: Callable[[], float]) -> None:
        self._gaps = gaps
        self._clock = clock
        self._last: dict[int, float] = {}
        self.first_s: float | None = None
        """When the first token of any sequence arrived, on the clock."""

    def arrived(self, sequence: int, tokens: int) -> None:
        """``tokens`` tokens of ``sequence`` are here now."""
        if tokens == 0:
            return
        now = self._clock()
        if self.first_s is None:
            self.first_s = now
        last = self._last.get(sequence)
        if last is not None:
            self._gaps.observe(now - last)
        for _ in range(tokens - 1):
            self._gaps.observe(0.0)
        self._last[sequence] = now
