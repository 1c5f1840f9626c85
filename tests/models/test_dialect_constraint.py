"""What a grammar must allow is told from the request and the dialect."""

import pytest

from tokenpath.models.dialects.constraint import OfferedTool, call_constraint, held_shapes
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
TOOLS = [
    OfferedTool("weather", SCHEMA, strict=True, field="tools[0].function.parameters"),
    OfferedTool("time"),
]
NAMED = CallFormat(
    name="template",
    shapes=(Shape(open="<function=", payload="named", between=">", close="</function>"),),
)


MARKS = {"[TOOL_CALLS]": 5, "[ARGS]": 6}


def calls(form, text):
    reader = AnswerReader(shapes=form.shapes, tools=["weather", "time"])
    return reader.push(text) + reader.finish()


def test_nothing_to_hold_to():
    assert call_constraint(HERMES, [OfferedTool("time", SCHEMA)], controls={}) is None


def test_required():
    found = call_constraint(HERMES, TOOLS, controls={}, required=True)
    assert found.required
    assert found.several
    (frame,) = found.frames
    assert frame.trigger == "<tool_call>"
    assert frame.open == "<tool_call>\n"
    assert frame.join == "\n</tool_call>\n<tool_call>\n"
    assert frame.close == "\n</tool_call>"
    weather, time = frame.rules
    assert weather.begin == '{"name": "weather", "arguments": '
    assert weather.end == "}"
    assert weather.schema == SCHEMA
    assert (weather.strict, weather.field) == (True, "tools[0].function.parameters")
    assert time.schema == {"type": "object", "properties": {}, "additionalProperties": False}
    assert not time.strict


def test_arguments_are_an_object_even_if_the_schema_does_not_say_so():
    tool = OfferedTool("f", {"properties": {"a": {}}})
    (frame,) = call_constraint(HERMES, [tool], controls={}, required=True).frames
    assert frame.rules[0].schema == {"properties": {"a": {}}, "type": "object"}


def test_named_is_one_call_of_that_tool():
    found = call_constraint(LLAMA3, TOOLS, controls={}, named="time")
    assert found.required
    assert not found.several
    assert [rule.begin for rule in found.frames[0].rules] == ['{"name": "time", "parameters": ']
    several = call_constraint(HERMES, TOOLS, controls={}, required=True, parallel=False).several
    assert not several


def test_strict_leaves_text_free_and_holds_calls_without_marks_too():
    found = call_constraint(GEMMA, TOOLS, controls={})
    assert not found.required
    assert [frame.trigger for frame in found.frames] == [""]
    found = call_constraint(HERMES, TOOLS, controls={})
    assert [frame.trigger for frame in found.frames] == ["<tool_call>", ""]
    assert [shape.open for shape in held_shapes(HERMES, required=False)] == ["<tool_call>", ""]


def test_mistrals_calls_are_a_list_where_its_tokenizer_has_no_mark_for_arguments():
    (frame,) = call_constraint(MISTRAL, TOOLS, controls=MARKS, required=True).frames
    assert frame.rules[0].begin == "weather[ARGS]"
    (frame,) = call_constraint(MISTRAL, TOOLS, controls={"[TOOL_CALLS]": 5}, required=True).frames
    assert (frame.open, frame.join, frame.close) == ("[TOOL_CALLS][", ", ", "]")


@pytest.mark.parametrize("controls", [{}, MARKS])
@pytest.mark.parametrize("required", [True, False])
def test_what_the_rules_write_is_what_the_parsers_read(controls, required):
    for form in (*CALL_FORMATS.values(), NAMED):
        for frame in call_constraint(form, TOOLS, controls=controls, required=required).frames:
            one, other = [rule.begin + '{"city": "Bern"}' + rule.end for rule in frame.rules]
            text = frame.open + one + frame.join + other + frame.close
            assert text.startswith(frame.trigger)
            assert calls(form, text) == [
                Call("weather", '{"city": "Bern"}'),
                Call("time", '{"city": "Bern"}'),
            ]
