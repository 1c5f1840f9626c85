"""The run itself: sends planned requests, closed loop or open, and measures what comes back.

A closed loop keeps a number of requests in flight and starts the next when one ends. An open loop
sends when a request is due, whatever is still running; only a cap on requests in flight protects
the generator, and what it turns away is counted, not delayed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tokenpath.bench import wire
from tokenpath.bench.client import Client, ConnectFailedError, DisconnectedError, Endpoint
from tokenpath.bench.measure import Measurements
from tokenpath.bench.observe import ErrorKind, Observation, RequestError
from tokenpath.bench.settings import Settings
from tokenpath.bench.workload import PlannedRequest
from tokenpath.protocol.errors import (
    AuthenticationError,
    ModelNotFoundError,
    TokenpathError,
    UnavailableError,
)

_LAG_TICK_S = 0.02
_WARMUP_CONCURRENCY = 8
_PROBE_TIMEOUT_S = 30.0
_MOST_REPLY_BYTES = 4_000_000
_HTTP_OK = 200


@dataclass(slots=True)
class Run:
    """A run in progress; whoever shows progress reads it, whoever stops it sets ``stop``."""

    settings: Settings
    measured: Measurements
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    live: set[Observation] = field(default_factory=set)
    """The answers being received."""
    warming_up: bool = False
    started_at: float | None = None
    ended_at: float | None = None
    cpu_s: float = 0.0
    """Processor time that the generator used while measuring."""
    connections_opened: int = 0
    clock: Callable[[], float] = time.perf_counter

    @property
    def elapsed_s(self) -> float:
        """Seconds from the first request's start to the last one's end, or to now."""
        if self.started_at is None:
            return 0.0
        return (self.clock() if self.ended_at is None else self.ended_at) - self.started_at

    @property
    def output_events(self) -> int:
        """Output events so far, of requests in flight too."""
        return self.measured.output_events + sum(seen.output_events for seen in self.live)


async def choose_model(client: Client, endpoint: Endpoint, wanted: str | None) -> str:
    """Ask the server what it serves, so that a mistake is told before the load starts.

    Returns ``wanted`` or the first model listed. Raises ``UnavailableError`` when nobody answers,
    ``AuthenticationError``, ``ModelNotFoundError``, or ``TokenpathError`` for another answer. A
    server without ``/models`` is accepted if ``wanted`` is given.
    """
    reply = _Reply()
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            await client.get("/models", reply)
    except (ConnectFailedError, DisconnectedError) as error:
        raise UnavailableError(f"no server answers at {endpoint.url}: {error}") from error
    except TimeoutError as error:
        raise UnavailableError(
            f"the server at {endpoint.url} did not list its models within {_PROBE_TIMEOUT_S:.0f} s"
        ) from error
    if reply.status in {401, 403}:
        raise AuthenticationError(
            f"the server at {endpoint.url} wants a valid API key; name its variable with "
            "--api-key-env"
        )
    try:
        found = wire.model_ids(bytes(reply.data)) if reply.status == _HTTP_OK else []
    except msgspec.MsgspecError:
        found = []
    if wanted is None and not found:
        raise TokenpathError(
            f"{endpoint.url}/models names no model (status {reply.status}); check that the URL "
            "ends in /v1 or give --model"
        )
    if wanted is not None and found and wanted not in found:
        raise ModelNotFoundError(
            f"{endpoint.url} does not serve {wanted!r}; it serves {', '.join(found[:20])}"
        )
    return wanted if wanted is not None else found[0]


async def drive(
    run: Run,
    client: Client,
    model: str,
    requests: Iterable[PlannedRequest],
    warmup: Iterable[PlannedRequest] = (),
) -> None:
    """Warm up, then send ``requests`` within the settings' bounds, and fill ``run.measured``.

    Returns when all have ended, or soon after ``run.stop`` is set; requests then in flight are
    abandoned and counted as interrupted.
    """
    sender = _Sender(run, client, run.settings.shape(model))
    bounded = itertools.islice(requests, run.settings.requests)
    run.warming_up = True
    await _until_stopped(run, _closed(sender.warm_up, iter(warmup), _WARMUP_CONCURRENCY, math.inf))
    run.warming_up = False
    if run.stop.is_set():
        return
    opened_before = client.connections_opened
    lag = asyncio.create_task(_watch_lag(run))
    cpu_before = time.process_time()
    run.started_at = run.clock()
    if run.settings.mode == "closed":
        concurrency = run.settings.concurrency or 1
        loop = _closed(sender.send, bounded, concurrency, run.settings.duration_s)
    else:
        loop = _open(run, sender, bounded)
    await _until_stopped(run, loop)
    run.ended_at = run.clock()
    run.cpu_s = time.process_time() - cpu_before
    run.connections_opened = client.connections_opened - opened_before
    lag.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await lag


class _Sender:
    """Sends one planned request and books its outcome."""

    def __init__(self, run: Run, client: Client, shape: wire.RequestShape) -> None:
        self._run = run
        self._client = client
        self._shape = shape
        self._path = shape.api.path

    def encode(self, planned: PlannedRequest) -> bytes:
        return wire.request_body(planned, self._shape)

    async def warm_up(self, planned: PlannedRequest) -> None:
        await self._exchange(self.encode(planned), Observation())

    async def send(self, planned: PlannedRequest) -> None:
        await self.send_encoded(planned, self.encode(planned))

    async def send_encoded(
        self, planned: PlannedRequest, body: bytes, due_at: float | None = None
    ) -> None:
        run = self._run
        observed = Observation()
        run.measured.sent += 1
        run.live.add(observed)
        sent_at = run.clock()
        if due_at is not None:
            run.measured.lateness.add(max(0.0, sent_at - due_at))
        try:
            await self._exchange(body, observed)
        except asyncio.CancelledError:
            run.measured.interrupted += 1
            raise
        finally:
            run.live.discard(observed)
        run.measured.add(
            observed,
            sent_at=sent_at,
            ended_at=run.clock(),
            asked_prompt=planned.prompt_tokens,
            asked_output=planned.output_tokens,
        )

    async def _exchange(self, body: bytes, observed: Observation) -> None:
        try:
            async with asyncio.timeout(self._run.settings.timeout_s):
                await self._client.post(self._path, body, observed)
        except ConnectFailedError as error:
            observed.error = RequestError(ErrorKind.CONNECT, message=str(error))
        except DisconnectedError as error:
            observed.error = observed.error or RequestError(
                ErrorKind.DISCONNECT, observed.status, message=str(error)
            )
        except TimeoutError:
            observed.error = RequestError(
                ErrorKind.TIMEOUT,
                observed.status,
                message=f"not finished within {self._run.settings.timeout_s:g} s",
            )
        else:
            observed.finish()


async def _closed(
    send: Callable[[PlannedRequest], Coroutine[Any, Any, None]],
    requests: Iterator[PlannedRequest],
    concurrency: int,
    deadline_s: float,
) -> None:
    """Keep ``concurrency`` requests in flight; start none once ``deadline_s`` have passed."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + deadline_s

    async def worker() -> None:
        for planned in requests:
            if loop.time() >= ends_at:
                return
            await send(planned)

    async with asyncio.TaskGroup() as workers:
        for _ in range(concurrency):
            workers.create_task(worker())


async def _open(run: Run, sender: _Sender, requests: Iterator[PlannedRequest]) -> None:
    """Send each request when it is due, unless too many are in flight."""
    assert run.started_at is not None
    async with asyncio.TaskGroup() as sending:
        for planned in requests:
            offset = planned.offset_s or 0.0
            if offset > run.settings.duration_s:
                break
            body = sender.encode(planned)  # before it is due, so that it costs no lateness
            due_at = run.started_at + offset
            await asyncio.sleep(max(0.0, due_at - run.clock()))
            if len(run.live) >= run.settings.max_in_flight:
                run.measured.overflowed += 1
                continue
            sending.create_task(sender.send_encoded(planned, body, due_at))


async def _until_stopped(run: Run, sending: Coroutine[Any, Any, None]) -> None:
    """Await ``sending``, or cancel it when ``run.stop`` is set."""
    task = asyncio.create_task(sending)
    stopped = asyncio.create_task(run.stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None  # a task group wraps what one of its tasks raised
    finally:
        for waiting in (task, stopped):
            waiting.cancel()
        await asyncio.wait({task, stopped})


async def _watch_lag(run: Run) -> None:
    """Keep measuring how late the event loop wakes up: the generator's own slowness."""
    while True:
        due_at = run.clock() + _LAG_TICK_S
        await asyncio.sleep(_LAG_TICK_S)
        run.measured.loop_lag.add(max(0.0, run.clock() - due_at))


class _Reply:
    """A sink that keeps a small response."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.data = bytearray()

    def head(self, status: int, content_type: str) -> None:  # noqa: ARG002 the sink's contract
        self.status = status

    def body(self, data: bytes, at: float) -> None:  # noqa: ARG002 the sink's contract
        if len(self.data) < _MOST_REPLY_BYTES:
            self.data += data
