"""Reading a request's body: never more than the limit, never longer than the time for it."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.datastructures import Headers
from starlette.types import Receive

from tokenpath.protocol.errors import (
    BodyTooLargeError,
    CancelledError,
    InvalidRequestError,
    SlowBodyError,
)

BODY_S = 60.0
"""How long a body may take to arrive: 4 MB at half a megabit a second."""
_JSON = ("application/json", "text/json")

DISCARDED_BYTES = 64 << 20
DISCARDED_S = 2.0
"""How much, and for how long, is read of a body that is too large anyway. Many clients look for the
answer only when they have sent everything, and find a broken pipe if the server has hung up."""


async def read_body(
    receive: Receive, headers: Headers, *, limit_bytes: int, seconds: float = BODY_S
) -> bytes:
    """The whole body of a JSON request.

    Raises ``BodyTooLargeError`` if the announced length is beyond the limit or as soon as it is
    crossed, having kept nothing of it; ``SlowBodyError`` after ``seconds``; ``CancelledError`` if
    the client leaves; ``InvalidRequestError`` for another content type than JSON (a browser's form
    could be sent to a local server by any page).
    """
    _check_type(headers.get("content-type"))
    # Who waits for "100 Continue" gets the refusal instead and has not sent anything.
    patient = "100-continue" in headers.get("expect", "").lower()
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit_bytes:
        if not patient:
            await _discard(receive)
        raise _too_large(limit_bytes)
    try:
        async with asyncio.timeout(seconds):
            return await _collect(receive, limit_bytes)
    except TimeoutError:
        raise SlowBodyError(
            f"The body did not arrive within {seconds:g} s.",
        ) from None


async def _collect(receive: Receive, limit_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CancelledError("The client went away while sending its request.")
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit_bytes:
            chunks.clear()
            await _discard(receive)
            raise _too_large(limit_bytes)
        if chunk:
            chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def _discard(receive: Receive) -> None:
    """Read what still comes of a body, within bounds, and keep none of it."""
    left = DISCARDED_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARDED_S):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def _too_large(limit_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"The body is larger than the {limit_bytes} bytes it may have.")


def _check_type(content_type: str | None) -> None:
    if content_type is None:
        return
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in _JSON and not kind.endswith("+json"):
        raise InvalidRequestError("The Content-Type must be application/json.")
