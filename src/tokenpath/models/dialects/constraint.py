"""What an answer must look like where calls are held to a grammar, told from the dialect.

A call's frame is written as the model's template writes earlier calls, to the last space: that is
what the model has seen. Only the arguments are the model's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenpath.models.dialects.families import CallFormat
from tokenpath.models.dialects.shapes import Shape
from tokenpath.protocol.calls import CallConstraint, CallFrame, CallRule

NO_ARGUMENTS: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
"""Of a tool without parameters."""
_ARGS: Final = "[ARGS]"
"""Between a name and its arguments, where Mistral's tokenizer has such a token."""


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool as far as a grammar is concerned."""

    name: str
    parameters: Mapping[str, Any] | None = None
    """JSON schema of its arguments."""
    strict: bool = False
    """Whether the arguments must satisfy the schema."""
    field: str = "tools"
    """Where the schema stands in the request."""


def call_constraint(
    form: CallFormat,
    tools: Sequence[OfferedTool],
    *,
    controls: Mapping[str, int],
    named: str | None = None,
    required: bool = False,
    parallel: bool = True,
) -> CallConstraint | None:
    """The constraint that a request asks for, or None if it asks for none.

    ``controls`` are the marks that are control tokens, with their ids. ``named`` is the one tool
    that must be called, ``required`` that one of them must be.
    """
    required = required or named is not None
    if not required and not any(tool.strict for tool in tools):
        return None
    allowed = [tool for tool in tools if named is None or tool.name == named]
    return CallConstraint(
        frames=tuple(
            _frame(shape, allowed, listed=_ARGS not in controls)
            for shape in held_shapes(form, required=required)
        ),
        required=required,
        several=parallel and named is None,
        controls=controls,
    )


def held_shapes(form: CallFormat, *, required: bool) -> tuple[Shape, ...]:
    """The shapes that calls are held to.

    A required call has the shape that the template teaches. Where text is free, calls without marks
    are held too if the model is known to write them.
    """
    first = form.shapes[0]
    if required or not first.open:
        return (first,)
    return (first, *(shape for shape in form.shapes if not shape.open))


def _frame(shape: Shape, tools: Sequence[OfferedTool], *, listed: bool) -> CallFrame:
    """``listed``: Mistral's calls are a list of objects."""
    mark = shape.open
    if shape.payload == "mistral":
        if listed:
            rules = _in_json(shape, tools)
            return CallFrame(rules, trigger=mark, open=f"{mark}[", join=", ", close="]")
        rules = _named(_ARGS, tools)
        return CallFrame(rules, trigger=mark, open=mark, join=mark)
    if shape.payload == "named":
        rules = _named(shape.between, tools)
        join = shape.join or f"{shape.close}\n{mark}"
        return CallFrame(rules, trigger=mark, open=mark, join=join, close=shape.close)
    rules = _in_json(shape, tools)
    if not mark:
        return CallFrame(rules, join="; ", close=shape.close)
    close = f"\n{shape.close}" if shape.close else ""
    join = f"\n{shape.join}\n" if shape.join else f"{close}\n{mark}\n"
    return CallFrame(rules, trigger=mark, open=f"{mark}\n", join=join, close=close)


def _named(between: str, tools: Sequence[OfferedTool]) -> tuple[CallRule, ...]:
    return tuple(_rule(tool, f"{tool.name}{between}", "") for tool in tools)


def _in_json(shape: Shape, tools: Sequence[OfferedTool]) -> tuple[CallRule, ...]:
    """Objects with a name and arguments, in that order."""
    name_key, argument_key = json.dumps(shape.name_key), json.dumps(shape.argument_keys[0])
    return tuple(
        _rule(tool, f"{{{name_key}: {json.dumps(tool.name)}, {argument_key}: ", "}")
        for tool in tools
    )


def _rule(tool: OfferedTool, begin: str, end: str) -> CallRule:
    schema = NO_ARGUMENTS if tool.parameters is None else {**tool.parameters, "type": "object"}
    return CallRule(begin, schema, end, strict=tool.strict, field=tool.field)
