"""Server-sent events from prebuilt pieces: per chunk only what changes is encoded.

A chunk's beginning (id, object, created, model) is the same for a whole stream and is encoded once.
"""

from __future__ import annotations

import msgspec

from tokenpath.gateway.openai.answers import usage_object
from tokenpath.gateway.openai.errors import error_body
from tokenpath.protocol.errors import TokenpathError
from tokenpath.protocol.events import Usage

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keep-alive\n\n"
"""A comment: clients skip it, proxies see traffic."""

_encode = msgspec.json.encode


class Frame:
    """The fixed parts of one stream's chunks."""

    def __init__(
        self, *, call_id: str, kind: str, created: int, model: str, include_usage: bool
    ) -> None:
        head = {"id": call_id, "object": kind, "created": created, "model": model}
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._include_usage = include_usage

    def event(self, choice: bytes) -> bytes:
        """One chunk with one choice, given as JSON."""
        return self._head + choice + self._tail

    def closing(self, usage: Usage, reasoning_tokens: int | None = None) -> bytes:
        """The usage chunk, if asked for, and the end mark."""
        if not self._include_usage:
            return DONE
        counts = _encode(usage_object(usage, reasoning_tokens))
        return self._head + b'],"usage":' + counts + b"}\n\n" + DONE


def error_event(error: TokenpathError) -> bytes:
    """An error inside a stream, after which nothing follows."""
    return b"data: " + error_body(error) + b"\n\n"
