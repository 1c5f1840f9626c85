"""The decoding side of one handover: a thread that orders blocks and receives them.

It only ever counts up how many have arrived and, once, says how it ended; the engine's thread reads
both without a lock. What has arrived is not looked at here: its checksum is compared at the last
moment, when the block is copied into the pool.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from tokenpath.config.launch import Address, UnixAddress
from tokenpath.engine.handover.memory import Bytes, NoRoomError, Rows, plain_rows, shared_rows
from tokenpath.engine.handover.wire import Wire, WireError, connect
from tokenpath.engine.kv_tiers.sealed import DamagedBlockError, open_seal
from tokenpath.policy.tiers import BlockName
from tokenpath.protocol.framing import Codec
from tokenpath.protocol.handover import (
    HANDOVER_VERSION,
    Accepted,
    Complete,
    FromGiver,
    Given,
    Greeting,
    Order,
    Refused,
    Working,
)

CONNECT_S: Final = 2.0
"""A replica that prefills and cannot be reached in this time is done without."""
SILENCE_S: Final = 5.0
"""One that says nothing for so long is given up. It gives a sign of life four times a second."""
MAX_FRAME_BYTES: Final = 4096

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is ordered of whom."""

    address: Address
    secret: str
    tls: ssl.SSLContext | None
    order: Order
    """Without ``shared``, which is settled by the connection."""
    names: Sequence[BlockName]
    """Of the blocks that are wanted."""


class Fetch:
    """One order under way. Its methods are the engine thread's."""

    def __init__(
        self, wanted: Wanted, *, came: threading.Event, clock: Callable[[], float]
    ) -> None:
        """``came`` is set with everything that happens."""
        self.names = wanted.names
        self.block_bytes = wanted.order.block_bytes
        self.arrived = 0
        """Blocks, from the first."""
        self.checksums: list[bytes] = []
        """That arrived blocks must have."""
        self.ended_at: float | None = None
        """On the clock; None while it runs."""
        self.unreachable = False
        """It ended because nobody answered."""
        self.why = ""
        """Why it ended early; empty if it did not."""
        self.started_at = clock()
        self._wanted = wanted
        self._came = came
        self._clock = clock
        self._rows: Rows | None = None
        self._wire: Wire[FromGiver] | None = None
        self._cancelled = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="handover", daemon=True)

    def start(self) -> None:
        """Order the blocks."""
        self._thread.start()

    def row(self, index: int) -> Bytes:
        """The bytes of an arrived block."""
        assert self._rows is not None
        return self._rows[index]

    def cancel(self, why: str) -> bool:
        """Withdraw the order; what has arrived stays. False if it has ended already."""
        with self._lock:
            if self._cancelled or self.ended_at is not None:
                return False
            self._cancelled = True
            self.why = why
            if self._wire is not None:
                self._wire.close()
            return True

    def _run(self) -> None:
        try:
            self._receive()
        except (WireError, DamagedBlockError, NoRoomError) as error:
            self.why = self.why or str(error)
        except Exception as error:
            log.exception("a handover failed")
            self.why = self.why or f"it failed ({type(error).__name__})"
        finally:
            with self._lock:
                self.ended_at = self._clock()
                wire = self._wire
            if wire is not None:
                wire.close()
            self._came.set()

    def _receive(self) -> None:
        wanted, order = self._wanted, self._wanted.order
        try:
            connection = connect(wanted.address, wanted.tls, timeout_s=CONNECT_S)
        except WireError:
            self.unreachable = True
            raise
        wire: Wire[FromGiver] = Wire(connection, Codec(FromGiver))
        with self._lock:
            self._wire = wire
            if self._cancelled:
                return
        wire.send(Greeting(HANDOVER_VERSION, wanted.secret), timeout_s=SILENCE_S)
        shared = None
        if isinstance(wanted.address, UnixAddress):
            shared = shared_rows(len(self.names), self.block_bytes)
        if shared is None:
            self._rows = plain_rows(len(self.names), self.block_bytes)
            wire.send(order, timeout_s=SILENCE_S)
        else:
            self._rows, descriptor = shared
            try:
                wire.send(_shared(order), timeout_s=SILENCE_S)
                wire.send_descriptor(descriptor, timeout_s=SILENCE_S)
            finally:
                os.close(descriptor)
        while True:
            frame = wire.receive(timeout_s=SILENCE_S, most_bytes=MAX_FRAME_BYTES)
            match frame:
                case Given(seal):
                    self._given(wire, seal, payload=shared is None)
                case Refused(reason):
                    self.why = self.why or reason
                    return
                case Complete():
                    return
                case Accepted() | Working():
                    continue

    def _given(self, wire: Wire[FromGiver], seal: bytes, *, payload: bool) -> None:
        if self.arrived == len(self.names):
            raise WireError("it gave more blocks than were ordered")
        name = self.names[self.arrived]
        expected = open_seal(
            seal,
            fingerprint=self._wanted.order.fingerprint,
            identity=name.identity,
            parent=name.parent,
            payload_bytes=self.block_bytes,
        )
        if payload:
            assert self._rows is not None
            wire.receive_into(self._rows[self.arrived], timeout_s=SILENCE_S)
        self.checksums.append(expected)
        self.arrived += 1
        self._came.set()


def _shared(order: Order) -> Order:
    return msgspec.structs.replace(order, shared=True)
