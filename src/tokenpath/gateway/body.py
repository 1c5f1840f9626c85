"""Reading a request's body: never more than the limit, never longer than the time for it."""

from __future__ import annotations

import asyncio

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


async def read_body(
    receive: Receive, headers: Headers, *, limit_bytes: int, seconds: float = BODY_S
) -> bytes:
    """The whole body of a JSON request.

    Raises ``BodyTooLargeError`` before reading if the announced length is beyond the limit, and
    else as soon as it is crossed; ``SlowBodyError`` after ``seconds``; ``CancelledError`` if the
    client leaves; ``InvalidRequestError`` for another content type than JSON (a browser's form
    could be sent to a local server by any page).
    """
    _check_type(headers.get("content-type"))
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit_bytes:
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
            raise _too_large(limit_bytes)
        if chunk:
            chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(limit_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"The body is larger than the {limit_bytes} bytes it may have.")


def _check_type(content_type: str | None) -> None:
    if content_type is None:
        return
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in _JSON and not kind.endswith("+json"):
        raise InvalidRequestError("The Content-Type must be application/json.")
