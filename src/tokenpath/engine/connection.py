"""One gateway's connection as the engine process sees it: handshake, reading, bounded sending.

A peer proves itself with its first frame, ``Hello``, within a few seconds and a few kilobytes;
until then it can cost the engine nothing. What is sent waits in the transport's buffer, and a
gateway that reads so slowly that the buffer passes its bound loses the connection, and with it
its requests, rather than the engine its memory.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from typing import Final

from tokenpath.protocol.framing import FrameReader, FramingError, encode, to_replica_codec
from tokenpath.protocol.link import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    FromReplica,
    Hello,
    ToReplica,
)

HELLO_TIMEOUT_S: Final = 5.0
MAX_HELLO_BYTES: Final = 4096
MAX_SEND_BUFFER_BYTES: Final = 8 * 1024 * 1024
"""Unsent bytes of one connection. A token without logprobs takes about 70, so this is minutes of
output of a full batch."""

log = logging.getLogger("tokenpath.engine")


class Connection:
    """A gateway that has, or has not yet, said hello."""

    def __init__(
        self,
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        max_send_buffer_bytes: int = MAX_SEND_BUFFER_BYTES,
    ) -> None:
        self.number = number
        """Never used again while the process lives."""
        self._frames = FrameReader(reader, to_replica_codec(), max_frame_bytes=MAX_HELLO_BYTES)
        self._writer = writer
        self._max_send_buffer_bytes = max_send_buffer_bytes

    async def handshake(self, token: str) -> bool:
        """Exchange hellos. False, with a log line saying why, if the peer is not to be served.

        Nothing is said to a peer without the token. One with the token but another version is
        told ours, so that it can name the mismatch.
        """
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await self._frames.read()
        except TimeoutError:
            return self._refuse("it did not say hello in time")
        except FramingError as error:
            return self._refuse(str(error))
        if hello is None:
            return self._refuse("it closed without saying hello")
        if not isinstance(hello, Hello):
            return self._refuse("its first frame was not a hello")
        if not hmac.compare_digest(hello.token.encode(), token.encode()):
            return self._refuse("its token is wrong")
        self.send(Hello(version=PROTOCOL_VERSION, token=token))
        if hello.version != PROTOCOL_VERSION:
            return self._refuse(f"it speaks version {hello.version}, not {PROTOCOL_VERSION}")
        self._frames.allow(MAX_FRAME_BYTES)
        return True

    async def read(self) -> ToReplica | None:
        """The next frame, None at the end. Raises ``FramingError`` and ``OSError``."""
        return await self._frames.read()

    def send(self, frame: FromReplica) -> None:
        """Queue a frame. Over the bound, or on a connection that is going, it is dropped."""
        if self._writer.is_closing():
            return
        try:
            data = encode(frame)
        except Exception:
            # The gateway would wait for ever for what was in it; a lost link it can handle.
            log.exception("a frame for gateway connection %d cannot be encoded", self.number)
            self._writer.transport.abort()
            return
        self._writer.write(data)
        waiting = self._writer.transport.get_write_buffer_size()
        if waiting > self._max_send_buffer_bytes:
            log.warning(
                "gateway connection %d reads too slowly: %d bytes wait for it; closing it",
                self.number,
                waiting,
            )
            self._writer.transport.abort()

    async def close(self, timeout_s: float) -> None:
        """Close after what is queued has been sent, or at once when that takes too long."""
        self._writer.close()
        try:
            async with asyncio.timeout(timeout_s):
                await self._writer.wait_closed()
        except TimeoutError:
            self._writer.transport.abort()
        except OSError:
            log.debug("gateway connection %d had already gone", self.number)

    def _refuse(self, why: str) -> bool:
        log.warning("refused gateway connection %d: %s", self.number, why)
        return False
