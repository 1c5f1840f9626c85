"""Pieces of the notation that is compiled: llguidance's dialect of Lark.

Tokens are never forced: where the grammar leaves one text only, the model still chooses how to
spell it in tokens. Forcing would call back into the tokenizer for every such place, and the
spelling of a fragment is not the one it has within a text where a tokenizer adds spaces to
beginnings.
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec

OPTIONS: Final = '%llguidance {"no_forcing": true}\n'
"""At the end, so that errors name the user's own lines."""
_WHITESPACE: Final = r"( |\n {0,40}|\n\t{0,10})"
"""Between JSON's symbols: a space, or a new line with its indentation. If any run of white space
were allowed, a weak model could go on with spaces for ever."""
_JSON_OPTIONS: Final[dict[str, Any]] = {"whitespace_pattern": _WHITESPACE}


def literal(text: str) -> str:
    """A text as it stands."""
    return json.dumps(text)


def json_of(schema: dict[str, Any] | bool) -> str:
    """JSON that a schema, as ``schema.read_schema`` gives it, accepts; not for ``False``."""
    body = {} if schema is True else schema
    assert isinstance(body, dict)
    return f"%json {msgspec.json.encode({'x-guidance': _JSON_OPTIONS, **body}).decode()}"
