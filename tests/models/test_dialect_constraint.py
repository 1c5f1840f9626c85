"""What a grammar must allow is told from the request and the dialect."""

import json

from tokenpath.models.dialects.constraint import OfferedTool, call_constraint
from tokenpath.models.dialects.families import (
    CALL_FORMATS,
    GEMMA,
    HERMES,
    LLAMA3,
    MISTRAL,
    CallFormat,
)
from tokenpath.models.dialects.reader import AnswerReader
from tokenpath.models.dialects.shapes import Call, Shape

SCHEMA = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "$defs": {"city": {"type": "string"}},
}
TOOLS = [OfferedTool("weather", SCHEMA, strict=True), OfferedTool("time")]
NAMED = CallFormat(
    name="template",
    shapes=(Shape(open="<function=", payload="named", between=">", close="</function>"),),
)


def test_nothing_to_hold_to():
    assert call_constraint(HERMES, [OfferedTool("time", SCHEMA)]) is None


def test_required():
    found = call_constraint(HERMES, TOOLS, required=True)
    assert found.required
    assert found.several
    assert found.trigger == "<tool_call>"
    weather, time = found.rules
    assert weather.begin == "<tool_call>\n"
    assert weather.end == "\n</tool_call>"
    assert weather.schema["properties"]["name"] == {"const": "weather"}
    assert weather.schema["required"] == ["name", "arguments"]
    assert weather.schema["additionalProperties"] is False
    assert weather.schema["$defs"] == SCHEMA["$defs"]
    assert "$defs" not in weather.schema["properties"]["arguments"]
    assert time.schema["properties"]["arguments"] == {"type": "object"}


def test_named_is_one_call_of_that_tool():
    found = call_constraint(LLAMA3, TOOLS, named="time")
    assert found.required
    assert not found.several
    assert [rule.schema["properties"]["name"]["const"] for rule in found.rules] == ["time"]
    assert list(found.rules[0].schema["properties"]) == ["name", "parameters"]
    assert not call_constraint(HERMES, TOOLS, required=True, parallel=False).several


def test_strict_leaves_text_free():
    found = call_constraint(GEMMA, TOOLS)
    assert not found.required
    assert found.trigger == ""


def test_what_the_rules_write_is_what_the_parsers_read():
    for form in (*CALL_FORMATS.values(), NAMED):
        found = call_constraint(form, TOOLS, required=True)
        text = ""
        for rule, name in zip(found.rules, ("weather", "time"), strict=True):
            arguments = {"city": "Bern"}
            inner = {"name": name, form.shapes[0].argument_keys[0]: arguments}
            in_json = form is not MISTRAL and form is not NAMED
            text += (
                (found.between if text else "")
                + rule.begin
                + json.dumps(inner if in_json else arguments)
                + rule.end
            )
        reader = AnswerReader(shapes=form.shapes, tools=["weather", "time"])
        assert reader.push(text) + reader.finish() == [
            Call("weather", '{"city": "Bern"}'),
            Call("time", '{"city": "Bern"}'),
        ]
