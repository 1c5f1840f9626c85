"""The stage ledger: where one request's time went, each stage measured by its own start and end.

The gateway's stages are measured here, on one injected monotonic clock; the engine's arrive as
durations with a sequence's last event and were measured there. Stages never overlap, so they sum to
at most the wall time; the rest is reported as ``unattributed``, the only figure that is a
subtraction. In it is what nobody timed: the event loop, the link between the processes, and the
engine's time of a request whose end it could not report (its process was lost, or a step outlasted
the gateway's wait).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tokenpath.protocol.events import EngineStages
from tokenpath.protocol.stages import Stage


@dataclass(frozen=True, slots=True)
class StageTimes:
    """A closed ledger. All in seconds."""

    stages: dict[Stage, float]
    """Only the stages that happened, in order of their first start."""
    wall_s: float

    @property
    def unattributed_s(self) -> float:
        """Wall time that no stage measured."""
        return self.wall_s - sum(self.stages.values())


class LedgerError(RuntimeError):
    """Stages overlap, or the ledger is closed: a mistake in the gateway's code."""


class Ledger:
    """One request's open ledger."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stages: dict[Stage, float] = {}
        self._open: tuple[Stage, float] | None = None
        self._closed: StageTimes | None = None
        self.started_s = clock()
        """When the request arrived, on the ledger's clock."""

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        """Measure the body of the ``with`` as ``stage``; a stage entered again adds up."""
        self.begin(stage)
        try:
            yield
        finally:
            self.end(stage)

    def begin(self, stage: Stage) -> None:
        """Start ``stage`` now. Raises ``LedgerError`` if another one is open."""
        if self._closed is not None:
            raise LedgerError(f"stage {stage} begins after the ledger was closed")
        if self._open is not None:
            raise LedgerError(f"stage {stage} begins while {self._open[0]} is open")
        self._open = (stage, self._clock())

    def end(self, stage: Stage) -> None:
        """End ``stage`` now. Raises ``LedgerError`` if it is not the open one."""
        if self._open is None or self._open[0] is not stage:
            raise LedgerError(f"stage {stage} ends without having begun")
        started = self._open[1]
        self._open = None
        self._add(stage, self._clock() - started)

    def merge(self, engine: EngineStages) -> None:
        """Take over what the engine measured of the sequence on the critical path.

        Stages that it did not reach have no time, and do not count as having happened.
        """
        self._add(Stage.QUEUE, engine.queue_s)
        if engine.prefill_s:
            self._add(Stage.PREFILL, engine.prefill_s)
        if engine.kv_transfer_s:
            self._add(Stage.KV_TRANSFER, engine.kv_transfer_s)
        if engine.decode_s:
            self._add(Stage.DECODE, engine.decode_s)

    def close(self) -> StageTimes:
        """End the request now, and the open stage with it. Closing again changes nothing."""
        if self._closed is None:
            now = self._clock()
            if self._open is not None:
                stage, started = self._open
                self._open = None
                self._add(stage, now - started)
            self._closed = StageTimes(dict(self._stages), now - self.started_s)
        return self._closed

    def _add(self, stage: Stage, seconds: float) -> None:
        self._stages[stage] = self._stages.get(stage, 0.0) + seconds
