"""The pooling engine's loop: requests in, vectors out, one step at a time.

The sibling of ``engine.core`` behind the same worker, with the same promises: a failure belongs to
one request wherever it can be told whose it is, an abort frees everything at once, and the clock is
given. What raises while a step is read is tried again input by input, and only the requests whose
inputs raise alone are ended.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tokenpath.engine.pooling.readers import Reader, Vectors
from tokenpath.engine.stage_clock import StageClock
from tokenpath.policy.pooling import PoolingQueue, Taken
from tokenpath.protocol.errors import (
    ContextLengthError,
    DeadlineError,
    EngineError,
    InvalidRequestError,
    TokenpathError,
    UnsupportedError,
)
from tokenpath.protocol.events import Failed, Finish, FinishReason, Usage
from tokenpath.protocol.pooling import Pooled, PoolingInput, PoolingRequest
from tokenpath.protocol.replica import ModelCard, ReplicaStats
from tokenpath.protocol.request import GenerationRequest
from tokenpath.protocol.stages import Stage

log = logging.getLogger("tokenpath.engine")


@dataclass(slots=True, eq=False)
class _Live:
    """Everything the core holds of one request."""

    request: PoolingRequest
    stages: StageClock
    deadline: float
    """On the core's clock; infinite without a timeout."""
    missing: int
    """Inputs without a vector yet."""


class PoolingCore:
    """One model's engine. Not thread-safe: every method is called from one thread."""

    def __init__(
        self,
        reader: Reader,
        queue: PoolingQueue,
        *,
        card: ModelCard,
        clock: Callable[[], float] = time.monotonic,
        resident_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """``clock`` is monotonic, in seconds."""
        self.card = card
        self._reader = reader
        self._queue = queue
        self._clock = clock
        self._resident_bytes = resident_bytes
        self._live: dict[str, _Live] = {}
        self._prompt_tokens_total = 0
        self._steps_total = 0
        self._step_seconds_total = 0.0
        self._aborts_total = 0

    @property
    def grammars(self) -> None:
        """What makes vectors compiles no grammars."""
        return None

    def submit(
        self,
        request: GenerationRequest | PoolingRequest,
        *,
        arrived: float | None = None,
        grammar: object = None,  # noqa: ARG002 - the protocol's
    ) -> None:
        """Queue a request; its vectors come from later steps.

        ``arrived`` is when it came in, on the core's clock, if that was before this call;
        ``grammar`` is for engines that generate.

        Raises:
            UnsupportedError: the request is for text, which this engine does not make.
            InvalidRequestError: an input is empty or has tokens that the model lacks, or the id is
                live.
            ContextLengthError: an input is longer than the model can read.
        """
        if isinstance(request, GenerationRequest):
            raise UnsupportedError("this engine makes embeddings or scores; it generates no text")
        if request.request_id in self._live:
            raise InvalidRequestError(f"request id {request.request_id!r} is already in use")
        check_inputs(request.inputs, self.card)
        now = self._clock() if arrived is None else arrived
        deadline = math.inf if request.timeout_s is None else now + request.timeout_s
        self._queue.add(
            request.request_id,
            [len(each.token_ids) for each in request.inputs],
            priority=request.priority,
        )
        self._prompt_tokens_total += request.tokens
        self._live[request.request_id] = _Live(
            request, StageClock(now), deadline, len(request.inputs)
        )

    def abort(self, request_id: str) -> Finish | None:
        """Forget a request at once, and say how it ended; None if it is not live."""
        self._queue.remove(request_id)
        live = self._live.pop(request_id, None)
        if live is None:
            return None
        self._aborts_total += 1
        return self._finish(live, FinishReason.ABORT, self._clock())

    def has_work(self) -> bool:
        """Whether any request is live."""
        return bool(self._live)

    def step(self) -> Sequence[Pooled | Failed]:
        """Read one step's inputs and return what came of them."""
        started = self._clock()
        events: list[Pooled | Failed] = self._expired(started)
        taken = self._queue.take()
        if not taken:
            return events
        for request_id in {each.request_id for each in taken}:
            stages = self._live[request_id].stages
            if stages.stage is Stage.QUEUE:
                stages.enter(Stage.PREFILL, started)
        read, failed = self._read(taken)
        now = self._clock()
        self._steps_total += 1
        self._step_seconds_total += now - started
        events += [self._fail(request_id, error, now) for request_id, error in failed.items()]
        for request_id, rows in read.items():
            if request_id not in failed:
                events.append(self._pooled(request_id, rows, now))
        return events

    def stats(self) -> ReplicaStats:
        """The engine's state and its running totals."""
        waiting = self._queue.waiting_jobs
        return ReplicaStats(
            requests_running=len(self._live) - waiting,
            requests_waiting=waiting,
            waiting_tokens=self._queue.waiting_tokens,
            prompt_tokens_total=self._prompt_tokens_total,
            steps_total=self._steps_total,
            step_seconds_total=self._step_seconds_total,
            aborts_total=self._aborts_total,
            resident_bytes=self._resident_bytes(),
        )

    def close(self, *, keep_kv: bool = True) -> None:
        """Nothing of it outlives the process, and it has no KV to keep."""

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` naming the first broken invariant. Between steps only."""
        for request_id, live in self._live.items():
            waiting = self._queue.waiting_of(request_id)
            assert waiting == live.missing > 0, (
                f"{request_id} misses {live.missing} vectors, but {waiting} of its inputs wait"
            )
        assert self._queue.jobs == len(self._live), "the queue holds a request that is not live"

    def _read(
        self, taken: Sequence[Taken]
    ) -> tuple[dict[str, list[tuple[int, Vectors]]], dict[str, TokenpathError]]:
        """Rows by request with their places, and the requests that failed; together or one by one.

        One input that cannot be read fails its whole request: an answer is all of its vectors.
        """
        read: dict[str, list[tuple[int, Vectors]]] = {}
        failed: dict[str, TokenpathError] = {}
        try:
            rows: Sequence[Vectors | None] = list(self._reader.read(self._inputs(taken)))
        except Exception:
            log.exception("a step of %d inputs failed; trying each alone", len(taken))
            rows = [self._alone(each) for each in taken]
        for each, row in zip(taken, rows, strict=True):
            if row is None:
                failed[each.request_id] = EngineError(
                    "the engine failed while it worked on this request"
                )
            elif not np.isfinite(row).all():
                failed[each.request_id] = EngineError(
                    "the model computed no finite numbers for an input of this request"
                )
            else:
                read.setdefault(each.request_id, []).append((each.place, row))
        return read, failed

    def _alone(self, taken: Taken) -> Vectors | None:
        try:
            rows = self._reader.read(self._inputs([taken]))
        except Exception:
            log.exception("reading an input of request %s failed", taken.request_id)
            return None
        row: Vectors = rows[0]
        return row

    def _inputs(self, taken: Sequence[Taken]) -> list[PoolingInput]:
        return [self._live[each.request_id].request.inputs[each.place] for each in taken]

    def _expired(self, now: float) -> list[Pooled | Failed]:
        late = [live.request for live in self._live.values() if live.deadline <= now]
        return [
            self._fail(
                request.request_id,
                DeadlineError(f"the request ran past its {request.timeout_s:g} seconds"),
                now,
            )
            for request in late
        ]

    def _pooled(self, request_id: str, rows: list[tuple[int, Vectors]], now: float) -> Pooled:
        live = self._live[request_id]
        live.missing -= len(rows)
        finish = None
        if live.missing == 0:
            del self._live[request_id]
            finish = self._finish(live, FinishReason.STOP, now)
        vectors = np.stack([row for _, row in rows]).astype("<f4", copy=False)
        return Pooled(request_id, [place for place, _ in rows], vectors.tobytes(), finish)

    def _fail(self, request_id: str, error: TokenpathError, now: float) -> Failed:
        self._queue.remove(request_id)
        live = self._live.pop(request_id)
        return Failed(request_id, error.info(), live.stages.total(now), _usage(live.request))

    @staticmethod
    def _finish(live: _Live, reason: FinishReason, now: float) -> Finish:
        return Finish(reason=reason, usage=_usage(live.request), stages=live.stages.total(now))


def check_inputs(inputs: Sequence[PoolingInput], card: ModelCard) -> None:
    """What protects the engine, whoever sent a request. Raises ``InvalidRequestError`` kinds."""
    if not inputs:
        raise InvalidRequestError("there is no input; give at least one")
    for number, each in enumerate(inputs):
        ids = each.token_ids
        if not ids:
            raise InvalidRequestError(f"input {number} is empty; it needs at least one token")
        if min(ids) < 0 or max(ids) >= card.vocab_size:
            raise InvalidRequestError(
                f"input {number} has a token id outside of the vocabulary (0 to "
                f"{card.vocab_size - 1})"
            )
        if len(ids) > card.max_context_tokens:
            raise ContextLengthError(
                f"input {number} has {len(ids)} tokens, but this model reads at most "
                f"{card.max_context_tokens}"
            )


def _usage(request: PoolingRequest) -> Usage:
    return Usage(prompt_tokens=request.tokens)
