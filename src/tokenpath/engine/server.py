"""The engine's end of the replica link: many gateways on one worker, each seeing only its own.

Request ids get the connection's number in front before they reach the core and lose it on the way
back, so two gateways can neither collide nor abort each other's. A connection that ends takes its
requests with it. The server is one state (``engine.life``, moved by ``engine.rest``), and ends with
an exit code for the process:

====  ==========================================================================
0     drained and stopped
2, 3  could not be set up, or could not load the model: final, see the error
70    the core raised: a clean process should take over (see ``engine.worker``)
71    a step, a load or a grammar did not end (see ``engine.watchdog``): as for 70
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

from tokenpath.config.launch import EXIT_BROKEN, EXIT_STUCK, Address, UnixAddress
from tokenpath.config.spec import EngineSettings
from tokenpath.engine import worker as work
from tokenpath.engine.connection import HELLO_TIMEOUT_S, MAX_SEND_BUFFER_BYTES, Connection
from tokenpath.engine.life import COMPUTING, RESTING, EngineState
from tokenpath.engine.rest import Rest, Status
from tokenpath.engine.watchdog import Watchdog, Watched
from tokenpath.protocol.errors import (
    AsleepError,
    DrainingError,
    EngineError,
    ErrorInfo,
    NotReadyError,
    OverloadedError,
    ReplicaLostError,
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
    Done,
    Drain,
    Drained,
    Hello,
    Pool,
    ReplicaEvent,
    Sleep,
    StatsQuery,
    StatsReply,
    StepOutput,
    Submit,
    Wake,
)
from tokenpath.protocol.pooling import Pooled
from tokenpath.protocol.replica import ModelCard, ReplicaStats
from tokenpath.protocol.request import GenerationRequest

if TYPE_CHECKING:
    from tokenpath.engine.grammar.state import CompiledGrammar

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
GRAMMAR_LIMITS: Final = 10
"""A grammar that is still compiled after so many of its limits will never be: nobody waits for it
any more, and it holds one of a few threads."""
_TOO_FAST: Final = "the replica cannot take requests as fast as they come"

log = logging.getLogger("tokenpath.engine")


@dataclass(slots=True)
class _Preparing:
    """A request that waits for the model to wake, or for its grammar to be compiled."""

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
    """While the core does not know of it yet."""


class EngineServer:
    """Serves one core on one address until told to end. Lives on one event loop."""

    def __init__(
        self,
        load: work.Load,
        *,
        token: str,
        settings: EngineSettings = EngineSettings(),  # noqa: B008 - frozen
        max_send_buffer_bytes: int = MAX_SEND_BUFFER_BYTES,
    ) -> None:
        """``settings`` say when to sleep, what wakes, and what is too long."""
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
        self._rest = Rest(
            self._worker.inbox, settings, live=lambda: len(self._live), announce=self._announce
        )
        self._watchdog = self._make_watchdog(settings)
        self._stuck = False
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
        self._watchdog.start()
        try:
            return await self._exit
        finally:
            listener.close()
            if isinstance(address, UnixAddress):
                address.path.unlink(missing_ok=True)
            await asyncio.gather(*(c.close(FAREWELL_S) for c in self._connections))
            closes = self._rest.core and not self._stuck
            await asyncio.to_thread(self._worker.stop, CLOSING_S if closes else 0.0)
            self._watchdog.stop()

    def end(self, exit_code: int) -> None:
        """Let ``serve`` return; the first caller's code counts."""
        if not self._exit.done():
            self._exit.set_result(exit_code)

    async def drain(self, grace_s: float) -> int:
        """Refuse new requests, let the running ones finish, abort the rest; how many those were."""
        resting = self._rest.state in RESTING
        self._rest.drain()
        if resting:  # What waits for a wake would wait for all of it.
            self._fail_live(DrainingError("the replica is shutting down"))
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
        self._rest.progressed(what, fraction)

    def loaded(self, card: ModelCard) -> None:
        self._rest.loaded(card)

    def load_failed(self, error: TokenpathError) -> None:
        log.error("%s", error.message)
        self._rest.load_failed(error)
        self._spawn(self._end_after_greeting(error.exit_code))

    def slept(self, totals: ReplicaStats) -> None:
        self._rest.slept(totals)

    def wake_failed(self, error: TokenpathError) -> None:
        self._rest.wake_failed(error)
        self._fail_live(AsleepError("the model could not be woken; the server's log says why"))

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
        self._fail_live(EngineError(f"the engine failed while working ({type(error).__name__})"))
        self._rest.drain()
        self.end(EXIT_BROKEN)

    def stuck(self, sentence: str) -> None:
        self._fail_live(ReplicaLostError(f"the request was not finished: {sentence}"))
        self._stuck = True
        self._rest.drain()
        self.end(EXIT_STUCK)

    def _make_watchdog(self, settings: EngineSettings) -> Watchdog:
        worker = self._worker

        def grammar() -> object | None:
            return None if worker.grammars is None else worker.grammars.oldest

        grammar_s = GRAMMAR_LIMITS * settings.grammar_compile_s
        step_s, load_s = settings.step_timeout_s, settings.load_stall_s
        watched = (
            Watched(step_s, f"a step took more than {step_s:g} s", lambda: worker.turn),
            Watched(load_s, f"loading made no progress for {load_s:g} s", lambda: worker.loading),
            Watched(grammar_s, f"a grammar was compiled for more than {grammar_s:g} s", grammar),
        )
        return Watchdog(watched, _ToLoop(self._loop, self).stuck)

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
        connection.send(self._rest.status)
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
                case Sleep(number, grace_s, keep_kv):
                    order = self._rest.sleep(grace_s, keep_kv=keep_kv)
                    self._spawn(self._obey(connection, number, order))
                case Wake(number):
                    self._spawn(self._obey(connection, number, self._rest.wake()))
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
            if self._must_wait(renamed):
                self._live[internal_id] = owner
                owner.preparing = _Preparing(self._worker.now(), _prompt_tokens(renamed))
                owner.preparing.task = self._spawn(self._prepare(renamed, owner))
                self._rest.request_came()
                return
            if self._worker.submit(renamed):
                self._live[internal_id] = owner
                self._rest.request_came()
                return
            refusal = OverloadedError(_TOO_FAST)
        connection.send(StepOutput([Failed(request.request_id, refusal.info())]))

    def _must_wait(self, request: work.Request) -> bool:
        """Whether something has to happen before the core can be given a request."""
        held = isinstance(request, GenerationRequest) and request.sampling.grammar is not None
        return self._rest.state not in COMPUTING or (held and self._worker.grammars is not None)

    async def _prepare(self, request: work.Request, owner: _Owner) -> None:
        """Wait for a core, compile the request's grammar off its thread, and hand it over."""
        internal_id, preparing = request.request_id, owner.preparing
        assert preparing is not None
        compiled: CompiledGrammar | None = None
        error: TokenpathError | None = None
        try:
            await self._rest.until_core()
            compiled = await self._compiled(request)
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

    async def _compiled(self, request: work.Request) -> CompiledGrammar | None:
        grammars = self._worker.grammars
        if not isinstance(request, GenerationRequest) or grammars is None:
            return None
        grammar = request.sampling.grammar
        return None if grammar is None else await grammars.ready(grammar)

    def _end_unprepared(self, owner: _Owner, event: GenerationEvent) -> None:
        """The end of a request that the core never saw."""
        self._forget(event.request_id)
        owner.connection.send(StepOutput([_addressed(event, owner)]))

    def _refusal(self) -> TokenpathError | None:
        state = self._rest.state
        if state is EngineState.DRAINING:
            return DrainingError("the replica is shutting down")
        if state in {EngineState.LOADING, EngineState.FAILED}:
            return NotReadyError("the model is still loading")
        if state is not EngineState.READY and not self._rest.wakes_on_request:
            return AsleepError("the model sleeps, and requests do not wake it")
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
        if not self._rest.core:
            connection.send(StatsReply(query_id, self._rest.stats()))
        elif not self._worker.inbox.put(work.QueryStats((connection.number, query_id))):
            log.warning("dropped a stats query: too many commands wait")

    def _answer(self, keys: tuple[tuple[int, int], ...], stats: ReplicaStats) -> None:
        by_number = {connection.number: connection for connection in self._connections}
        for number, query_id in keys:
            if number in by_number:
                by_number[number].send(StatsReply(query_id, stats))

    async def _drain_for(self, connection: Connection, grace_s: float) -> None:
        connection.send(Drained(await self.drain(grace_s)))

    @staticmethod
    async def _obey(
        connection: Connection, number: int, order: Coroutine[None, None, None]
    ) -> None:
        try:
            await order
        except TokenpathError as error:
            connection.send(Done(number, error.info()))
        else:
            connection.send(Done(number))

    # Endings.

    def _forget(self, internal_id: str) -> None:
        del self._live[internal_id]
        if not self._live:
            self._live_changed.set()
            self._rest.became_idle()

    def _fail_live(self, error: TokenpathError) -> None:
        failed: defaultdict[Connection, list[ReplicaEvent]] = defaultdict(list)
        for internal_id, owner in list(self._live.items()):
            self._forget(internal_id)
            if owner.preparing is not None and owner.preparing.task is not None:
                owner.preparing.task.cancel()
            failed[owner.connection].append(Failed(owner.request_id, error.info()))
        for connection, events in failed.items():
            connection.send(StepOutput(events))

    def _announce(self, status: Status) -> None:
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

    def slept(self, totals: ReplicaStats) -> None:
        self._call(self._server.slept, totals)

    def wake_failed(self, error: TokenpathError) -> None:
        self._call(self._server.wake_failed, error)

    def stuck(self, sentence: str) -> None:
        self._call(self._server.stuck, sentence)

    def broke(self, error: BaseException) -> None:
        self._call(self._server.broke, error)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop has closed: the process is ending, nobody listens
            log.debug("dropped a report of the engine after the end")


def _prompt_tokens(request: work.Request) -> int:
    if isinstance(request, GenerationRequest):
        return len(request.prompt.token_ids)
    return request.tokens


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
