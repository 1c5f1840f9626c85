"""The prefilling side: computes prompts that other replicas order, and gives their blocks away.

Each connection has a thread (``_Session``), which reads the order, has it queued like any other
request and sends what comes of it. ``Outgoing`` is what the engine's thread sees of it: after each
step it copies the blocks that the step has filled to where the receiver, or the sending thread,
takes them. It never waits. Towards a process of this machine that is the receiver's own memory;
over the network it is a buffer, and where the network falls behind by more than the buffer, the
handover ends there and the receiver computes the rest.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import logging
import queue
import socket
import ssl
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import msgspec

from tokenpath.config.launch import Address, UnixAddress
from tokenpath.engine.handover.memory import (
    Budget,
    Bytes,
    NoRoomError,
    Rows,
    plain_rows,
    received_rows,
)
from tokenpath.engine.handover.wire import Wire, WireError, listen
from tokenpath.engine.kv_tiers.sealed import Seal, checksum
from tokenpath.policy.prefix import block_identity, identity_root
from tokenpath.protocol.errors import SpecError
from tokenpath.protocol.framing import Codec
from tokenpath.protocol.handover import (
    HANDOVER_VERSION,
    MAX_GREETING_BYTES,
    MAX_ORDER_BYTES,
    Accepted,
    Complete,
    Given,
    Greeting,
    Order,
    Refused,
    ToGiver,
    Working,
)
from tokenpath.protocol.replica import ReplicaStats
from tokenpath.protocol.request import GenerationRequest, SamplingParams, TokenPrompt

MAX_SESSIONS: Final = 64
"""Orders at a time; more are refused, and computed where they came from."""
FAREWELL_S: Final = 1.0
MAX_CONNECTIONS: Final = 128
"""With those that have not proved themselves yet; more are closed at once."""
PATIENCE_S: Final = 5.0
"""A peer that does not greet, order or take bytes for so long is given up."""
LOOK_S: Final = 0.25
"""While there is nothing to give: how often a sign of life is sent, and whoever left is noticed."""

log = logging.getLogger(__name__)


class Reader(Protocol):
    """The pool's side; see ``kv_tiers.copier.BlockCopier``."""

    @property
    def block_bytes(self) -> int: ...

    def read(self, block: int, to: Bytes) -> None: ...


class Outgoing:
    """One ordered prompt as the engine's thread sees it."""

    def __init__(
        self, reader: Reader, rows: Rows, slots: int, *, first: int, end: int, block_tokens: int
    ) -> None:
        """Blocks ``first`` to before ``end`` are wanted; ``slots`` of them fit at a time."""
        self._reader = reader
        self._rows = rows
        self._free = deque(range(slots))
        self._next = first
        self._end = end
        self._block_tokens = block_tokens
        self.filled: queue.SimpleQueue[int | str] = queue.SimpleQueue()
        """Slots in the blocks' order; at the end why there are no more, empty if all is well."""
        self._ended = False

    def computed(self, blocks: Sequence[int], tokens: int) -> None:
        """The sequence's first so many tokens are in these blocks of the pool."""
        while not self._ended and self._next < min(tokens // self._block_tokens, self._end):
            if not self._free:
                self.ended("the connection is slower than the prefill")
                return
            slot = self._free.popleft()
            self._reader.read(blocks[self._next], self._rows[slot])
            self.filled.put(slot)
            self._next += 1
        if self._next == self._end:
            self.ended("")

    def ended(self, why: str) -> None:
        """Nothing more comes. ``why`` is empty if there is nothing more to come."""
        if not self._ended:
            self._ended = True
            self.filled.put(why)

    def row(self, slot: int) -> Bytes:
        """A filled slot's bytes."""
        return self._rows[slot]

    def sent(self, slot: int) -> None:
        """A slot may be filled again; called from the sending thread."""
        self._free.append(slot)


class Desk(Protocol):
    """The engine's queue, as a session uses it. Thread-safe."""

    def submit(self, request: GenerationRequest) -> bool:
        """Queue an order; False if there is no room."""
        ...

    def abort(self, request_id: str) -> None:
        """Withdraw it; unknown ones are ignored."""


class Giver:
    """Takes orders from the moment it is started until it is closed."""

    def __init__(
        self,
        reader: Reader,
        *,
        fingerprint: bytes,
        block_tokens: int,
        model: str,
        secret: str,
        addresses: Sequence[Address],
        tls: ssl.SSLContext | None,
        buffer_bytes: int,
    ) -> None:
        """Listens at once; answers after ``start``. Raises ``SpecError`` if it cannot listen."""
        self._reader = reader
        self._fingerprint = fingerprint
        self._block_tokens = block_tokens
        self._model = model
        self._secret = secret
        self._tls = tls
        self._budget = Budget(buffer_bytes)
        self._numbers = itertools.count(1)
        self._ordered: dict[str, Outgoing] = {}
        self._sessions: set[Wire[ToGiver]] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._draining = False
        self._places = threading.Semaphore(MAX_CONNECTIONS)
        self.blocks_total = 0
        """Given."""
        self._listeners: list[tuple[socket.socket, Address]] = []
        for address in addresses:
            try:
                self._listeners.append((listen(address), address))
            except OSError as error:
                self.close()
                raise SpecError(
                    f"the engine cannot take handover orders on {address}: {error.strerror}",
                    param="disaggregation.listen",
                ) from error

    def start(self, desk: Desk) -> None:
        """Take orders for this queue."""
        for listener, address in self._listeners:
            tls = None if isinstance(address, UnixAddress) else self._tls
            threading.Thread(
                target=self._accept, args=(listener, tls, desk), name="handover", daemon=True
            ).start()

    def ordered(self, request_id: str) -> Outgoing | None:
        """Where the blocks of a request go; None for one that nobody ordered here.

        From the engine's thread, as ``failed`` and ``report``.
        """
        return self._ordered.get(request_id)

    def failed(self, request_id: str, why: str) -> None:
        """A request could not be queued."""
        outgoing = self._ordered.get(request_id)
        if outgoing is not None:
            outgoing.ended(why)

    def report(self, stats: ReplicaStats) -> ReplicaStats:
        """An engine's figures, with what was given among them."""
        return msgspec.structs.replace(
            stats,
            handover_blocks_given_total=self.blocks_total,
            handover_bytes_given_total=self.blocks_total * self._reader.block_bytes,
        )

    def refuse(self) -> None:
        """Take no more orders, for the replica is shutting down; those that run go on."""
        self._draining = True

    def close(self) -> None:
        """Take no more orders, and end those that run."""
        with self._lock:
            self._closed = True
            sessions = list(self._sessions)
        for listener, address in self._listeners:
            # Closing alone does not wake a thread that waits in ``accept``.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            if isinstance(address, UnixAddress):
                address.path.unlink(missing_ok=True)
        for wire in sessions:
            wire.close()

    def _accept(self, listener: socket.socket, tls: ssl.SSLContext | None, desk: Desk) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if self._closed:
                    return
                log.warning("an order for a handover was lost: %s", error)
                continue
            if not self._places.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(
                target=self._attend, args=(connection, tls, desk), name="handover", daemon=True
            ).start()

    def _attend(self, connection: socket.socket, tls: ssl.SSLContext | None, desk: Desk) -> None:
        try:
            self._converse(connection, tls, desk)
        finally:
            self._places.release()

    def _converse(self, connection: socket.socket, tls: ssl.SSLContext | None, desk: Desk) -> None:
        try:
            connection.settimeout(PATIENCE_S)
            if tls is not None:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection = tls.wrap_socket(connection, server_side=True)
        except OSError as error:
            log.warning("refused a handover: no TLS with its peer (%s)", error)
            connection.close()
            return
        wire: Wire[ToGiver] = Wire(connection, Codec(ToGiver))
        with self._lock:
            full = len(self._sessions) >= MAX_SESSIONS or self._closed
            self._sessions.add(wire)
        try:
            if self._greeted(wire):
                self._serve(wire, desk, full=full)
        except WireError as error:
            log.info("a handover ended early: %s", error)
        finally:
            with self._lock:
                self._sessions.discard(wire)
            wire.close()

    def _greeted(self, wire: Wire[ToGiver]) -> bool:
        greeting = wire.receive(timeout_s=PATIENCE_S, most_bytes=MAX_GREETING_BYTES)
        if not isinstance(greeting, Greeting) or not hmac.compare_digest(
            greeting.secret.encode(), self._secret.encode()
        ):
            log.warning("refused a handover: its secret is wrong")
            self._refuse(wire, "the secret is wrong")
            return False
        if greeting.version != HANDOVER_VERSION:
            self._refuse(wire, f"version {HANDOVER_VERSION} is spoken here")
            return False
        return True

    def _serve(self, wire: Wire[ToGiver], desk: Desk, *, full: bool) -> None:
        order = wire.receive(timeout_s=PATIENCE_S, most_bytes=MAX_ORDER_BYTES)
        if not isinstance(order, Order):
            raise WireError("it sent a greeting instead of an order")
        reason = "too many handovers are running" if full else self._fault(order)
        if self._draining:
            reason = "the replica is shutting down"
        if reason is not None:
            self._refuse(wire, reason)
            return
        count = len(order.token_ids) // self._block_tokens - order.first_block
        size = self._reader.block_bytes
        if order.shared:
            try:
                descriptor = wire.receive_descriptor(timeout_s=PATIENCE_S)
                self._give(wire, desk, order, received_rows(descriptor, count, size), count)
            except NoRoomError as error:
                self._refuse(wire, str(error))
            return
        slots = self._budget.take(count, size)
        try:
            if slots == 0:
                self._refuse(wire, "there is no room to buffer its blocks")
                return
            self._give(wire, desk, order, plain_rows(slots, size), slots)
        finally:
            self._budget.give(slots * size)

    def _fault(self, order: Order) -> str | None:
        tokens = len(order.token_ids)
        if order.fingerprint != self._fingerprint or order.block_bytes != self._reader.block_bytes:
            return "it has another model, number type, block size, kernel or version"
        if tokens % self._block_tokens or not 0 <= order.first_block * self._block_tokens < tokens:
            return "the order is not of whole blocks"
        return None

    def _give(self, wire: Wire[ToGiver], desk: Desk, order: Order, rows: Rows, slots: int) -> None:
        """Have an accepted order computed and send what comes of it."""
        request = GenerationRequest(
            request_id=f"handover/{next(self._numbers)}",
            model=self._model,
            prompt=TokenPrompt(order.token_ids),
            # The token is nobody's: whoever ordered the blocks samples its own after them.
            sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            priority=order.priority,
            cache_salt=order.salt,
            timeout_s=order.timeout_s,
        )
        outgoing = Outgoing(
            self._reader,
            rows,
            slots,
            first=order.first_block,
            end=len(order.token_ids) // self._block_tokens,
            block_tokens=self._block_tokens,
        )
        self._ordered[request.request_id] = outgoing
        try:
            if not desk.submit(request):
                self._refuse(wire, "its queue is full")
                return
            wire.send(Accepted(), timeout_s=PATIENCE_S)
            self._send_all(wire, order, outgoing)
        finally:
            del self._ordered[request.request_id]
            desk.abort(request.request_id)

    def _send_all(self, wire: Wire[ToGiver], order: Order, outgoing: Outgoing) -> None:
        seals = self._names(order)
        while True:
            try:
                filled = outgoing.filled.get(timeout=LOOK_S)
            except queue.Empty:
                if wire.spoken_to:
                    raise WireError("whoever ordered it has left") from None
                wire.send(Working(), timeout_s=PATIENCE_S)
                continue
            if isinstance(filled, str):
                last = Refused(filled) if filled else Complete()
                wire.send(last, timeout_s=PATIENCE_S)
                return
            row = outgoing.row(filled)
            identity, parent = next(seals)
            seal = Seal(self._fingerprint, identity, parent, checksum(row.data))
            payload = None if order.shared else row
            wire.send(Given(seal.header(row.nbytes)), timeout_s=PATIENCE_S, payload=payload)
            if not order.shared:
                outgoing.sent(filled)
            with self._lock:
                self.blocks_total += 1

    def _names(self, order: Order) -> Iterator[tuple[bytes, bytes]]:
        """Identity and parent of each wanted block."""
        size = self._block_tokens

        def chain() -> Iterator[tuple[bytes, bytes]]:
            parent = identity_root((order.salt, ""))
            for start in range(0, len(order.token_ids), size):
                identity = block_identity(parent, order.token_ids[start : start + size])
                yield identity, parent
                parent = identity

        return itertools.islice(chain(), order.first_block, None)

    @staticmethod
    def _refuse(wire: Wire[ToGiver], reason: str) -> None:
        wire.send(Refused(reason), timeout_s=PATIENCE_S)
        wire.close_gently(within_s=FAREWELL_S)
