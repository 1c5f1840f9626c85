"""The spec's part on a model's replicas: how many there are, and which prefill for others."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tokenpath.policy.handover import Role


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ReplicaSettings(_Strict):
    """One replica of a model: a process with its own copy of the KV pool."""

    role: Role = "both"
    """``both`` computes whole requests. ``decode`` has another replica compute long prompts, so
    that they do not hold up its streams; ``prefill`` does nothing else. ``both`` by default: roles
    pay where streams must not stutter, and cost throughput where only one kind of work is there."""
    threads: Annotated[int, Field(gt=0, le=4096)] | None = None
    """Compute threads of this replica. None: ``engine.threads``."""


class HandoverTls(_Strict):
    """How both sides of a handover between machines prove themselves; all are PEM files."""

    cert: str
    """This machine's certificate chain."""
    key: str
    """Its private key, without a password."""
    ca: str
    """Believe, on either side, only certificates signed by this."""


class Disaggregation(_Strict):
    """How prefilling replicas hand prompts' keys and values to those of role ``decode``."""

    min_prompt_tokens: Annotated[int, Field(gt=0)] = 256
    """A prompt of which fewer tokens are missing from the decoding replica's own caches is computed
    there. A prefill of 256 tokens is about half a step's budget: it would hold up streams for one
    step, and handing it over costs about as much as it saves below."""
    wait_s: Annotated[float, Field(gt=0)] = 60.0
    """Longest wait for a prompt that was handed to another replica; then the rest is computed.
    A prefilling replica that is lost is noticed at once; this is for one with too long a queue."""
    buffer_bytes: Annotated[int, Field(gt=0)] = 512 << 20
    """Memory for blocks under way, in each replica, taken as they come. What finds no room is
    computed where it is needed. 512 MiB is 18,000 tokens of Qwen2.5 1.5B in bfloat16."""
    listen: str | None = None
    """``tcp:HOST:PORT``: where decoding replicas of other machines reach this machine's prefilling
    one. None: they do not; replicas of one machine need no port."""
    peers: list[str] = []
    """``tcp:HOST:PORT`` of other machines' prefilling replicas. They need the same model files, the
    same version of tokenpath and the same kind of CPU: blocks are exchanged as the kernels keep
    them."""
    tls: HandoverTls | None = None
    """Needed for ``listen`` and ``peers``, unless the address is a loopback one."""
    secret_file: str | None = None
    """File whose one line both machines share. Needed for ``listen`` and ``peers``. In a file, not
    here, so that the spec can be shown to anybody."""

    @model_validator(mode="after")
    def _between_machines(self) -> Disaggregation:
        for address in (*self.peers, *([] if self.listen is None else [self.listen])):
            host = _host(address)
            if host is None:
                raise ValueError(
                    f"{address!r} is no address of another machine; it is tcp:HOST:PORT"
                )
            if self.tls is None and not _is_loopback(host):
                raise ValueError(
                    f"{address!r} leads over a network, where prompts could be read from the "
                    "blocks; it needs tls with cert, key and ca"
                )
            if self.secret_file is None:
                raise ValueError(f"{address!r} needs secret_file, a file that both machines have")
        return self


def _host(address: str) -> str | None:
    scheme, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not (port.isascii() and port.isdigit()):
        return None
    return host.removeprefix("[").removesuffix("]") if int(port) < 1 << 16 else None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
