"""What an engine process is told at its start, and where a replica link can be found.

The launch order crosses to the new process as JSON on its standard input (or in a file), never in
its arguments, which every user of the machine can read. The link's shared secret is not even in
here: it travels in the environment variable ``LINK_TOKEN_VARIABLE``.
"""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from tokenpath.config.spec import EngineSettings
from tokenpath.protocol.errors import SpecError

MAX_PORT: Final = 65535
LINK_TOKEN_VARIABLE: Final = "TOKENPATH_LINK_TOKEN"  # noqa: S105 - a name, not a secret

EXIT_OK: Final = 0
EXIT_BROKEN: Final = 70
EXIT_STUCK: Final = 71
"""Exit codes of an engine process; ``engine.server`` explains them."""


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix socket; the folder around it decides who may connect."""

    path: Path

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A port on this or another machine."""

    host: str
    port: int

    def __str__(self) -> str:
        return (
            f"tcp:[{self.host}]:{self.port}" if ":" in self.host else f"tcp:{self.host}:{self.port}"
        )

    @property
    def is_loopback(self) -> bool:
        """Whether bytes sent there stay on this machine."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


Address = UnixAddress | TcpAddress


def parse_address(text: str) -> Address:
    """Read ``unix:PATH`` or ``tcp:HOST:PORT`` (an IPv6 host in brackets). Raises ``SpecError``."""
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and rest:
        return UnixAddress(Path(rest))
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and host and port.isascii() and port.isdigit() and int(port) <= MAX_PORT:
        return TcpAddress(host.removeprefix("[").removesuffix("]"), int(port))
    raise SpecError(f"'{text}' is no link address; it is unix:PATH or tcp:HOST:PORT")


class ServerTls(BaseModel):
    """How the listening side of a link proves itself, and whom it believes."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    cert: Path
    """PEM certificate chain."""
    key: Path
    """PEM private key."""
    client_ca: Path | None = None
    """Accept only clients with a certificate signed by this. None: the token alone decides."""

    def context(self) -> ssl.SSLContext:
        """Raises ``SpecError`` if a file is missing or is no certificate or key."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        _load(context, self.cert, self.key, self.client_ca)
        if self.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context


class ClientTls(BaseModel):
    """How the connecting side checks the other, and proves itself where asked."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    ca: Path | None = None
    """Believe certificates signed by this. None: by the system's authorities."""
    cert: Path | None = None
    """PEM certificate chain to show."""
    key: Path | None = None
    """PEM private key of ``cert``."""

    def context(self) -> ssl.SSLContext:
        """Raises ``SpecError`` if a file is missing or is no certificate or key."""
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        _load(context, self.cert, self.key, self.ca)
        return context


def _load(context: ssl.SSLContext, cert: Path | None, key: Path | None, ca: Path | None) -> None:
    try:
        if cert is not None:
            # An empty password instead of OpenSSL's own question on the terminal.
            context.load_cert_chain(cert, key, password="")
        if ca is not None:
            context.load_verify_locations(ca)
    except OSError as error:  # ssl.SSLError is one
        names = ", ".join(str(path) for path in (cert, key, ca) if path is not None)
        raise SpecError(f"the link's TLS files ({names}) cannot be used: {error}") from error


class EngineLaunch(BaseModel):
    """Everything one engine process needs to know, but the secret."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: Annotated[str, Field(min_length=1)]
    """The served model's name, which its card and errors carry."""
    model: Path
    """A GGUF file or a Hugging Face folder."""
    listen: str
    """Where gateways connect: ``unix:PATH`` or ``tcp:HOST:PORT``."""
    engine: EngineSettings = EngineSettings()
    """The engine's own settings."""
    cpus: list[int] | None = None
    """Run on these CPUs only. None: wherever the process may."""
    tls: ServerTls | None = None
    """For ``tcp:`` addresses that are reached from other machines."""
    parent_pid: int | None = None
    """End when this process, the one that started the engine, has ended. None: run on alone."""
    drain_grace_s: Annotated[float, Field(ge=0)] = 30.0
    """How long running requests may finish after SIGTERM."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lines below it are not written to standard error."""
