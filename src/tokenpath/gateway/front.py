"""The outermost layer: every HTTP call gets an id, a record, and an answer in OpenAI's error form.

A pure ASGI middleware: it wraps ``send`` to add headers and note the status, turns whatever the
inside raises into an error answer, and when all is over writes the log line and the metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenpath.gateway.call import CALL_KEY, Call
from tokenpath.gateway.openai.errors import error_body, error_headers
from tokenpath.gateway.respond import send_json
from tokenpath.observe.log import log_crash, log_request
from tokenpath.observe.metrics import Metrics
from tokenpath.protocol.errors import (
    CancelledError,
    EngineError,
    InvalidRequestError,
    MethodNotAllowedError,
    NotFoundError,
    SlowBodyError,
    TokenpathError,
)

_NOT_FOUND = 404
_NOT_ALLOWED = 405
_SERVER_ERROR = 500


class Front:
    """Wraps the routes."""

    def __init__(self, app: ASGIApp, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._app = app
        self._metrics = metrics
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = Call.of(scope, self._clock)
        scope[CALL_KEY] = call
        send = _noting(send, call)
        self._metrics.request_began()
        try:
            await self._app(scope, receive, send)
        except HTTPException as error:
            await _refuse(scope, send, call, error)
        except TokenpathError as error:
            await _fail(send, call, error)
        except asyncio.CancelledError:
            call.error = CancelledError("The server ended the call.")
            raise
        except Exception as error:  # noqa: BLE001 (the server goes on, whatever one call does)
            log_crash(call.rid, error)
            await _fail(send, call, EngineError("The server failed to handle the request."))
        finally:
            record = call.close()
            self._metrics.request_ended(record)
            log_request(record, quiet=call.quiet)


def _noting(send: Send, call: Call) -> Send:
    """``send`` with the headers of every answer, noting the status in the call."""

    async def noting(message: Message) -> None:
        if message["type"] == "http.response.start":
            call.status = message["status"]
            message["headers"] = [
                *message.get("headers", ()),
                (b"x-request-id", call.rid.encode()),
                (b"server", b"tokenpath"),
            ]
        await send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            call.answered = True

    return noting


async def _fail(send: Send, call: Call, error: TokenpathError) -> None:
    """Answer with an error, unless the answer has begun or nobody is there to read it."""
    call.error = error
    if error.http_status >= _SERVER_ERROR and error.__cause__ is not None:
        log_crash(call.rid, error.__cause__)
    if call.status is not None or isinstance(error, CancelledError):
        return
    headers = error_headers(error)
    if isinstance(error, SlowBodyError):
        headers.append((b"connection", b"close"))
    await send_json(send, error_body(error), status=error.http_status, headers=headers)


async def _refuse(scope: Scope, send: Send, call: Call, refusal: HTTPException) -> None:
    """Answer for a path or method that no route takes."""
    allow = (refusal.headers or {}).get("Allow", "")
    if refusal.status_code == _NOT_ALLOWED and scope["method"] == "OPTIONS":
        head = [(b"allow", f"{allow}, OPTIONS".encode())]
        await send({"type": "http.response.start", "status": 204, "headers": head})
        await send({"type": "http.response.body", "body": b""})
        return
    error: TokenpathError
    headers: list[tuple[bytes, bytes]] = []
    if refusal.status_code == _NOT_FOUND:
        error = NotFoundError("There is nothing at this path; GET /docs lists what there is.")
    elif refusal.status_code == _NOT_ALLOWED:
        error = MethodNotAllowedError(f"This path takes {allow} only.")
        headers.append((b"allow", allow.encode()))
    else:
        error = InvalidRequestError(str(refusal.detail))
    call.error = error
    await send_json(send, error_body(error), status=error.http_status, headers=headers)
