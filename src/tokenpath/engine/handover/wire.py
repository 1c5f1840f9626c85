"""Frames over a blocking socket: each connection has a thread that does nothing else.

Every call has a limit of time, so that a peer that falls silent costs a thread some seconds and no
more. ``close`` may be called from another thread, and wakes whoever waits.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from tokenpath.config.launch import Address, UnixAddress
from tokenpath.protocol.framing import Codec, FramingError

Bytes = npt.NDArray[np.uint8]
HEADER_BYTES: Final = 4
_BACKLOG: Final = 64
_FAREWELL_READS: Final = 256
_FAREWELL_BYTES: Final = 65536
FrameT = TypeVar("FrameT")


class WireError(Exception):
    """The peer is gone, silent or does not keep to the protocol; the message says which."""


class Wire(Generic[FrameT]):
    """One connection, from which frames of one direction are read."""

    def __init__(self, connection: socket.socket, codec: Codec[FrameT]) -> None:
        self._socket = connection
        self._codec = codec
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, frame: object, *, timeout_s: float, payload: Bytes | None = None) -> None:
        """Send a frame, and plain bytes behind it. Raises ``WireError``."""
        buffer = bytearray(HEADER_BYTES)
        self._encoder.encode_into(frame, buffer, HEADER_BYTES)
        buffer[:HEADER_BYTES] = (len(buffer) - HEADER_BYTES).to_bytes(HEADER_BYTES, "big")
        with _as_wire_errors():
            self._socket.settimeout(timeout_s)
            self._socket.sendall(buffer)
            if payload is not None:
                self._socket.sendall(payload.data)

    def receive(self, *, timeout_s: float, most_bytes: int) -> FrameT:
        """The next frame. Raises ``WireError``, also where the peer has closed."""
        header = bytearray(HEADER_BYTES)
        self._fill(memoryview(header), timeout_s)
        length = int.from_bytes(header, "big")
        if length > most_bytes:
            raise WireError(f"a frame of {length} bytes is longer than the {most_bytes} allowed")
        frame = bytearray(length)
        self._fill(memoryview(frame), timeout_s)
        try:
            return self._codec.decode(bytes(frame))
        except FramingError as error:
            raise WireError("it sent something that is no frame of a handover") from error

    def receive_into(self, row: Bytes, *, timeout_s: float) -> None:
        """Read plain bytes. Raises ``WireError``."""
        self._fill(row.data, timeout_s)

    def send_descriptor(self, descriptor: int, *, timeout_s: float) -> None:
        """Let the peer, a process of this machine, use an open file. Raises ``WireError``."""
        with _as_wire_errors():
            self._socket.settimeout(timeout_s)
            socket.send_fds(self._socket, [b"\0"], [descriptor])

    def receive_descriptor(self, *, timeout_s: float) -> int:
        """An open file of the peer's, to be closed here. Raises ``WireError``."""
        if self._socket.family != socket.AF_UNIX:
            raise WireError("memory can be shared over a Unix socket only")
        with _as_wire_errors():
            self._socket.settimeout(timeout_s)
            _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        if len(descriptors) != 1:
            raise WireError("it announced memory and sent none")
        os.set_inheritable(descriptors[0], False)
        return descriptors[0]

    @property
    def spoken_to(self) -> bool:
        """Whether there is something to read: of a peer that has nothing to say, its end."""
        with contextlib.suppress(OSError, ValueError):
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(0))
        return True

    def close_gently(self, *, within_s: float) -> None:
        """End the connection so that the last frame arrives although the peer still sends.

        What lies unread when a connection is closed would have the peer's side reset.
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(within_s)
            for _ in range(_FAREWELL_READS):
                if not self._socket.recv(_FAREWELL_BYTES):
                    break
        self.close()

    def close(self) -> None:
        """End the connection; from any thread, and more than once."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._socket.close()

    def _fill(self, rest: memoryview, timeout_s: float) -> None:
        with _as_wire_errors():
            self._socket.settimeout(timeout_s)
            while rest:
                count = self._socket.recv_into(rest)
                if count == 0:
                    raise WireError("it closed the connection")
                rest = rest[count:]


def connect(address: Address, tls: ssl.SSLContext | None, *, timeout_s: float) -> socket.socket:
    """A connection to a replica that prefills. Raises ``WireError``."""
    with _as_wire_errors():
        if isinstance(address, UnixAddress):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.settimeout(timeout_s)
                connection.connect(str(address.path))
            except OSError:
                connection.close()
                raise
            return connection
        plain = socket.create_connection((address.host, address.port), timeout_s)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is None:
                return plain
            return tls.wrap_socket(plain, server_hostname=address.host)
        except OSError:
            plain.close()
            raise


def listen(address: Address) -> socket.socket:
    """A listening socket. Raises ``OSError``."""
    if isinstance(address, UnixAddress):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(address.path))
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    return socket.create_server((address.host, address.port), family=family, backlog=_BACKLOG)


@contextlib.contextmanager
def _as_wire_errors() -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise WireError("it did not answer in time") from error
    except ssl.SSLCertVerificationError as error:
        why = f"its certificate is not to be believed: {error.verify_message}"
        raise WireError(why) from error
    except (OSError, ValueError) as error:  # ValueError: closed here, by another thread
        reason = getattr(error, "strerror", None) or str(error)
        raise WireError(f"the connection failed: {reason}") from error
