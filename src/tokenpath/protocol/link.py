"""Frames of the replica link: one connection per gateway and replica carries every request.

The wire form of a frame is four bytes of big-endian length followed by that many bytes of
MessagePack; ``ToReplica`` and ``FromReplica`` are tagged unions, so a decoder rejects a frame that
is not of the protocol. One engine step sends one ``StepOutput`` with everything it produced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from tokenpath.protocol.errors import ErrorInfo
from tokenpath.protocol.events import GenerationEvent
from tokenpath.protocol.pooling import Pooled, PoolingRequest
from tokenpath.protocol.replica import ModelCard, ReplicaStats
from tokenpath.protocol.request import GenerationRequest

PROTOCOL_VERSION = 2
ReplicaEvent = GenerationEvent | Pooled
"""What may come back of a request."""

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""A longer frame is a broken or hostile peer: the connection is closed."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First frame of each side."""

    version: int
    token: str = ""
    """Shared secret that the fleet gave the replica at start."""


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    request: GenerationRequest


class Pool(msgspec.Struct, frozen=True, tag="pool"):
    request: PoolingRequest


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Withdraw a request. It stays live until its last event has come; unknown ones are ignored."""

    request_id: str


class StatsQuery(msgspec.Struct, frozen=True, tag="stats?"):
    query_id: int


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    grace_s: float


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Give back weights and KV pool; answered by a ``Done`` of the same number."""

    number: int
    grace_s: float
    keep_kv: bool


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Load them again; answered by a ``Done`` of the same number."""

    number: int


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Loading: which part, and how far."""

    what: str
    fraction: float


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    card: ModelCard


class Resting(msgspec.Struct, frozen=True, tag="resting"):
    """The model has been loaded, but is being put to sleep, sleeps or is being loaded again."""

    state: Literal["falling_asleep", "asleep", "waking"]
    card: ModelCard
    """Of the model as it was loaded last."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """How an order with a number ended."""

    number: int
    error: ErrorInfo | None = None


class LoadFailed(msgspec.Struct, frozen=True, tag="load-failed"):
    error: ErrorInfo


class StepOutput(msgspec.Struct, frozen=True, tag="step", omit_defaults=True):
    """Everything one engine step produced, for the connection it belongs to."""

    events: Sequence[ReplicaEvent]
    stats: ReplicaStats | None = None


class StatsReply(msgspec.Struct, frozen=True, tag="stats"):
    query_id: int
    stats: ReplicaStats


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    aborted: int


ToReplica = Hello | Submit | Pool | Abort | StatsQuery | Drain | Sleep | Wake
FromReplica = (
    Hello | Progress | Ready | Resting | LoadFailed | StepOutput | StatsReply | Drained | Done
)
