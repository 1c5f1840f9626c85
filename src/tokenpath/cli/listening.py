"""The socket that ``serve`` listens on, and the rule about who may be let near it.

The address is bound before anything slow happens, so that a port in use is known at once and not
after a model was downloaded. Connections are accepted only when there is somebody to answer them.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Literal

from tokenpath.protocol.errors import SpecError

_BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet; port 0 takes a free one.

    A name with several addresses is bound to its first IPv4 one, else to its first. Raises
    ``SpecError`` with one sentence that says what to do.
    """
    family, address = _resolve(host, port)
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Lets a restart take the port while old connections linger; a port on which somebody
        # listens is refused all the same.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family is socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _refusal(error, host, port) from error
    bound.setblocking(False)
    return bound


def listen(bound: socket.socket) -> None:
    """Begin to accept connections. Raises ``SpecError`` if another process was faster."""
    try:
        bound.listen(_BACKLOG)
    except OSError as error:
        host, port = bound.getsockname()[:2]
        raise _refusal(error, host, port) from error


def is_local(bound: socket.socket) -> bool:
    """Whether only this machine can reach the socket."""
    return ipaddress.ip_address(bound.getsockname()[0]).is_loopback


def check_exposure(
    bound: socket.socket, *, auth: Literal["keys", "none"], ever_created: bool
) -> None:
    """Refuse to let strangers in. Raises ``SpecError`` that says how to be allowed to.

    Without keys, by the spec's wish or because none was ever created, only this machine may reach
    the server.
    """
    if is_local(bound) or (auth == "keys" and ever_created):
        return
    address = bound.getsockname()[0]
    if auth == "none":
        raise SpecError(
            f"with auth 'none' the server may listen on loopback addresses only, not on {address}; "
            "use auth 'keys' and `tokenpath keys create NAME`, or --host 127.0.0.1"
        )
    raise SpecError(
        f"no API key was ever created, so the server may listen on loopback addresses only, not on "
        f"{address}; create a key with `tokenpath keys create NAME`, or use --host 127.0.0.1"
    )


def url(bound: socket.socket) -> str:
    """A URL by which this machine reaches the socket."""
    host, port = bound.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        host = "127.0.0.1"
    elif address.version == 6:  # noqa: PLR2004 - the version's number is its name
        host = f"[{host}]"
    return f"http://{host}:{port}"


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[object, ...]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise SpecError(
            f"the host {host!r} is no address of this machine and cannot be resolved to one; "
            "use --host 127.0.0.1 for this machine only, 0.0.0.0 for every address"
        ) from error
    found.sort(key=lambda entry: entry[0] is not socket.AF_INET)
    return found[0][0], found[0][4]


def _refusal(error: OSError, host: str, port: int) -> SpecError:
    match error.errno:
        case errno.EADDRINUSE:
            return SpecError(
                f"port {port} on {host} is in use; stop the program that listens there "
                f"(`ss -ltnp sport = :{port}` names it), or take another port with --port"
            )
        case errno.EACCES | errno.EPERM:
            return SpecError(
                f"this user may not listen on port {port}; take a port above 1023 with --port"
            )
        case errno.EADDRNOTAVAIL:
            return SpecError(
                f"this machine has no address {host}; use --host 127.0.0.1 for this machine only, "
                "0.0.0.0 for every address"
            )
    return SpecError(f"cannot listen on {host} port {port}: {error.strerror or error}")
