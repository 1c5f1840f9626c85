"""What an answer must look like where a call is required, as data for a grammar.

``tool_choice: required`` or a named tool, and ``strict``, are promises about the output, which only
a grammar over the tokens can keep. This says what such a grammar has to allow, whichever library
compiles it: text until a mark begins, then one of the calls, each a frame of fixed text around an
object of a JSON schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenpath.models.dialects.families import CallFormat

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool as far as a grammar is concerned."""

    name: str
    parameters: Mapping[str, Any] | None = None
    """JSON schema of its arguments."""
    strict: bool = False
    """Whether the arguments must satisfy the schema."""


@dataclass(frozen=True, slots=True)
class CallRule:
    """One tool's calls: ``begin``, then JSON that satisfies ``schema``, then ``end``."""

    begin: str
    schema: Mapping[str, Any]
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallConstraint:
    """All calls that are allowed, and whether text is."""

    rules: tuple[CallRule, ...]
    trigger: str
    """The text that begins every rule and that free text must not contain; empty where calls have
    no mark, and then an answer is either text or calls."""
    required: bool
    """Whether the answer is calls and nothing else, at least one."""
    several: bool
    """Whether more than one call may come."""
    between: str
    """What stands between two calls, where ``several``."""


def call_constraint(
    form: CallFormat,
    tools: Sequence[OfferedTool],
    *,
    named: str | None = None,
    required: bool = False,
    parallel: bool = True,
) -> CallConstraint | None:
    """The constraint that a request asks for, or None if it asks for none.

    ``named`` is the one tool that must be called, ``required`` that one of them must be. Tools that
    are not strict may be called with any object of arguments.
    """
    required = required or named is not None
    if not required and not any(tool.strict for tool in tools):
        return None
    allowed = [tool for tool in tools if named is None or tool.name == named]
    shape = form.shapes[0]
    rules = []
    for tool in allowed:
        schema = tool.parameters if tool.strict and tool.parameters is not None else ANY_OBJECT
        if form.name == "mistral":
            rules.append(CallRule(f"{shape.open}{tool.name}[ARGS]", schema, ""))
        elif shape.payload == "named":
            begin = f"{shape.open}{tool.name}{shape.between}"
            rules.append(CallRule(begin, schema, shape.close))
        else:
            rules.append(
                CallRule(
                    f"{shape.open}\n" if shape.open else "",
                    _call_schema(shape.name_key, shape.argument_keys[0], tool.name, schema),
                    f"\n{shape.close}" if shape.close else "",
                )
            )
    return CallConstraint(
        rules=tuple(rules),
        trigger=shape.open,
        required=required,
        several=parallel and named is None,
        between="\n" if shape.open else "; ",
    )


def _call_schema(
    name_key: str, argument_key: str, name: str, schema: Mapping[str, Any]
) -> dict[str, Any]:
    """Of an object with a name and arguments, in that order."""
    # Definitions are found from the root, so they move there.
    inner = {key: part for key, part in schema.items() if key not in ("$defs", "definitions")}
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return {
        "type": "object",
        "properties": {name_key: {"const": name}, argument_key: inner},
        "required": [name_key, argument_key],
        "additionalProperties": False,
        **definitions,
    }
