"""A small HTTP/1.1 client for streams: it must be cheaper than any server it measures.

A general client spends several times a stream's own work on objects per chunk. This one hands
the bytes of a body to a sink with the moment they arrived, right in the event loop's callback, so
that a busy generator cannot make a server look slow by queueing its answers. Connections are kept
and reused; each carries one exchange at a time, and abandoning an exchange closes its connection,
which a server sees as the client going away. Proxies are not used and redirects not followed.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import httptools

from tokenpath.protocol.errors import SpecError

_DEFAULT_PORTS = {"http": 80, "https": 443}


class ConnectFailedError(Exception):
    """No connection could be made; the message says why."""


class DisconnectedError(Exception):
    """The connection ended before the response did; the message says where."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A base URL, taken apart."""

    scheme: str
    host: str
    port: int
    base_path: str
    """Without a slash at its end."""

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Read a base URL such as ``http://127.0.0.1:8000/v1``. Raises ``SpecError``."""
        wanted = "it must look like http://127.0.0.1:8000/v1"
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise SpecError(f"the URL {url!r} is wrong ({error}); {wanted}") from error
        if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
            raise SpecError(f"the URL {url!r} has no http:// or https:// and host; {wanted}")
        if parts.username is not None or parts.query or parts.fragment:
            raise SpecError(f"the URL must have no user, query or fragment; {wanted}")
        if not re.fullmatch(r"[!-~]*", parts.netloc + parts.path):
            raise SpecError(f"the URL {url!r} has spaces or characters to escape; {wanted}")
        return cls(
            parts.scheme,
            parts.hostname,
            port if port is not None else _DEFAULT_PORTS[parts.scheme],
            parts.path.rstrip("/"),
        )

    @property
    def url(self) -> str:
        """The base URL, written again."""
        return f"{self.scheme}://{self.authority}{self.base_path}"

    @property
    def authority(self) -> str:
        """Host and port as the ``Host`` header wants them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Sink(Protocol):
    """Takes a response as it arrives, inside the event loop's callback: it must be quick."""

    def head(self, status: int, content_type: str) -> None:
        """Take the status line and headers."""
        ...

    def body(self, data: bytes, at: float) -> None:
        """Take some bytes of the body, read from the socket at ``at`` on the client's clock."""
        ...


class _Connection(asyncio.Protocol):
    """One connection; the parser calls it back while it is fed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._sink: Sink | None = None
        self._done: asyncio.Future[None] | None = None
        self._content_type = ""
        self._ends_with_connection = False
        self._read_at = 0.0
        self.response_begun = False
        self.reusable = False

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def start(self, request: bytes, sink: Sink) -> asyncio.Future[None]:
        """Send a request; the future ends with the response."""
        if self._transport is None:
            raise DisconnectedError("the connection is closed")
        self._parser = httptools.HttpResponseParser(self)
        self._sink = sink
        self._done = asyncio.get_running_loop().create_future()
        self._content_type = ""
        self._ends_with_connection = True
        self.response_begun = self.reusable = False
        self._transport.write(request)
        return self._done

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._read_at = self._clock()
        if self._parser is None:  # bytes that no request asked for
            self.abort()
            return
        self.response_begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(DisconnectedError(f"the response is not HTTP/1.1: {error}"))
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self.response_begun and self._ends_with_connection and exc is None:
            self.on_message_complete()
            return
        if exc is not None and not isinstance(exc, ConnectionError):
            self._fail(DisconnectedError(f"the connection broke: {exc}"))
        where = "inside the response" if self.response_begun else "before any response"
        self._fail(DisconnectedError(f"the server closed the connection {where}"))

    # httptools' side

    def on_header(self, name: bytes, value: bytes) -> None:
        lowered = name.lower()
        if lowered == b"content-type":
            self._content_type = value.decode("latin-1")
        elif lowered in {b"content-length", b"transfer-encoding"}:
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        assert self._sink is not None
        self._sink.head(self._parser.get_status_code(), self._content_type)

    def on_body(self, body: bytes) -> None:
        assert self._sink is not None
        self._sink.body(body, self._read_at)

    def on_message_complete(self) -> None:
        if self._parser is None:
            return
        self.reusable = self._parser.should_keep_alive()
        self._parser = None
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class Client:
    """Exchanges with one endpoint over a pool of kept connections.

    Used from one event loop. ``clock`` gives seconds and stamps what arrives. Raises ``SpecError``
    for an API key that cannot be a header.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        api_key: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._tls: ssl.SSLContext | None = None
        if endpoint.scheme == "https":
            self._tls = tls or ssl.create_default_context()
        self._idle: list[_Connection] = []
        self.connections_opened = 0
        headers = [
            f"Host: {endpoint.authority}",
            "User-Agent: tokenpath-bench",
            "Accept-Encoding: identity",
        ]
        if api_key is not None:
            if not re.fullmatch(r"[!-~]+", api_key):
                raise SpecError("the API key is empty or holds blanks or non-ASCII characters")
            headers.append(f"Authorization: Bearer {api_key}")
        self._headers = "".join(f"{header}\r\n" for header in headers)

    async def post(self, path: str, body: bytes, sink: Sink) -> None:
        """Send a JSON body to ``path`` below the base URL and return when the response ended.

        Cancelling it closes the connection. Raises ``ConnectFailedError``, ``DisconnectedError``.
        """
        head = (
            f"POST {self._endpoint.base_path}{path} HTTP/1.1\r\n{self._headers}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        await self._exchange(head.encode("latin-1") + body, sink)

    async def get(self, path: str, sink: Sink) -> None:
        """Fetch ``path`` below the base URL; as ``post``."""
        head = f"GET {self._endpoint.base_path}{path} HTTP/1.1\r\n{self._headers}\r\n"
        await self._exchange(head.encode("latin-1"), sink)

    def close(self) -> None:
        """Close the kept connections."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _exchange(self, request: bytes, sink: Sink) -> None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.open:
                continue
            try:
                await self._run(connection, request, sink)
            except DisconnectedError:
                # A server may close a kept connection at the very moment it is used again; what
                # got no byte of an answer was not served and can be sent anew.
                if connection.response_begun:
                    raise
                continue
            return
        await self._run(await self._connect(), request, sink)

    async def _run(self, connection: _Connection, request: bytes, sink: Sink) -> None:
        try:
            await connection.start(request, sink)
        except BaseException:
            connection.abort()
            raise
        if connection.reusable and connection.open:
            self._idle.append(connection)
        else:
            connection.abort()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: _Connection(self._clock),
                self._endpoint.host,
                self._endpoint.port,
                ssl=self._tls,
            )
        except ssl.SSLError as error:
            raise ConnectFailedError(f"TLS failed: {error.reason or error}") from error
        except socket.gaierror as error:
            raise ConnectFailedError(f"the host {self._endpoint.host} is not known") from error
        except OSError as error:
            # Event loops put words of their own into strerror; the system's are known to people.
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise ConnectFailedError(reason) from error
        self.connections_opened += 1
        return connection
