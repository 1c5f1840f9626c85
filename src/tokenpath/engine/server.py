"""The engine's end of the replica link: many gateways on one worker, each seeing only its own.

Request ids get the connection's number in front before they reach the core and lose it on the way
back, so two gateways can neither collide nor abort each other's. A connection that ends takes its
requests with it. The server is one state, ``loading`` → ``ready`` → ``draining`` → ``ended``, and
ends with an exit code for the process:

====  ==========================================================================
0     drained and stopped
2, 3  could not be set up, or could not load the model: final, see the error
70    the core raised: a clean process should take over (see ``engine.worker``)
====  ==========================================================================
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from tokenpath.config.launch import Address, UnixAddress
from tokenpath.engine import worker as work
from tokenpath.engine.connection import HELLO_TIMEOUT_S, MAX_SEND_BUFFER_BYTES, Connection
from tokenpath.protocol.errors import (
    DrainingError,
    EngineError,
    ErrorInfo,
    NotReadyError,
    OverloadedError,
    SpecError,
    TokenpathError,
)
from tokenpath.protocol.events import (
    EngineStages,
    Failed,
    Finish,
    FinishReason,
    GenerationEvent,
    TokenDelta,
    Usage,
)
from tokenpath.protocol.framing import READ_BYTES, FramingError
from tokenpath.protocol.link import (
    Abort,
    Drain,
    Drained,
    Hello,
    LoadFailed,
    Pool,
    Progress,
    Ready,
    ReplicaEvent,
    StatsQuery,
    StatsReply,
    StepOutput,
    Submit,
)
from tokenpath.protocol.pooling import Pooled
from tokenpath.protocol.replica import ModelCard, ReplicaStats
from tokenpath.protocol.request import GenerationRequest

if TYPE_CHECKING:
    from tokenpath.engine.grammar.compiler import GrammarCompiler

EXIT_OK: Final = 0
EXIT_BROKEN: Final = 70
MAX_CONNECTIONS: Final = 64
MAX_LIVE_REQUESTS: Final = 16_384
"""Over all gateways. Their own queue limits are far lower; this one protects the process."""
FAREWELL_S: Final = 5.0
"""How long the last frames may take to leave, and how long a failed load waits for a first
gateway that can be told why."""
LAST_STEP_S: Final = 1.0
"""At the end of a drain: how long what is aborted may take to tell its usage and stages. Within the
time that the fleet has on top of the grace."""
CLOSING_S: Final = 2.5
"""How long an engine that ends may take for its last step and to put its KV blocks away."""
PROGRESS_STEP: Final = 0.01
_TOO_FAST: Final = "the replica cannot take requests as fast as they come"

log = logging.getLogger("tokenpath.engine")


@dataclass(slots=True)
class _Preparing:
    """A request whose grammar is being compiled."""

    arrived: float
    """On the worker's clock."""
    prompt_tokens: int
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Owner:
    connection: Connection
    request_id: str
    """As the gateway knows it."""
    withdrawn: bool = False
    """An abort is on its way to the core; a second one would tell it nothing."""
    withdrawn_for: ErrorInfo | None = None
    """What the gateway is told if it was not the gateway that withdrew it."""
    preparing: _Preparing | None = None
    """While its grammar is compiled; the core does not know of it yet."""


class EngineServer:
    """Serves one core on one address until told to end. Lives on one event loop."""

    def __init__(
        self,
        load: work.Load,
        *,
        token: str,
        max_send_buffer_bytes: int = MAX_SEND_BUFFER_BYTES,
    ) -> None:
        self._token = token
        self._max_send_buffer_bytes = max_send_buffer_bytes
        self._loop = asyncio.get_running_loop()
        self._worker = work.Worker(load, _ToLoop(self._loop, self))
        self._connections: set[Connection] = set()
        self._accepted = 0
        self._open = 0
        self._live: dict[str, _Owner] = {}
        self._live_changed = asyncio.Event()
        self._greeted = asyncio.Event()
        self._status: Progress | Ready | LoadFailed = Progress("starting", 0.0)
        self._draining = False
        self._exit: asyncio.Future[int] = self._loop.create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_disconnect: Callable[[], None] = lambda: None
        """Called when a gateway's connection has ended."""

    async def serve(self, address: Address, tls: ssl.SSLContext | None = None) -> int:
        """Listen, load, and serve until ``end``; the exit code. Raises ``SpecError``."""
        try:
            if isinstance(address, UnixAddress):
                listener = await asyncio.start_unix_server(
                    self._connected, address.path, limit=READ_BYTES
                )
            else:
                listener = await asyncio.start_server(
                    self._connected,
                    address.host,
                    address.port,
                    ssl=tls,
                    ssl_handshake_timeout=None if tls is None else HELLO_TIMEOUT_S,
                    limit=READ_BYTES,
                )
        except OSError as error:
            why = error.strerror or str(error)
            raise SpecError(f"the engine cannot listen on {address}: {why}") from error
        self._worker.start()
        try:
            return await self._exit
        finally:
            listener.close()
            if isinstance(address, UnixAddress):
                address.path.unlink(missing_ok=True)
            await asyncio.gather(*(c.close(FAREWELL_S) for c in self._connections))
            ready = isinstance(self._status, Ready)
            await asyncio.to_thread(self._worker.stop, CLOSING_S if ready else 0.0)

    def end(self, exit_code: int) -> None:
        """Let ``serve`` return; the first caller's code counts."""
        if not self._exit.done():
            self._exit.set_result(exit_code)

    async def drain(self, grace_s: float) -> int:
        """Refuse new requests, let the running ones finish, abort the rest; how many those were."""
        self._draining = True
        if await self._idle_within(grace_s):
            return 0
        aborted = len(self._live)
        log.info("aborting %d requests that outlived the drain's grace", aborted)
        error = DrainingError("the replica was stopped before the request finished")
        for internal_id, owner in list(self._live.items()):
            owner.withdrawn_for = error.info()
            self._withdraw(internal_id, owner)
        if not await self._idle_within(LAST_STEP_S):
            self._fail_live(error)
        return aborted

    async def _idle_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                while self._live:
                    self._live_changed.clear()
                    await self._live_changed.wait()
        except TimeoutError:
            return not self._live
        return True

    # What the worker reports, on the event loop.

    def progress(self, what: str, fraction: float) -> None:
        status = self._status
        if (
            isinstance(status, Progress)
            and status.what == what
            and fraction < 1.0
            and fraction - status.fraction < PROGRESS_STEP
        ):
            return
        self._announce(Progress(what, fraction))

    def loaded(self, card: ModelCard) -> None:
        self._announce(Ready(card))

    def load_failed(self, error: TokenpathError) -> None:
        log.error("%s", error.message)
        self._announce(LoadFailed(error.info()))
        self._spawn(self._end_after_greeting(error.exit_code))

    def stepped(self, result: work.StepResult) -> None:
        outputs: defaultdict[Connection, list[ReplicaEvent]] = defaultdict(list)
        for event in result.events:
            ended = isinstance(event, Failed) or event.finish is not None
            owner = self._live.get(event.request_id)
            if owner is None:  # its gateway went away while the step ran
                continue
            if ended:
                self._forget(event.request_id)
            outputs[owner.connection].append(_addressed(event, owner))
        receivers = self._connections if result.stats is not None else list(outputs)
        for connection in list(receivers):
            connection.send(StepOutput(outputs.get(connection, []), result.stats))
        if result.stats is not None:
            self._answer(result.answered, result.stats)

    def broke(self, error: BaseException) -> None:
        if not isinstance(error, TokenpathError):
            error = EngineError(f"the engine failed while working ({type(error).__name__})")
        self._fail_live(error)
        self._draining = True
        self.end(EXIT_BROKEN)

    # Connections.

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._accepted += 1
        self._open += 1
        connection = Connection(
            self._accepted, reader, writer, max_send_buffer_bytes=self._max_send_buffer_bytes
        )
        try:
            if self._open > MAX_CONNECTIONS:
                log.warning("refused gateway connection %d: too many", connection.number)
            elif await connection.handshake(self._token):
                await self._converse(connection)
        except FramingError as error:
            log.warning("closing gateway connection %d: %s", connection.number, error)
        except OSError as error:
            log.info("gateway connection %d was lost: %s", connection.number, error)
        finally:
            self._disconnected(connection)
            await connection.close(FAREWELL_S)
            self._open -= 1

    async def _converse(self, connection: Connection) -> None:
        self._connections.add(connection)
        connection.send(self._status)
        self._greeted.set()
        while (frame := await connection.read()) is not None:
            match frame:
                case Submit(request) | Pool(request):
                    self._submit(connection, request)
                case Abort(request_id):
                    internal_id = _internal_id(connection, request_id)
                    owner = self._live.get(internal_id)
                    if owner is not None:
                        self._withdraw(internal_id, owner)
                case StatsQuery(query_id):
                    self._query(connection, query_id)
                case Drain(grace_s):
                    self._spawn(self._drain_for(connection, grace_s))
                case Hello():
                    raise FramingError("a second hello")

    def _disconnected(self, connection: Connection) -> None:
        self._connections.discard(connection)
        gone = [(i, o) for i, o in self._live.items() if o.connection is connection]
        for internal_id, owner in gone:
            self._withdraw(internal_id, owner)
            if internal_id in self._live:
                self._forget(internal_id)
        self.on_disconnect()

    def _submit(self, connection: Connection, request: work.Request) -> None:
        internal_id = _internal_id(connection, request.request_id)
        if internal_id in self._live:
            raise FramingError("a request id was used again while it was live")
        refusal = self._refusal()
        if refusal is None:
            renamed = msgspec.structs.replace(request, request_id=internal_id)
            owner = _Owner(connection, request.request_id)
            grammars = self._worker.grammars
            if (
                isinstance(renamed, GenerationRequest)
                and renamed.sampling.grammar is not None
                and grammars is not None
            ):
                self._live[internal_id] = owner
                owner.preparing = _Preparing(self._worker.now(), len(renamed.prompt.token_ids))
                owner.preparing.task = self._spawn(self._prepare(renamed, owner, grammars))
                return
            if self._worker.submit(renamed):
                self._live[internal_id] = owner
                return
            refusal = OverloadedError(_TOO_FAST)
        connection.send(StepOutput([Failed(request.request_id, refusal.info())]))

    async def _prepare(
        self, request: GenerationRequest, owner: _Owner, grammars: GrammarCompiler
    ) -> None:
        """Compile a request's grammar, off the engine's thread, then hand the request over."""
        internal_id, grammar, preparing = (
            request.request_id,
            request.sampling.grammar,
            owner.preparing,
        )
        assert grammar is not None
        assert preparing is not None
        error: TokenpathError | None = None
        try:
            compiled = await grammars.ready(grammar)
        except TokenpathError as refusal:
            error = refusal
        if internal_id not in self._live:  # all were failed meanwhile
            return
        owner.preparing = None
        if error is None:
            if self._worker.submit(request, arrived=preparing.arrived, grammar=compiled):
                return
            error = OverloadedError(_TOO_FAST)
        stages = EngineStages(queue_s=self._worker.now() - preparing.arrived)
        self._end_unprepared(owner, Failed(internal_id, error.info(), stages))

    def _end_unprepared(self, owner: _Owner, event: GenerationEvent) -> None:
        """The end of a request that the core never saw."""
        self._forget(event.request_id)
        owner.connection.send(StepOutput([_addressed(event, owner)]))

    def _refusal(self) -> TokenpathError | None:
        if self._draining:
            return DrainingError("the replica is shutting down")
        if not isinstance(self._status, Ready):
            return NotReadyError("the model is still loading")
        if len(self._live) >= MAX_LIVE_REQUESTS:
            return OverloadedError(f"the replica already holds {MAX_LIVE_REQUESTS} requests")
        return None

    def _withdraw(self, internal_id: str, owner: _Owner) -> None:
        if owner.withdrawn:
            return
        owner.withdrawn = True
        preparing = owner.preparing
        if preparing is None:
            self._worker.inbox.put(work.Abort(internal_id))
            return
        assert preparing.task is not None
        preparing.task.cancel()
        stages = EngineStages(queue_s=self._worker.now() - preparing.arrived)
        usage = Usage(prompt_tokens=preparing.prompt_tokens, completion_tokens=0)
        finish = Finish(FinishReason.ABORT, usage, stages)
        self._end_unprepared(owner, TokenDelta(internal_id, finish=finish))

    def _query(self, connection: Connection, query_id: int) -> None:
        if not isinstance(self._status, Ready):
            connection.send(StatsReply(query_id, ReplicaStats()))
        elif not self._worker.inbox.put(work.QueryStats((connection.number, query_id))):
            log.warning("dropped a stats query: too many commands wait")

    def _answer(self, keys: tuple[tuple[int, int], ...], stats: ReplicaStats) -> None:
        by_number = {connection.number: connection for connection in self._connections}
        for number, query_id in keys:
            if number in by_number:
                by_number[number].send(StatsReply(query_id, stats))

    async def _drain_for(self, connection: Connection, grace_s: float) -> None:
        connection.send(Drained(await self.drain(grace_s)))

    # Endings.

    def _forget(self, internal_id: str) -> None:
        del self._live[internal_id]
        if not self._live:
            self._live_changed.set()

    def _fail_live(self, error: TokenpathError) -> None:
        failed: defaultdict[Connection, list[ReplicaEvent]] = defaultdict(list)
        for internal_id, owner in list(self._live.items()):
            self._forget(internal_id)
            failed[owner.connection].append(Failed(owner.request_id, error.info()))
        for connection, events in failed.items():
            connection.send(StepOutput(events))

    def _announce(self, status: Progress | Ready | LoadFailed) -> None:
        self._status = status
        for connection in list(self._connections):
            connection.send(status)

    async def _end_after_greeting(self, exit_code: int) -> None:
        """The load may fail before the first gateway has connected; let that one hear why."""
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._greeted.wait()
        except TimeoutError:
            log.debug("nobody connected to hear why the load failed")
        self.end(exit_code)

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _ToLoop:
    """Carries the worker's reports to the event loop: one wake-up a step."""

    def __init__(self, loop: asyncio.AbstractEventLoop, server: EngineServer) -> None:
        self._loop = loop
        self._server = server

    def progress(self, what: str, fraction: float) -> None:
        self._call(self._server.progress, what, fraction)

    def loaded(self, card: ModelCard) -> None:
        self._call(self._server.loaded, card)

    def load_failed(self, error: TokenpathError) -> None:
        self._call(self._server.load_failed, error)

    def stepped(self, result: work.StepResult) -> None:
        self._call(self._server.stepped, result)

    def broke(self, error: BaseException) -> None:
        self._call(self._server.broke, error)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop has closed: the process is ending, nobody listens
            log.debug("dropped a report of the engine after the end")


def _internal_id(connection: Connection, request_id: str) -> str:
    return f"{connection.number}/{request_id}"


def _addressed(event: ReplicaEvent, owner: _Owner) -> ReplicaEvent:
    """The event as the owner is to see it."""
    request_id = owner.request_id
    if isinstance(event, Failed):
        return Failed(request_id, event.error, event.stages, event.usage)
    if isinstance(event, Pooled):
        return Pooled(request_id, event.places, event.vectors, event.finish)
    finish = event.finish
    if finish is not None and finish.reason is FinishReason.ABORT and owner.withdrawn_for:
        return Failed(request_id, owner.withdrawn_for, finish.stages, finish.usage)
    return TokenDelta(request_id, event.token_ids, event.text, event.logprobs, finish)
