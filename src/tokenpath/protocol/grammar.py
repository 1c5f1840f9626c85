"""What an output must look like: a JSON schema, a regular expression, a choice, rules, tool calls.

It travels with a sequence's sampling parameters as text. Only the engine compiles it, because only
there are the model's tokens; whoever refuses it says in which field of the request it stood.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from tokenpath.protocol.calls import CallConstraint


class GrammarKind(enum.StrEnum):
    """How a grammar's source is to be read."""

    JSON_SCHEMA = "json_schema"
    """A JSON schema, as JSON."""
    REGEX = "regex"
    """A regular expression that the whole output matches."""
    CHOICE = "choice"
    """A JSON list of the possible outputs."""
    EBNF = "ebnf"
    """Rules: GBNF or xgrammar's (``root ::= …``), or Lark (``start: …``)."""
    CALLS = "calls"
    """A ``CallConstraint``, as JSON."""


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the output of one sequence must be. Use the constructors below."""

    kind: GrammarKind
    source: str
    field: str = "grammar"
    """The request's field that it comes from, for errors."""

    @classmethod
    def json_schema(
        cls, schema: Mapping[str, Any] | bool | str, *, field: str = "json_schema"
    ) -> Self:
        """JSON that a schema accepts; a string is the schema's own JSON text."""
        text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
        return cls(GrammarKind.JSON_SCHEMA, text, field)

    @classmethod
    def json_object(cls, *, field: str = "json_object") -> Self:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, field=field)

    @classmethod
    def regex(cls, pattern: str, *, field: str = "regex") -> Self:
        """Text that a regular expression matches as a whole."""
        return cls(GrammarKind.REGEX, pattern, field)

    @classmethod
    def choice(cls, choices: Sequence[str], *, field: str = "choice") -> Self:
        """One of several texts."""
        return cls(GrammarKind.CHOICE, msgspec.json.encode(list(choices)).decode(), field)

    @classmethod
    def ebnf(cls, rules: str, *, field: str = "grammar") -> Self:
        """Text that a context-free grammar derives."""
        return cls(GrammarKind.EBNF, rules, field)

    @classmethod
    def calls(cls, constraint: CallConstraint, *, field: str = "tools") -> Self:
        """Calls of tools, or text and calls."""
        return cls(GrammarKind.CALLS, msgspec.json.encode(constraint).decode(), field)
