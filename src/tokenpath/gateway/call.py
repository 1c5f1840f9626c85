"""The record of one HTTP call while it runs; closed, it becomes a log line and metrics."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from tokenpath.observe.ledger import Ledger
from tokenpath.observe.log import Outcome, RequestRecord
from tokenpath.protocol.errors import CancelledError, TokenpathError
from tokenpath.protocol.events import Usage

CALL_KEY = "tokenpath.call"
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_CLIENT_LEFT = 499
_FIRST_SERVER_ERROR = 500
_FIRST_ERROR = 400


@dataclass(slots=True, eq=False)
class Call:
    """What the gateway learns of a call on its way through."""

    rid: str
    """The client's ``X-Request-Id`` if it is sane, else a new one."""
    headers: Headers
    clock: Callable[[], float]
    ledger: Ledger
    endpoint: str = "other"
    """The route, a small set of values."""
    quiet: bool = False
    """Probes and scrapes: no line at level info."""
    model: str | None = None
    key_id: str | None = None
    tenant: str = ""
    """The API key's name; empty where there are none."""
    stream: bool = False
    usage: Usage = field(default_factory=Usage)
    first_token_s: float | None = None
    """On ``clock``."""
    status: int | None = None
    """Set when the response's head is sent."""
    answered: bool = False
    """The answer's last byte was handed to the server."""
    error: TokenpathError | None = None

    @classmethod
    def of(cls, scope: Scope, clock: Callable[[], float]) -> Call:
        """Open the record of the call that ``scope`` describes."""
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        rid = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
        return cls(rid=rid, headers=headers, clock=clock, ledger=Ledger(clock))

    @property
    def outcome(self) -> Outcome:
        if isinstance(self.error, CancelledError):
            return Outcome.DISCONNECTED
        if self.error is not None and self.error.http_status >= _FIRST_SERVER_ERROR:
            return Outcome.FAILED
        if self.status is None or self.status >= _FIRST_SERVER_ERROR:
            return Outcome.FAILED
        if self.status >= _FIRST_ERROR:
            return Outcome.REJECTED
        return Outcome.OK if self.error is None else Outcome.FAILED

    def close(self) -> RequestRecord:
        """End the call now."""
        first = self.first_token_s
        return RequestRecord(
            rid=self.rid,
            endpoint=self.endpoint,
            model=self.model,
            status=_CLIENT_LEFT if self.status is None else self.status,
            outcome=self.outcome,
            error=None if self.error is None else self.error.code,
            key_id=self.key_id,
            tenant=self.tenant,
            stream=self.stream,
            prompt_tokens=self.usage.prompt_tokens,
            cached_tokens=self.usage.cached_prompt_tokens,
            completion_tokens=self.usage.completion_tokens,
            ttft_s=None if first is None else first - self.ledger.started_s,
            times=self.ledger.close(),
        )


def call_of(scope: Scope | dict[str, Any]) -> Call:
    """The record that ``Front`` opened for this scope."""
    call = scope[CALL_KEY]
    assert isinstance(call, Call)
    return call
