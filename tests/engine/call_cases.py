"""Tools, and what a constraint on their calls promises of an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping

import jsonschema_rs
import msgspec

from tokenpath.models.dialects.constraint import OfferedTool, call_constraint, held_shapes
from tokenpath.models.dialects.families import (
    GEMMA,
    HERMES,
    LLAMA3,
    MISTRAL,
    THINK,
    CallFormat,
)
from tokenpath.models.dialects.reader import AnswerReader, Event
from tokenpath.models.dialects.shapes import Call, Shape
from tokenpath.protocol.calls import CallConstraint, ThoughtFrame

TREE = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/city"},
        "days": {"type": "integer", "minimum": 0, "maximum": 14},
        "near": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["city", "near"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string", "maxLength": 5}},
}
"""It refers to itself and to its definitions: pointers must lead where they led in the request."""
UNIT = {"properties": {"unit": {"enum": ["°C", '"F" </tool_call>']}}, "required": ["unit"]}
TOOLS = [
    OfferedTool("weather", TREE, strict=True, field="tools[0].function.parameters"),
    OfferedTool("weather_in", UNIT | {"additionalProperties": False}, strict=True),
    OfferedTool("time"),
]
SCHEMAS = {
    "weather": TREE,
    "weather_in": UNIT,
    "time": {"type": "object", "maxProperties": 0},
}
TAGS = CallFormat(
    name="template",
    shapes=(Shape(open="<function=", payload="named", between=">", close="</function>"),),
)
FORMS = {form.name: form for form in (HERMES, LLAMA3, MISTRAL, GEMMA, TAGS)}


def constraint_of(
    form: CallFormat,
    *,
    controls: Mapping[str, int] | None = None,
    thoughts: bool | None = None,
    **asked,
) -> CallConstraint:
    """``thoughts``: None for a model without, or whether the prompt has begun them."""
    made = call_constraint(form, TOOLS, controls=controls or {}, **asked)
    frame = None if thoughts is None else ThoughtFrame(THINK.open, THINK.close, begun=thoughts)
    return msgspec.structs.replace(made, thoughts=frame)


def read(form: CallFormat, text: str, constraint: CallConstraint) -> list[Event]:
    """The answer as a client gets it."""
    reader = AnswerReader(
        shapes=held_shapes(form, required=constraint.required),
        tools=[tool.name for tool in TOOLS],
        thoughts=None if constraint.thoughts is None else THINK,
        thinking=constraint.thoughts is not None and constraint.thoughts.begun,
    )
    return reader.push(text) + reader.finish()


def checked_calls(events: list[Event]) -> list[str]:
    """The names of the tools that are called, once each call's arguments are found right."""
    names = []
    for event in events:
        if isinstance(event, Call):
            jsonschema_rs.validate(SCHEMAS[event.name], json.loads(event.arguments))
            names.append(event.name)
    return names
