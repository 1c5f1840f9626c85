"""What rank 0 and the other ranks tell each other, beside activations.

Rank 0 writes its order as one line of JSON to a rank's standard input, and after it a frame for
each step. The rank answers on its standard output, in lines of JSON.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec
import numpy as np

from tokenpath.engine.batch import IntArray, StepBatch
from tokenpath.engine.parallel.share import Share
from tokenpath.models.architecture import KvDtype
from tokenpath.models.memory import Dtype
from tokenpath.protocol.errors import ErrorInfo

_LENGTH: Final = struct.Struct("<I")
HEADER_BYTES: Final = _LENGTH.size
"""Before each frame: the bytes that follow."""


class RankOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has to load, and where it meets the others."""

    share: Share
    model: str
    """Path of the model."""
    name: str
    """The served model's name."""
    dtype: Dtype
    kv_dtype: KvDtype
    device: str
    num_blocks: int
    block_tokens: int
    threads: int
    cpus: list[int] | None
    """Where to run; None: anywhere."""
    folder: str
    """Private to the ranks of this engine."""
    meeting: int | None
    """A file descriptor of the memory that the parts of a stage share; None if there is none."""
    timeout_s: float
    log_level: str


class Opened(msgspec.Struct, tag=True, frozen=True):
    """The model is there, and the rank is about to meet the others."""


class Loading(msgspec.Struct, tag=True, frozen=True):
    """How far the rank is."""

    what: str
    fraction: float


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The rank waits for steps."""

    weight_bytes: int


class Ended(msgspec.Struct, tag=True, frozen=True):
    """The rank ends because of an error."""

    error: ErrorInfo


Answer = Opened | Loading | Ready | Ended


class _Batch(msgspec.Struct, array_like=True, frozen=True):
    token_ids: bytes
    positions: bytes
    slots: bytes
    row_starts: bytes
    context_tokens: bytes
    block_tables: bytes
    sampled_rows: bytes
    single_token_chunks: int
    block_tokens: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Batch)


def write_batch(batch: StepBatch) -> bytes:
    """A frame, with its header."""
    body = _encoder.encode(
        _Batch(
            batch.token_ids.tobytes(),
            batch.positions.tobytes(),
            batch.slots.tobytes(),
            batch.row_starts.tobytes(),
            batch.context_tokens.tobytes(),
            batch.block_tables.tobytes(),
            batch.sampled_rows.tobytes(),
            batch.single_token_chunks,
            batch.block_tokens,
        )
    )
    return _LENGTH.pack(len(body)) + body


def body_bytes(header: bytes) -> int:
    """How long the frame behind a header is."""
    return int(_LENGTH.unpack(header)[0])


def read_batch(body: bytes) -> StepBatch:
    """The reverse of ``write_batch``, without the header."""
    sent = _decoder.decode(body)
    context = _ints(sent.context_tokens)
    return StepBatch(
        token_ids=_ints(sent.token_ids),
        positions=_ints(sent.positions),
        slots=_ints(sent.slots),
        row_starts=_ints(sent.row_starts),
        context_tokens=context,
        block_tables=_ints(sent.block_tables).reshape(len(context), -1),
        single_token_chunks=sent.single_token_chunks,
        sampled_rows=_ints(sent.sampled_rows),
        block_tokens=sent.block_tokens,
    )


def _ints(raw: bytes) -> IntArray:
    # A copy: torch has no tensors that cannot be written.
    return np.frombuffer(raw, np.int64).copy()
