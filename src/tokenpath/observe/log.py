"""The server's log: one line a request, for people or for collectors, and never any prompt text.

A line carries the request's whole record: who, which model, how it ended, how many tokens, and the
stage ledger in milliseconds. Free text of the client's (its model name, if unknown) is left out, so
that a line cannot be forged.
"""

from __future__ import annotations

import logging
import sys
import traceback
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Literal, TextIO

import msgspec

from tokenpath.observe.ledger import StageTimes

REQUEST_LOGGER = "tokenpath.request"
CRASH_LOGGER = "tokenpath.gateway"


class Outcome(StrEnum):
    """How a request ended, seen from the client."""

    OK = "ok"
    REJECTED = "rejected"
    """Refused with a 4xx."""
    FAILED = "failed"
    """Ended by an error of the server's (5xx, or an error event in a stream)."""
    DISCONNECTED = "disconnected"
    """The client went away first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """Everything that is known of one ended request."""

    rid: str
    endpoint: str
    """Route, never the raw path: ``/v1/chat/completions``."""
    model: str | None
    """Name of a served model; None where none was found."""
    status: int
    """The HTTP status sent; 499 if the client left before one was."""
    outcome: Outcome
    error: str | None
    """Stable code of the error, also of one that came as a stream's event."""
    key_id: str | None
    tenant: str
    """The API key's name; empty without keys."""
    stream: bool
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    ttft_s: float | None
    times: StageTimes

    def fields(self) -> dict[str, str | int | float | bool | dict[str, float]]:
        """The record as a flat object; durations in milliseconds, absent values left out."""
        stages = {str(stage): _ms(seconds) for stage, seconds in self.times.stages.items()}
        stages["unattributed"] = _ms(self.times.unattributed_s)
        present = {
            "rid": self.rid,
            "endpoint": self.endpoint,
            "model": self.model,
            "status": self.status,
            "outcome": str(self.outcome),
            "error": self.error,
            "key": self.key_id,
            "stream": self.stream or None,
            "in": self.prompt_tokens,
            "cached": self.cached_tokens,
            "out": self.completion_tokens,
            "ttft_ms": None if self.ttft_s is None else _ms(self.ttft_s),
            "wall_ms": _ms(self.times.wall_s),
            "stages": stages,
        }
        return {name: value for name, value in present.items() if value is not None}

    def line(self) -> str:
        """The record as ``name=value`` pairs; the stages as ``stages=queue:1.2,prefill:3.4``."""
        parts = []
        for name, value in self.fields().items():
            if isinstance(value, dict):
                parts.append(f"{name}=" + ",".join(f"{k}:{v:g}" for k, v in value.items()))
            elif isinstance(value, bool):
                parts.append(f"{name}={int(value)}")
            else:
                parts.append(f"{name}={value}")
        return " ".join(parts)


def log_request(record: RequestRecord, *, quiet: bool = False) -> None:
    """Write the request's line; ``quiet`` ones (probes, scrapes) only at level debug."""
    logger = logging.getLogger(REQUEST_LOGGER)
    level = logging.DEBUG if quiet else logging.INFO
    if logger.isEnabledFor(level):
        logger.log(level, "%s", record.line(), extra={"record": record})


def log_crash(rid: str, error: BaseException) -> None:
    """Where an unexpected exception came from; not its message, which might quote a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    logging.getLogger(CRASH_LOGGER).error(
        "rid=%s unexpected %s\n%s", rid, type(error).__name__, frames
    )


class TextFormatter(logging.Formatter):
    """``12:34:56.789 INFO tokenpath.request rid=…``, in local time."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, tz=UTC).astimezone()
        text = f"{when:%H:%M:%S}.{int(record.msecs):03d} {record.levelname} {record.name} "
        text += record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


class JsonFormatter(logging.Formatter):
    """One JSON object a line; a request's line has its record's fields at the top level."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, tz=UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        request = getattr(record, "record", None)
        if isinstance(request, RequestRecord):
            line.update(request.fields())
        else:
            line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def configure_logging(
    level: Literal["debug", "info", "warning", "error"],
    form: Literal["text", "json"],
    stream: TextIO | None = None,
) -> None:
    """Send tokenpath's log to ``stream`` (standard error by default) in the spec's form."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logger = logging.getLogger("tokenpath")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
