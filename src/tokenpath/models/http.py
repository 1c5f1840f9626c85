"""The HTTP client with which weights are fetched."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path

import httpx

_CONNECT_TIMEOUT_S = 15.0
_READ_TIMEOUT_S = 60.0


def open_client(
    *, cert: str | None = None, proxy: str | None = None, headers: Mapping[str, str] | None = None
) -> httpx.Client:
    """A client that follows redirects and waits for slow servers, but not for ever.

    ``cert`` is a PEM file of the authorities to believe instead of the usual ones; ``proxy`` one
    to use instead of the environment's. Close it after use.
    """
    return httpx.Client(
        verify=_ssl_context(cert),
        proxy=proxy,
        headers=headers,
        follow_redirects=True,
        timeout=httpx.Timeout(_READ_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S),
    )


def _ssl_context(cert: str | None) -> ssl.SSLContext:
    if cert:
        return ssl.create_default_context(cafile=Path(cert).expanduser())
    # SSL_CERT_FILE or SSL_CERT_DIR where set, else httpx's own certificates; and the system's
    # store, in which companies put theirs and which pip reads too.
    context = httpx.create_ssl_context()
    context.load_default_certs()
    return context
