"""One API call's sequences on a replica, run side by side and merged into one stream of outputs.

Each sequence has a pump that takes events as fast as the replica sends them, so that a slow reader
holds up nobody. What the reader has not taken yet waits here, merged: one pending output a
sequence, so the wait is bounded by the sequences' own ``max_tokens``.

Leaving the ``async with`` before the end withdraws what still runs. The replica is told at once; it
then has a moment (``LAST_EVENTS_S``) to say what the sequences have cost until then, so that a call
that ended early has its usage and its stages like any other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

from tokenpath.gateway.call import Call
from tokenpath.observe.metrics import TokenMeter
from tokenpath.protocol.errors import (
    EngineError,
    ReplicaLostError,
    TokenpathError,
    UnavailableError,
    from_info,
)
from tokenpath.protocol.events import (
    EngineStages,
    Failed,
    Finish,
    FinishReason,
    GenerationEvent,
    TokenDelta,
    TokenLogprob,
    Usage,
)
from tokenpath.protocol.request import GenerationRequest
from tokenpath.protocol.stages import Stage
from tokenpath.router.router import Lease

LAST_EVENTS_S: Final = 1.0
"""How long a withdrawn call waits for its sequences' last events. They come between two engine
steps, so this is cut short only where a step is longer; the rest is then unattributed. A client
that is still there waits this long for its error, so it is well below ``LAST_WORDS_S``."""


@dataclass(slots=True)
class Output:
    """New output of one sequence since the reader last asked."""

    sequence: int
    """Its place in the call."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    _pieces: list[str] = field(default_factory=list)

    def add(self, delta: TokenDelta) -> None:
        """Append what came."""
        self._pieces.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs:
            self.logprobs.extend(delta.logprobs)
        self.finish = delta.finish

    def seal(self) -> Self:
        """Join the text; nothing is added after it."""
        self.text = self._pieces[0] if len(self._pieces) == 1 else "".join(self._pieces)
        return self


class Execution:
    """The sequences of one call, from submission to their ends."""

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        *,
        lease: Lease,
        call: Call,
        meter: TokenMeter,
    ) -> None:
        self._lease = lease
        self._requests = requests
        self._call = call
        self._meter = meter
        self._tasks: list[asyncio.Task[None]] = []
        self._pending: dict[int, Output] = {}
        self._failure: TokenpathError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._running = set(range(len(requests)))
        self._withdrawn = False
        self._last_stages: EngineStages | None = None
        """Of the sequence that ended last: the critical path."""
        self._accounted = False
        self._seen = [0] * len(requests)
        self.reported: list[Usage | None] = [None] * len(requests)
        """The replica's own counts, of every sequence that has ended."""

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._pump(index, request))
            for index, request in enumerate(self._requests)
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._running:
                await self._withdraw()
        finally:
            for task in self._tasks:
                task.cancel()
            try:
                await asyncio.gather(*self._tasks, return_exceptions=True)
            finally:
                self._lease.release()
                self._account()

    async def wait(self) -> None:
        """Return when ``take`` has something to give or to raise. May be cancelled safely."""
        if self._pending or self._failure is not None or not self._running:
            return
        self._reader = asyncio.get_running_loop().create_future()
        await self._reader

    def take(self) -> list[Output]:
        """What came since, at most one output a sequence; to be called after ``wait``.

        Raises the failure of any sequence, after the outputs that came before it.
        """
        outputs = [output.seal() for output in self._pending.values()]
        self._pending.clear()
        if not outputs and self._failure is not None:
            raise self._failure
        return outputs

    def done(self) -> bool:
        """Whether every sequence has ended well and everything was taken."""
        return not self._running and self._failure is None and not self._pending

    @property
    def first_token_s(self) -> float | None:
        """When the first token arrived, on the call's clock."""
        return self._meter.first_s

    @property
    def usage(self) -> Usage:
        """Output tokens so far: the replica's count where it has reported, else those seen here."""
        counts = [None if usage is None else usage.completion_tokens for usage in self.reported]
        return Usage(
            completion_tokens=sum(
                seen if count is None else count
                for seen, count in zip(self._seen, counts, strict=True)
            ),
            estimated=None in counts,
        )

    async def _withdraw(self) -> None:
        """Abort what runs, and take its last events as far as they come in time."""
        self._withdrawn = True
        for index in tuple(self._running):
            self._lease.replica.abort(self._requests[index].request_id)
        await asyncio.wait(self._tasks, timeout=LAST_EVENTS_S)

    async def _pump(self, index: int, request: GenerationRequest) -> None:
        try:
            if self._withdrawn:  # before it was ever sent
                self._ended(index)
                return
            events = self._lease.replica.generate(request)
            try:
                async for event in events:
                    if self._accept(index, event):
                        return
                raise ReplicaLostError(
                    "The replica's stream ended before the request had finished."
                )
            finally:
                close = getattr(events, "aclose", None)
                if close is not None:
                    await close()
        except TokenpathError as error:
            self._fail(index, error)
        except Exception as error:  # noqa: BLE001 (one sequence's end; the neighbours go on)
            failure = EngineError("The server failed while generating.")
            failure.__cause__ = error
            self._fail(index, failure)
        finally:
            self._lease.ended()

    def _accept(self, index: int, event: GenerationEvent) -> bool:
        """Take one event; True if it was the sequence's last."""
        if isinstance(event, Failed):
            self._report(index, event.usage, event.stages)
            self._fail(index, from_info(event.error))
            return True
        finish = event.finish
        self._seen[index] += len(event.token_ids)
        if event.token_ids:
            self._lease.prefilled()
        if finish is not None:
            self._report(index, finish.usage, finish.stages)
        if self._withdrawn:  # nobody reads any more
            if finish is not None:
                self._ended(index)
            return finish is not None
        if finish is not None and finish.reason is FinishReason.ABORT:
            error = UnavailableError("The server withdrew the request.", retry_after_s=1.0)
            self._fail(index, error)
            return True
        self._meter.arrived(index, len(event.token_ids))
        pending = self._pending.get(index)
        if pending is None:
            pending = self._pending[index] = Output(index)
        pending.add(event)
        if finish is not None:
            self._ended(index)
        self._wake()
        return finish is not None

    def _report(self, index: int, usage: Usage | None, stages: EngineStages | None) -> None:
        self.reported[index] = usage
        if stages is not None:
            self._last_stages = stages

    def _ended(self, index: int) -> None:
        self._running.discard(index)
        if not self._running:
            self._account()

    def _account(self) -> None:
        """Close the engine's part of the ledger, once: no sequence runs any more.

        From here on nothing is decoded for this call, and what remains is the client's time.
        """
        if self._accounted:
            return
        self._accounted = True
        if self._last_stages is not None:
            self._call.ledger.merge(self._last_stages)
        self._call.ledger.begin(Stage.FLUSH)

    def _fail(self, index: int, error: TokenpathError) -> None:
        if self._failure is None:
            self._failure = error
        self._ended(index)
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
