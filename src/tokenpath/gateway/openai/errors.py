"""Errors in OpenAI's form, and a JSON decoder's complaints put into words.

Every failure, of whatever kind and at whatever path, is one object: ``{"error": {"message", "type",
"param", "code"}}``, which OpenAI's client turns into a typed exception by the HTTP status.
"""

from __future__ import annotations

import math
import re
from typing import TypeVar

import msgspec

from tokenpath.gateway.openai.schema import ROLES
from tokenpath.protocol.errors import (
    InvalidRequestError,
    ModelError,
    SpecError,
    TokenpathError,
)

Body = TypeVar("Body")


_WHO_ARE_YOU = 401
_COME_BACK = (429, 503)


class ErrorObject(msgspec.Struct, frozen=True):
    """What went wrong, for a person and for a program."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success."""

    error: ErrorObject


def error_body(error: TokenpathError) -> bytes:
    """The error as a JSON body; details of a terminal-side error never leave the server."""
    message = error.message
    if isinstance(error, SpecError | ModelError):
        message = "The server failed to handle the request."
    return msgspec.json.encode(
        ErrorBody(ErrorObject(message=message, type=error.kind, param=error.param, code=error.code))
    )


def error_headers(error: TokenpathError) -> list[tuple[bytes, bytes]]:
    """Headers that belong to the error: Retry-After in whole seconds, or who may come in."""
    headers: list[tuple[bytes, bytes]] = []
    after_s = error.retry_after_s
    if after_s is None and error.http_status in _COME_BACK:
        after_s = 1.0
    if after_s is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(after_s))).encode()))
    if error.http_status == _WHO_ARE_YOU:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def decode(decoder: msgspec.json.Decoder[Body], body: bytes) -> Body:
    """Decode and validate a request body. Raises ``InvalidRequestError`` that says where."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _misfit(str(error)) from None
    except RecursionError:
        raise InvalidRequestError("The body is nested too deeply.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(_malformed(str(error), body)) from None


_PLACE = re.compile(r" - at `\$\.?(?P<path>.*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
_POSITION = re.compile(r"^JSON is malformed: (?P<what>.*) \(byte (?P<at>\d+)\)$")
_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


def _misfit(text: str) -> InvalidRequestError:
    """Turn msgspec's "Expected `int | null`, got `str` - at `$.n`" into a sentence and a param."""
    place = _PLACE.search(text)
    path = place["path"].replace("[...]", "") if place else ""
    what = text[: place.start()] if place else text
    missing = _MISSING.match(what)
    if missing:
        param = f"{path}.{missing['name']}" if path else missing["name"]
        return InvalidRequestError(f"Field '{param}' is required.", param=param)
    unknown = _UNKNOWN.match(what)
    if unknown and not path:
        name = unknown["name"]
        return InvalidRequestError(f"There is no field '{name}' here.", param=name)
    if not path:
        return InvalidRequestError("The body must be a JSON object.")
    if path.rpartition(".")[2] == "role" and "enum" in what:
        return InvalidRequestError(f"Field '{path}' must be one of {', '.join(ROLES)}.", param=path)
    what = re.sub(r"`([^`]*)`", lambda match: _types(match[1]), what)
    what = what.replace("Expected", "expected").replace("Number out", "number out")
    what = what.replace("Invalid", "invalid")
    return InvalidRequestError(f"Field '{path}' is not valid: {what}.", param=path)


def _types(alternatives: str) -> str:
    return " or ".join(_WORDS.get(name, name) for name in alternatives.split(" | "))


def _malformed(text: str, body: bytes) -> str:
    """One sentence on a body that is no JSON, with the place in bytes."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f"The body is not valid UTF-8 at byte {error.start}."
    if not body.strip():
        return "The body is empty; a JSON object is expected."
    found = _POSITION.match(text)
    if found is None:
        if "truncated" in text and not _surrogate(body):
            return f"The body is not valid JSON: it ends too early, at byte {len(body)}."
        return "The body is not valid JSON: a string has a broken escape."
    at = int(found["at"])
    hint = "; NaN and Infinity are not JSON" if body[at : at + 2] in _NON_FINITE else ""
    return f"The body is not valid JSON: {found['what']} at byte {at}{hint}."


_NON_FINITE = (b"Na", b"In", b"-I")


def _surrogate(body: bytes) -> bool:
    return re.search(rb"\\u[dD][89a-fA-F]", body) is not None
