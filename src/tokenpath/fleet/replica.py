"""The gateway's end of the replica link: a ``Replica`` over one connection.

One task reads frames and deals the events out to the requests' own queues. A queue needs no bound
of its own: a request has at most ``max_tokens`` events and one ending, and whoever stops reading
is either slow, and then catches up, or gone, and then its iterator is closed and the queue with it.

Every request gets an id on the wire that is never used again on this connection, so that events
still on their way for an aborted request cannot be taken for those of a new one.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import ssl
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Final

import msgspec

from tokenpath.config.launch import Address, UnixAddress
from tokenpath.fleet.lifecycle import Lifecycle, move
from tokenpath.protocol.errors import (
    DrainingError,
    ErrorInfo,
    InvalidRequestError,
    NotReadyError,
    ReplicaLostError,
    TokenpathError,
    from_info,
)
from tokenpath.protocol.events import Failed, GenerationEvent, TokenDelta
from tokenpath.protocol.framing import (
    HEADER_BYTES,
    READ_BYTES,
    FrameReader,
    FramingError,
    encode,
    from_replica_codec,
    to_replica_codec,
)
from tokenpath.protocol.link import (
    PROTOCOL_VERSION,
    Abort,
    Done,
    Drain,
    Drained,
    FromReplica,
    Hello,
    LoadFailed,
    Pool,
    Progress,
    Ready,
    ReplicaEvent,
    Resting,
    Sleep,
    StatsQuery,
    StatsReply,
    StepOutput,
    Submit,
    ToReplica,
    Wake,
)
from tokenpath.protocol.pooling import Pooled, PoolingRequest
from tokenpath.protocol.replica import ModelCard, ReplicaState, ReplicaStats
from tokenpath.protocol.request import GenerationRequest

CONNECT_TIMEOUT_S: Final = 10.0
STATS_TIMEOUT_S: Final = 30.0
"""The answer comes between two steps, and a step that prefills on a small CPU takes seconds."""
DRAIN_MARGIN_S: Final = 10.0
"""On top of the grace: the step that was running when it ended."""

WAKE_TIMEOUT_S: Final = 1200.0
"""For the process to say how a wake ended; its own watchdog ends a load that stands still."""

OnProgress = Callable[[str, float], None]
OnState = Callable[[ReplicaState], None]
_Queue = asyncio.Queue[ReplicaEvent | TokenpathError]

log = logging.getLogger("tokenpath.fleet")


class LinkedReplica:
    """A replica at the other end of a connection. Made by ``connect``."""

    def __init__(
        self,
        replica_id: str,
        frames: FrameReader[FromReplica],
        writer: asyncio.StreamWriter,
        on_progress: OnProgress,
        on_state: OnState,
    ) -> None:
        self._replica_id = replica_id
        self._frames = frames
        self._writer = writer
        self._on_progress = on_progress
        self._on_state = on_state
        self._life = move(Lifecycle(), ReplicaState.LOADING)
        self._card: ModelCard | None = None
        self._last_stats = ReplicaStats()
        self._load_error: TokenpathError | None = None
        self._numbers = itertools.count(1)
        self._streams: dict[str, _Queue] = {}
        """By id on the wire, until the last event has come or the iterator was closed."""
        self._wire_ids: defaultdict[str, set[str]] = defaultdict(set)
        """By the request's own id; those of all its open iterators."""
        self._queries: dict[int, asyncio.Future[ReplicaStats]] = {}
        self._drains: list[asyncio.Future[int]] = []
        self._orders: dict[int, asyncio.Future[None]] = {}
        self._settled = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def connect(
        cls,
        address: Address,
        *,
        replica_id: str,
        token: str,
        tls: ssl.SSLContext | None = None,
        on_progress: OnProgress = lambda _what, _fraction: None,
        on_state: OnState = lambda _state: None,
    ) -> LinkedReplica:
        """Connect and shake hands. The replica is ``LOADING`` until it has said more.

        ``on_state`` is told each state in which the model is loaded, or was and can be again.

        Raises ``ReplicaLostError`` when nobody is there, or who is there does not speak this
        link's version, does not know the token or cannot be believed.
        """
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if isinstance(address, UnixAddress):
                    reader, writer = await asyncio.open_unix_connection(
                        address.path, limit=READ_BYTES
                    )
                else:
                    reader, writer = await asyncio.open_connection(
                        address.host, address.port, ssl=tls, limit=READ_BYTES
                    )
                frames = FrameReader(reader, from_replica_codec())
                writer.write(encode(Hello(version=PROTOCOL_VERSION, token=token)))
                _check_hello(await frames.read(), token)
        except BaseException as error:
            if writer is not None:
                writer.transport.abort()
            why = _why_not_connected(error)
            if why is None:
                raise
            raise ReplicaLostError(f"no link to the replica at {address}: {why}") from error
        return cls(replica_id, frames, writer, on_progress, on_state)

    @property
    def replica_id(self) -> str:
        return self._replica_id

    @property
    def state(self) -> ReplicaState:
        return self._life.state

    @property
    def reason(self) -> str:
        """Why it is in this state; empty where the state says all."""
        return self._life.reason

    @property
    def card(self) -> ModelCard | None:
        return self._card

    @property
    def last_stats(self) -> ReplicaStats:
        return self._last_stats

    @property
    def load_error(self) -> TokenpathError | None:
        """What the replica said when it could not load its model."""
        return self._load_error

    async def wait_ready(self) -> None:
        """Raises the load's own error, or ``ReplicaLostError``."""
        await self._settled.wait()
        if self._load_error is not None:
            raise self._load_error
        if self._card is None:
            raise ReplicaLostError(self.reason)

    async def wait_closed(self) -> None:
        """Return when the connection has ended, whoever ended it."""
        await asyncio.wait([self._reading])

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """Stream the events of one request; see ``protocol.replica``.

        The request is sent when the first event is asked for. Closing the iterator sends the
        abort before it returns. An error of this one request is a ``Failed`` event, not raised.
        """
        async with aclosing(self._exchange(Submit(request))) as events:
            async for event in events:
                if isinstance(event, TokenDelta | Failed):
                    yield event

    async def pool(self, request: PoolingRequest) -> AsyncGenerator[Pooled | Failed]:
        """Stream the vectors of one request; see ``protocol.replica``."""
        async with aclosing(self._exchange(Pool(request))) as events:
            async for event in events:
                if isinstance(event, TokenDelta):  # how whatever was withdrawn ends
                    yield Pooled(event.request_id, finish=event.finish)
                else:
                    yield event

    async def _exchange(self, order: Submit | Pool) -> AsyncGenerator[ReplicaEvent]:
        """Send a request under an id of its own and yield its events until the last."""
        self._check_takes_requests()
        request_id = order.request.request_id
        wire_id = f"{request_id}~{next(self._numbers)}"
        queue: _Queue = asyncio.Queue()
        self._streams[wire_id] = queue
        self._wire_ids[request_id].add(wire_id)
        try:
            self._write(_submission(order, wire_id))
            await self._flush()
            ended = False
            while not ended:
                event = await queue.get()
                if isinstance(event, TokenpathError):
                    raise event
                ended = _ends(event)
                yield msgspec.structs.replace(event, request_id=request_id)
        finally:
            self._wire_ids[request_id].discard(wire_id)
            if not self._wire_ids[request_id]:
                del self._wire_ids[request_id]
            # Still listed: neither its end nor the connection's has arrived.
            if self._streams.pop(wire_id, None) is not None:
                self._send(Abort(wire_id))

    def abort(self, request_id: str) -> None:
        """Withdraw a request; see ``protocol.replica``."""
        for wire_id in self._wire_ids.get(request_id, ()):
            if wire_id in self._streams:
                self._send(Abort(wire_id))

    async def stats(self, timeout_s: float = STATS_TIMEOUT_S) -> ReplicaStats:
        """Ask the replica now; it answers between two steps. Raises ``ReplicaLostError``."""
        if self._reading.done():
            raise ReplicaLostError(self.reason)
        query_id = next(self._numbers)
        reply: asyncio.Future[ReplicaStats] = asyncio.get_running_loop().create_future()
        self._queries[query_id] = reply
        try:
            async with asyncio.timeout(timeout_s):
                self._send(StatsQuery(query_id))
                return await reply
        except TimeoutError as error:
            raise ReplicaLostError(
                f"the replica did not report its stats within {timeout_s:g} s"
            ) from error
        finally:
            del self._queries[query_id]

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, wait up to ``grace_s`` for the running ones, abort the rest.

        Raises ``ReplicaLostError`` when the replica does not confirm it.
        """
        if self._reading.done():
            raise ReplicaLostError(self.reason)
        if self.state is not ReplicaState.DRAINING:
            self._life = move(self._life, ReplicaState.DRAINING)
        drained: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._drains.append(drained)
        try:
            async with asyncio.timeout(grace_s + DRAIN_MARGIN_S):
                self._send(Drain(grace_s))
                aborted = await drained
        except TimeoutError as error:
            raise ReplicaLostError(f"the replica did not drain within {grace_s:g} s") from error
        log.info("replica %s drained; %d requests aborted", self._replica_id, aborted)

    async def sleep(self, grace_s: float, *, keep_kv: bool = True) -> None:
        """Give back weights and KV pool; see ``protocol.replica``."""
        number = next(self._numbers)
        await self._order(number, Sleep(number, grace_s, keep_kv), grace_s + STATS_TIMEOUT_S)

    async def wake(self) -> None:
        """Load them again; see ``protocol.replica``."""
        number = next(self._numbers)
        await self._order(number, Wake(number), WAKE_TIMEOUT_S)

    async def _order(self, number: int, order: Sleep | Wake, timeout_s: float) -> None:
        if self._reading.done():
            raise ReplicaLostError(self.reason)
        done = self._orders[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                self._send(order)
                await done
        except TimeoutError as error:
            raise ReplicaLostError(f"the replica did not obey within {timeout_s:g} s") from error
        finally:
            del self._orders[number]

    async def close(self) -> None:
        """End the connection; the replica aborts what this side still had running."""
        if self.state not in {ReplicaState.FAILED, ReplicaState.STOPPED}:
            self._life = move(self._life, ReplicaState.STOPPED, "the link was closed")
        self._writer.transport.abort()
        await self.wait_closed()

    def _check_takes_requests(self) -> None:
        match self.state:
            case ReplicaState.DRAINING:
                raise DrainingError("the replica is shutting down")
            case ReplicaState.PENDING | ReplicaState.LOADING:
                raise NotReadyError("the model is still loading")
            case ReplicaState.FAILED | ReplicaState.STOPPED:
                raise ReplicaLostError(self.reason)
            case _:  # one that sleeps is woken, or says itself that it must not be
                return

    def _send(self, frame: ToReplica) -> None:
        self._write(encode(frame))

    def _write(self, data: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(data)

    async def _flush(self) -> None:
        try:
            await self._writer.drain()
        except OSError:
            log.debug("the link to %s broke while sending", self._replica_id)  # the reader tells

    async def _read(self) -> None:
        why = "the engine closed the link"
        try:
            while (frame := await self._frames.read()) is not None:
                self._take(frame)
        except (FramingError, OSError) as error:
            why = f"the link to the engine broke: {error}"
        except Exception:
            log.exception("reading the link to %s failed", self._replica_id)
            why = "the link to the engine was given up after an error"
        finally:
            self._writer.transport.abort()
            self._lost(why)

    def _take(self, frame: FromReplica) -> None:
        match frame:
            case StepOutput(events, stats):
                if stats is not None:
                    self._last_stats = stats
                for event in events:
                    self._deal(event)
            case StatsReply(query_id, stats):
                self._last_stats = stats
                query = self._queries.get(query_id)
                if query is not None and not query.done():
                    query.set_result(stats)
            case Progress(what, fraction):
                self._on_progress(what, fraction)
            case Ready(card):
                self._settle(ReplicaState.READY, card)
            case Resting(state, card):
                self._settle(ReplicaState(state), card)
            case Done(number, failure):
                order = self._orders.get(number)
                if order is not None and not order.done():
                    _resolve(order, failure)
            case LoadFailed(error):
                self._load_error = from_info(error)
                self._fail(error.message)
            case Drained(aborted):
                for drained in self._drains:
                    if not drained.done():
                        drained.set_result(aborted)
                self._drains.clear()
            case Hello():
                raise FramingError("a second hello")

    def _settle(self, state: ReplicaState, card: ModelCard) -> None:
        """The model is loaded, or has been and can be again."""
        self._card = card
        if state is ReplicaState.ASLEEP:
            self._last_stats = self._last_stats.counted()  # nothing is held any more
        if self.state not in {ReplicaState.DRAINING, state}:
            self._life = move(self._life, state)
            self._on_state(state)
        self._settled.set()

    def _deal(self, event: ReplicaEvent) -> None:
        queue = self._streams.get(event.request_id)
        if queue is None:  # its iterator was closed while the event was on its way
            return
        if _ends(event):
            del self._streams[event.request_id]
        queue.put_nowait(event)

    def _fail(self, why: str) -> None:
        if self.state not in {ReplicaState.FAILED, ReplicaState.STOPPED}:
            self._life = move(self._life, ReplicaState.FAILED, why)
        self._settled.set()

    def _lost(self, why: str) -> None:
        self._fail(why)
        for queue in self._streams.values():
            queue.put_nowait(ReplicaLostError(f"the request was not finished: {why}"))
        self._streams.clear()
        waiting: list[asyncio.Future[Any]] = [
            *self._queries.values(),
            *self._drains,
            *self._orders.values(),
        ]
        for reply in waiting:
            if not reply.done():
                reply.set_exception(ReplicaLostError(why))


_submissions = to_replica_codec()


def _submission(order: Submit | Pool, wire_id: str) -> bytes:
    """The frame of a request under its id on the wire, known to be readable on the other side.

    There, a frame that cannot be decoded costs the connection, and every request on it. Types are
    not checked when a struct is made, so a slip of the gateway's must end here. Raises
    ``InvalidRequestError``.
    """
    try:
        renamed = msgspec.structs.replace(order.request, request_id=wire_id)
        data = encode(msgspec.structs.replace(order, request=renamed))
        _submissions.decode(memoryview(data)[HEADER_BYTES:])
    except (FramingError, OverflowError, TypeError, ValueError) as error:
        raise InvalidRequestError(f"the request cannot be sent to the engine: {error}") from error
    return data


def _resolve(order: asyncio.Future[None], failure: ErrorInfo | None) -> None:
    if failure is None:
        order.set_result(None)
    else:
        order.set_exception(from_info(failure))


def _ends(event: ReplicaEvent) -> bool:
    return isinstance(event, Failed) or event.finish is not None


def _check_hello(frame: FromReplica | None, token: str) -> None:
    if frame is None:
        raise FramingError("it closed the connection without a hello; is the token right?")
    if not isinstance(frame, Hello):
        raise FramingError("its first frame was not a hello")
    if not hmac.compare_digest(frame.token.encode(), token.encode()):
        raise FramingError("it does not know the token")
    if frame.version != PROTOCOL_VERSION:
        raise FramingError(f"it speaks version {frame.version}, not {PROTOCOL_VERSION}")


def _why_not_connected(error: BaseException) -> str | None:
    """One clause for the errors that mean "no link"; None for those that mean something else."""
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not to be believed: {error.verify_message}"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, FramingError):
        return str(error)
    return None
