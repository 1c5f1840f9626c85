"""Where a sequence's time in the engine went: a state machine that times its own states."""

from __future__ import annotations

from tokenpath.protocol.events import EngineStages
from tokenpath.protocol.stages import ENGINE_STAGES, Stage

_LEGAL = {
    (Stage.QUEUE, Stage.PREFILL),
    (Stage.QUEUE, Stage.KV_TRANSFER),
    (Stage.KV_TRANSFER, Stage.PREFILL),
    (Stage.PREFILL, Stage.DECODE),
    (Stage.PREFILL, Stage.QUEUE),
    (Stage.DECODE, Stage.QUEUE),
}
"""``queue`` again is a preemption."""


class StageClock:
    """Sums a sequence's stays in the engine's stages; each stay has its start and end.

    Times are seconds on one monotonic clock, given by the caller.
    """

    __slots__ = ("_seconds", "_since", "preemptions", "stage")

    def __init__(self, now: float) -> None:
        self.stage = Stage.QUEUE
        self.preemptions = 0
        self._since = now
        self._seconds = dict.fromkeys(ENGINE_STAGES, 0.0)

    def enter(self, stage: Stage, now: float) -> None:
        """Move to another stage. Raises ``ValueError`` on an illegal transition."""
        if (self.stage, stage) not in _LEGAL:
            raise ValueError(f"a sequence cannot go from {self.stage} to {stage}")
        self._seconds[self.stage] += now - self._since
        self._since = now
        self.stage = stage
        self.preemptions += stage is Stage.QUEUE

    def total(self, now: float) -> EngineStages:
        """The sums, with the current stay ending now."""
        seconds = dict(self._seconds)
        seconds[self.stage] += now - self._since
        return EngineStages(
            queue_s=seconds[Stage.QUEUE],
            prefill_s=seconds[Stage.PREFILL],
            kv_transfer_s=seconds[Stage.KV_TRANSFER],
            decode_s=seconds[Stage.DECODE],
            preemptions=self.preemptions,
        )
