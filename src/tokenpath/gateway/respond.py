"""Sending: a JSON body at once, or a stream whose head waits for the first real output."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import Send

Headers = Iterable[tuple[bytes, bytes]]

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
"""The last one tells nginx not to collect the stream."""


async def send_json(send: Send, body: bytes, *, status: int = 200, headers: Headers = ()) -> None:
    """Send a whole JSON answer."""
    head = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        *headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class EventStream:
    """A stream of server-sent events that commits to status 200 with its first bytes."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def write(self, events: bytes) -> None:
        """Send encoded events; waits while the client reads slowly."""
        await self._put(events, more=True)

    async def close(self, events: bytes) -> None:
        """Send the last events and end the response."""
        await self._put(events, more=False)

    async def _put(self, events: bytes, *, more: bool) -> None:
        if not self.started:
            self.started = True
            await self._send(
                {"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)}
            )
        await self._send({"type": "http.response.body", "body": events, "more_body": more})
