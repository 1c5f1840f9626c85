"""Frames to bytes and back: four bytes of big-endian length, then MessagePack.

The splitter and the codecs do no I/O, so that any chunking of a byte stream can be tested without
a socket; ``FrameReader`` adds the one ``await`` that reading needs, over anything with the ``read``
of an asyncio stream. Whatever arrives, the only error is ``FramingError``: after it nothing on the
connection can be trusted, and it has to be closed.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from tokenpath.protocol.link import MAX_FRAME_BYTES, FromReplica, ToReplica

HEADER_BYTES: Final = 4
READ_BYTES: Final = 256 * 1024
"""Most bytes taken from the socket in one read."""

FrameT = TypeVar("FrameT")


class FramingError(Exception):
    """The peer sent bytes that are not frames of this protocol."""


class ByteSource(Protocol):
    """The part of ``asyncio.StreamReader`` that is used here."""

    async def read(self, n: int = ..., /) -> bytes:
        """Some bytes, at most ``n``; empty at the end of the stream."""
        ...


_encoder = msgspec.msgpack.Encoder()


def encode(frame: ToReplica | FromReplica) -> bytes:
    """One frame, ready to be written. Raises ``FramingError`` if it is longer than allowed."""
    buffer = bytearray(HEADER_BYTES)
    _encoder.encode_into(frame, buffer, HEADER_BYTES)
    length = len(buffer) - HEADER_BYTES
    if length > MAX_FRAME_BYTES:
        raise FramingError(
            f"a frame of {length} bytes is longer than the {MAX_FRAME_BYTES} allowed"
        )
    buffer[:HEADER_BYTES] = length.to_bytes(HEADER_BYTES, "big")
    return bytes(buffer)


class Codec(Generic[FrameT]):
    """Decodes one direction's frames; a frame of the other direction is an error."""

    def __init__(self, frame_type: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[FrameT] = msgspec.msgpack.Decoder(frame_type)

    def decode(self, payload: bytes | memoryview) -> FrameT:
        """Raises ``FramingError`` for anything but a well-formed frame of this direction."""
        try:
            return self._decoder.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise FramingError(f"not a frame of the replica link: {error}") from error


def to_replica_codec() -> Codec[ToReplica]:
    """For the engine's side, which reads what gateways send."""
    return Codec(ToReplica)


def from_replica_codec() -> Codec[FromReplica]:
    """For the gateway's side, which reads what the engine sends."""
    return Codec(FromReplica)


class FrameSplitter:
    """Cuts a byte stream, in whatever chunks it comes, into the payloads of its frames.

    Holds at most one incomplete frame plus the chunk last fed. ``max_frame_bytes`` may be raised
    while the stream runs: before the peer has proved who it is, frames are short.
    """

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that has begun and is not complete; 0 at a clean end of the stream."""
        return len(self._buffer)

    def feed(self, chunk: bytes) -> list[bytes]:
        """Add bytes; return the payloads completed by them.

        Raises ``FramingError`` as soon as a header announces a frame longer than allowed.
        """
        buffer = self._buffer
        buffer += chunk
        payloads: list[bytes] = []
        start = 0
        while len(buffer) - start >= HEADER_BYTES:
            length = int.from_bytes(buffer[start : start + HEADER_BYTES], "big")
            if length > self.max_frame_bytes:
                raise FramingError(
                    f"a frame of {length} bytes is longer than the {self.max_frame_bytes} allowed"
                )
            end = start + HEADER_BYTES + length
            if end > len(buffer):
                break
            payloads.append(bytes(buffer[start + HEADER_BYTES : end]))
            start = end
        del buffer[:start]
        return payloads


class FrameReader(Generic[FrameT]):
    """Reads frames of one direction from a stream."""

    def __init__(
        self, source: ByteSource, codec: Codec[FrameT], *, max_frame_bytes: int = MAX_FRAME_BYTES
    ) -> None:
        self._source = source
        self._codec = codec
        self._splitter = FrameSplitter(max_frame_bytes)
        self._payloads: deque[bytes] = deque()

    def allow(self, max_frame_bytes: int) -> None:
        """Accept frames up to this long from now on."""
        self._splitter.max_frame_bytes = max_frame_bytes

    async def read(self) -> FrameT | None:
        """The next frame, or ``None`` where the stream ends between two frames.

        Raises ``FramingError`` when it ends within one, or what was read is not a frame.
        """
        while not self._payloads:
            chunk = await self._source.read(READ_BYTES)
            if not chunk:
                if self._splitter.pending_bytes:
                    raise FramingError("the connection ended in the middle of a frame")
                return None
            self._payloads.extend(self._splitter.feed(chunk))
        return self._codec.decode(self._payloads.popleft())
