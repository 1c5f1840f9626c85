"""Who is asking, and may they?

A server is *closed* as soon as a key was ever created, and *open* before that or with
``auth: none``. An open server listens on loopback addresses only, but that alone does not keep
strangers out: a web page in the user's own browser can send requests to localhost, either plainly
(they carry the page's ``Origin``) or by pointing a name of its own at 127.0.0.1 (DNS rebinding:
they carry that name as ``Host``). An open server therefore answers only requests that name it by a
loopback name and come from no foreign page.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol
from urllib.parse import urlsplit

from tokenpath.protocol.errors import AuthenticationError, PermissionDeniedError, UnavailableError
from tokenpath.store.keys import PREFIX_CHARACTERS, KeySnapshot, ValidKey, key_hash

_MAX_KEY_CHARACTERS = 200
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Identity:
    """The caller."""

    key_id: str | None
    """None for anybody on this machine, when the server is open."""
    name: str
    admin: bool = False
    """Whether the caller may operate the server."""


ANONYMOUS = Identity(key_id=None, name="anonymous")


class KeySource(Protocol):
    """Where the keys are; ``store.watcher.KeyWatcher`` in a server."""

    def current(self) -> KeySnapshot:
        """The keys now. Raises ``UnavailableError``; must not block."""
        ...

    def used(self, key_id: int) -> None:
        """A key was used."""
        ...


class Authenticator:
    """Decides who a request is from. Does no I/O, so it may be called on the event loop."""

    def __init__(self, keys: KeySource | None, *, mode: Literal["keys", "none"] = "keys") -> None:
        """``keys`` may be None with mode ``none``, which never looks at them."""
        self._keys = keys if mode == "keys" else None
        if mode == "keys" and keys is None:
            raise ValueError("mode 'keys' needs a source of keys")

    def authenticate(self, headers: Mapping[str, str]) -> Identity:
        """The caller's identity. Header names are looked up in lower case.

        Raises ``AuthenticationError`` (401) without a valid key where one is needed,
        ``PermissionDeniedError`` (403) for a browser's request from a foreign page to an open
        server, and ``UnavailableError`` (503) when the keys cannot be read.
        """
        snapshot = self._snapshot()
        if snapshot is None or not snapshot.ever_created:
            check_local(headers)
            return ANONYMOUS
        key = _find(_presented(headers), snapshot)
        if self._keys is not None:
            self._keys.used(key.key_id)
        return Identity(key_id=str(key.key_id), name=key.name, admin=key.admin)

    def _snapshot(self) -> KeySnapshot | None:
        if self._keys is None:
            return None
        try:
            return self._keys.current()
        except UnavailableError as error:
            # The cause names files on this machine, which is for its log only.
            raise UnavailableError(
                "API keys cannot be checked at the moment; try again later", retry_after_s=1.0
            ) from error


def _presented(headers: Mapping[str, str]) -> str:
    """The key that a request carries, or an empty text."""
    scheme, _, credentials = headers.get("authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip()
    return headers.get("x-api-key", "").strip()


def _find(secret: str, snapshot: KeySnapshot) -> ValidKey:
    if len(secret) <= _MAX_KEY_CHARACTERS:
        presented = key_hash(secret)
        for key in snapshot.valid.get(secret[:PREFIX_CHARACTERS], ()):
            if hmac.compare_digest(presented, key.sha256):
                return key
    # One sentence for a missing, an unknown and a revoked key, so that it tells nothing.
    raise AuthenticationError(
        "a valid API key is required: send it as 'Authorization: Bearer YOUR_KEY' "
        "or in the X-Api-Key header"
    )


def check_local(headers: Mapping[str, str]) -> None:
    """Refuse what did not come from this machine's own programs. Raises PermissionDeniedError."""
    host = headers.get("host", "")
    if not is_loopback(_host_name(f"//{host}")):
        raise PermissionDeniedError(
            f"this server has no API keys and answers only to localhost, not to Host "
            f"{host[:_SHOWN_CHARACTERS]!r}; {HOW_TO_OPEN}"
        )
    origin = headers.get("origin")
    if origin is not None and not is_loopback(_host_name(origin)):
        raise PermissionDeniedError(
            f"this server has no API keys and answers no web page from elsewhere, such as "
            f"{origin[:_SHOWN_CHARACTERS]!r}; {HOW_TO_OPEN}"
        )


HOW_TO_OPEN = "create a key with `tokenpath keys create NAME` to let others in"


def _host_name(url: str) -> str:
    """The host of a URL or of ``//host:port``; empty if there is none."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    # ``user@localhost`` is no host header; the part before the @ could hide anything.
    return "" if "@" in parts.netloc else parts.hostname or ""


def is_loopback(host: str) -> bool:
    """Whether a host, as a name or an address, can only mean this machine.

    Names are not resolved: whoever answers for a name could answer 127.0.0.1.
    """
    name = host.lower().removesuffix(".").removeprefix("[").removesuffix("]")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
