"""One streamed answer, watched as its bytes arrive: the moments that every figure comes from."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass

import msgspec

from tokenpath.bench import wire
from tokenpath.bench.sse import EventSplitter

_ERROR_BODY_BYTES = 64 * 1024
_HTTP_OK = 200


class ErrorKind(enum.StrEnum):
    """What went wrong with a request, as the client can tell."""

    CONNECT = "connect"
    """No connection."""
    DISCONNECT = "disconnect"
    """The connection ended inside the exchange."""
    TIMEOUT = "timeout"
    """Not finished within ``--timeout-s``."""
    STATUS = "status"
    """An HTTP status other than 200."""
    STREAM = "stream"
    """An error event after the stream had begun."""
    TRUNCATED = "truncated"
    """The response ended without a finish reason or ``[DONE]``."""
    MALFORMED = "malformed"
    """Status 200, but not the stream that the API promises."""


@dataclass(frozen=True, slots=True)
class RequestError:
    """Why a request failed; equal ones are counted together (without ``message``)."""

    kind: ErrorKind
    status: int | None = None
    code: str | None = None
    message: str = ""


class Observation:
    """A sink that takes one response. All times are seconds on the client's clock.

    An *output event* is one that carries tokens: text, reasoning, tool calls or token ids. A chunk
    with only a role, a finish reason or usage is none.
    """

    __slots__ = (
        "_body",
        "_splitter",
        "_streaming",
        "done",
        "error",
        "finish_reason",
        "first_output_at",
        "gaps",
        "last_output_at",
        "output_events",
        "status",
        "usage",
    )

    def __init__(self) -> None:
        self._splitter = EventSplitter()
        self._body = bytearray()
        self._streaming = False
        self.status: int | None = None
        self.first_output_at: float | None = None
        self.last_output_at: float | None = None
        self.output_events = 0
        self.gaps = array("d")
        """Between each output event and the one before it; 0 for events of one read."""
        self.finish_reason: str | None = None
        self.usage: wire.Usage | None = None
        self.done = False
        self.error: RequestError | None = None

    def head(self, status: int, content_type: str) -> None:
        """Take the status and decide how to read the body."""
        self.status = status
        self._streaming = status == _HTTP_OK and content_type.startswith("text/event-stream")

    def body(self, data: bytes, at: float) -> None:
        """Take bytes that were read at ``at``."""
        if not self._streaming:
            if len(self._body) < _ERROR_BODY_BYTES:
                self._body += data
            return
        for event in self._splitter.feed(data):
            if event == wire.DONE:
                self.done = True
            elif self.error is None:
                self._take(event, at)

    def finish(self) -> None:
        """Judge the response once it ended; sets ``error`` when it was not a whole answer."""
        if self.error is not None:
            return
        if self.status != _HTTP_OK:
            found = wire.error_of(bytes(self._body))
            code = found.code if found.code is not None else found.type
            self.error = RequestError(
                ErrorKind.STATUS,
                self.status,
                None if code is None else str(code)[:64],
                found.message,
            )
        elif not self._streaming:
            self.error = RequestError(
                ErrorKind.MALFORMED, _HTTP_OK, message="the answer is not a text/event-stream"
            )
        elif self.finish_reason is None and not self.done:
            self.error = RequestError(
                ErrorKind.TRUNCATED, _HTTP_OK, message="the stream ended without a finish reason"
            )

    def _take(self, event: bytes, at: float) -> None:
        try:
            chunk = wire.decode_chunk(event)
        except msgspec.MsgspecError as error:
            self.error = RequestError(
                ErrorKind.MALFORMED, self.status, message=f"an event is no chunk: {error}"
            )
            return
        if chunk.error is not None:
            self._take_error(chunk.error)
            return
        if chunk.usage is not None:
            self.usage = chunk.usage
        self.finish_reason = chunk.finish_reason or self.finish_reason
        if not chunk.carries_tokens:
            return
        self.output_events += 1
        if self.last_output_at is None:
            self.first_output_at = at
        else:
            self.gaps.append(at - self.last_output_at)
        self.last_output_at = at

    def _take_error(self, error: wire.ApiError | str) -> None:
        if isinstance(error, str):
            error = wire.ApiError(message=error)
        code = error.code if error.code is not None else error.type
        self.error = RequestError(
            ErrorKind.STREAM, self.status, None if code is None else str(code)[:64], error.message
        )
