"""Reading schemas: what is refused, by name and place, and what is left of the rest."""

from __future__ import annotations

import itertools
import json

import pytest
from grammar_cases import SCHEMAS, byte_vocabulary

from tokenpath.engine.grammar.compile import compile_grammar
from tokenpath.engine.grammar.endless import TooTangledError, endless_place
from tokenpath.engine.grammar.schema import MAX_DEPTH, read_schema
from tokenpath.protocol.errors import InvalidRequestError, UnsupportedError
from tokenpath.protocol.grammar import Grammar

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}, "required": ["next"]}
STRING = {"type": "string"}


def refusal(schema) -> InvalidRequestError:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    with pytest.raises(InvalidRequestError) as caught:
        read_schema(text)
    message = caught.value.message
    assert "\n" not in message
    assert len(message) < 300
    return caught.value


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("not", {}), ("if", {}), ("then", {}), ("else", {}), ("contains", {}), ("uniqueItems", True),
        ("propertyNames", {}), ("dependentRequired", {}), ("dependentSchemas", {}),
        ("dependencies", {}), ("unevaluatedProperties", False), ("unevaluatedItems", False),
        ("minContains", 1), ("maxContains", 1), ("additionalItems", False), ("$dynamicRef", "#x"),
        ("$anchor", "x"), ("nullable", True), ("$recursiveRef", "#"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused_by_name_wherever_it_stands(keyword, value):
    error = refusal({"properties": {"a/b": {"items": {keyword: value}}}})
    assert isinstance(error, UnsupportedError)
    assert f"'{keyword}' at #/properties/a~1b/items is not supported" in error.message


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("{", "not valid JSON"),
        ("[]", "must be an object, or true or false"),
        ({"minLenght": 3}, "'minLenght' at #, which is no keyword"),
        ({"x" * 99: 3}, "no keyword"),
        ({"type": "strin"}, "'type' at # is \"strin\"; types are null, boolean"),
        ({"type": []}, "'type' at #"),
        ({"type": 5}, "'type' at # is 5"),
        ({"minLength": -1}, "whole number of at least 0"),
        ({"minLength": 1.5}, "whole number of at least 0"),
        ({"maxItems": "5"}, "whole number"),
        ({"maxItems": True}, "whole number"),
        ({"minimum": "5"}, "it must be a number"),
        ({"exclusiveMinimum": True}, "it must be a number"),
        ({"multipleOf": 0}, "above 0"),
        ({"pattern": 5}, "it must be a string"),
        ({"required": "a"}, "list of property names"),
        ({"enum": []}, "one or more values"),
        ({"anyOf": []}, "one or more schemas"),
        ({"items": [STRING]}, "write a list of them as 'prefixItems'"),
        ({"properties": []}, "an object of schemas"),
        ({"properties": {"a": 5}}, "at #/properties/a: a schema must be an object"),
        ({"$ref": 5}, "must be a string"),
        (
            {"minLength": 3, "maxLength": 2},
            "'minLength' at # is 3, more than 'maxLength', which is 2",
        ),
        ({"minimum": 3, "maximum": 2}, "more than 'maximum'"),
        ({"$ref": "#/$defs/x"}, "where there is no schema"),
        ({"$ref": "#/enum/0", "enum": [{}]}, "where there is no schema"),
        ({"oneOf": [STRING] * 200}, "more than 128 alternatives"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(schema, says):
    assert says in refusal(schema).message


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"$ref": "http://example.com/s.json"}, "only places in the same schema"),
        ({"$ref": "other.json#/a"}, "only places in the same schema"),
        ({"$ref": "#name"}, "only places in the same schema"),
        ({"$schema": "http://json-schema.org/draft-04/schema#"}, "drafts 7, 2019-09 and 2020-12"),
        ({"properties": {"a": {"$id": "x"}}}, "'$id' at #/properties/a is not supported"),
        ({"format": "isbn"}, "'format' at # is \"isbn\"; supported are date-time, "),
        ({"const": 2**53 + 2}, "exact up to 2**53"),
        ({"enum": [[1, {"a": -(2**60)}]]}, "exact up to 2**53"),
        ({"oneOf": [STRING, {"type": ["string", "null"]}]}, "not seen to exclude each other"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "not seen to exclude"),
        ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "not seen to exclude"),
        ({"minProperties": 2}, "'minProperties' at # asks for more"),
    ],
)
def test_what_is_right_but_not_enforced_is_unsupported(schema, says):
    error = refusal(schema)
    assert isinstance(error, UnsupportedError)
    assert says in error.message


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"$ref": "#"}, "#"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "#/$defs/a"),
        ({"$ref": "#/$defs/n", "$defs": {"n": NODE}}, "#/$defs/n"),
        ({"anyOf": [{"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]}, "#"),
        (
            {
                "properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"], "type": "object",
                "$defs": {
                    "x": {"type": "array", "prefixItems": [{"$ref": "#/$defs/y"}], "minItems": 1},
                    "y": {"allOf": [{"$ref": "#/$defs/x"}, {"type": "array"}]},
                },
            },
            "#/$defs/x",
        ),
    ],
)  # fmt: skip
def test_recursion_without_an_end_is_refused(schema, place):
    message = refusal(schema).message
    assert message.startswith(f"the JSON schema at {place} is recursive without an end")


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/n", "$defs": {"n": NODE | {"required": []}}},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "object", "properties": {"n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["n"]},
        {"type": ["object", "null"], "properties": {"n": {"$ref": "#"}}, "required": ["n"]},
        {"type": "string", "$defs": {"unused": NODE, "n": NODE}},
    ],
)  # fmt: skip
def test_recursion_that_can_end_is_fine(schema):
    read_schema(json.dumps(schema))


def test_a_chain_of_definitions_in_any_order_is_followed():
    names = [f"d{i * 37 % 100}" for i in range(100)]
    defs = {name: {"$ref": f"#/$defs/{after}"} for name, after in itertools.pairwise(names)}
    defs[names[-1]] = STRING
    assert endless_place({"$ref": f"#/$defs/{names[0]}", "$defs": defs}) is None


def test_a_tangle_is_given_up_in_time(monkeypatch):
    monkeypatch.setattr("tokenpath.engine.grammar.endless.MAX_VISITS", 50)
    defs = {f"d{i}": {"$ref": f"#/$defs/d{i - 1}"} for i in range(1, 100)} | {"d0": STRING}
    with pytest.raises(TooTangledError):
        endless_place({"$ref": "#/$defs/d99", "$defs": defs})
    assert (
        "more ways than can be followed" in refusal({"$ref": "#/$defs/d99", "$defs": defs}).message
    )


def test_nesting_is_bounded():
    schema = STRING
    for _ in range(MAX_DEPTH + 1):
        schema = {"items": schema}
    assert f"more than {MAX_DEPTH} schemas deep" in refusal(schema).message
    assert "deep" in refusal('{"items":' * 5000 + "{}" + "}" * 5000).message


def test_annotations_go_and_the_rest_stays():
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "urn:x", "title": "T",
        "x-mine": 1, "uniqueItems": False, "type": "object", "description": "d", "$comment": "c",
        "properties": {"title": STRING | {"default": "x", "deprecated": True}},
    }  # fmt: skip
    assert read_schema(json.dumps(schema)) == {"type": "object", "properties": {"title": STRING}}


def test_x_guidance_cannot_switch_checks_off():
    text = json.dumps({"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True})
    assert "'uniqueItems'" in refusal(text).message
    assert "x-guidance" not in read_schema(json.dumps({"x-guidance": {"lenient": True}}))


def test_one_of_that_excludes_becomes_any_of():
    for name in ("tagged union",):
        clean = read_schema(json.dumps(SCHEMAS[name]))
        assert clean["anyOf"] == [{"$ref": "#/$defs/Circle"}, {"$ref": "#/$defs/Square"}]
        assert "oneOf" not in clean
    both = {"oneOf": [STRING, {"type": "null"}], "anyOf": [STRING, {"type": "integer"}]}
    clean = read_schema(json.dumps(both))
    assert clean == {"anyOf": both["anyOf"], "allOf": [{"anyOf": both["oneOf"]}]}


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar.json_schema(False), "false, so no JSON satisfies it"),
        (
            Grammar.json_schema({"type": "string", "enum": [1]}),
            "the JSON schema cannot be used: Unsatisfiable",
        ),
        (Grammar.json_schema({"pattern": "(?=x)"}), "look-around"),
        (Grammar.json_schema({"pattern": "("}), "unclosed group"),
        (Grammar.regex(""), "the regular expression is empty"),
        (Grammar.regex("("), "the regular expression cannot be used: .*unclosed group"),
        (Grammar.regex("a(?!b)"), "look-around"),
        (Grammar.regex(r"(a)\1"), "backreferences are not supported"),
        (Grammar.regex("x{0}"), "allows the empty text only"),
        (Grammar.choice([]), "needs at least one text"),
        (Grammar.choice(["a", ""]), "has an empty text"),
        (Grammar.choice(["x"] * 10_001), "more than 10000 texts"),
        (Grammar("choice", "[1]"), "must be a list of texts"),
        (Grammar.ebnf("root ::= "), "the grammar"),
        (Grammar.ebnf("start: nothing"), 'unknown name: "nothing"'),
        (Grammar.ebnf('start: "a'), "lexer error"),
        (Grammar.ebnf("this is no grammar"), "the grammar"),
        (Grammar.ebnf('start: "a"\n%llguidance {}'), "options, which the engine sets"),
        (Grammar.ebnf('start: ""'), "allows the empty text only"),
        (Grammar.ebnf("start: <nope>"), "unknown special token"),
    ],
)
def test_what_cannot_be_compiled_is_one_sentence(grammar, says):
    with pytest.raises(InvalidRequestError, match=says) as caught:
        compile_grammar(grammar, byte_vocabulary())
    assert "\n" not in caught.value.message
    assert "%" not in caught.value.message.replace("%llguidance options", "")
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("properties", [1500, 3000])
def test_an_object_of_very_many_properties(properties):
    """What takes too much work is refused when it is compiled, not in the middle of an output."""
    schema = {
        "type": "object",
        "properties": {f"p{i}": {"type": "integer"} for i in range(properties)},
    }
    try:
        state = compile_grammar(Grammar.json_schema(schema), byte_vocabulary()).begin(())
    except InvalidRequestError as error:
        assert "more work" in error.message or "too big" in error.message
        assert properties > 2000
    else:
        assert state.accepts(b'{"p7": 1, "p1400": 2}') == 21


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.regex("((a{1000}){1000}){1000}"),
        Grammar.regex("(.{1,2000}x){500}"),
        Grammar.json_schema({"type": "string", "pattern": "(a|b)*a(a|b){60}"}),
        Grammar.json_schema({"type": "array", "minItems": 10**9, "items": STRING}),
        Grammar.json_schema(
            {
                "type": "object",
                "properties": {f"p{i}": {"anyOf": [STRING] * 50} for i in range(400)},
            }
        ),
        Grammar.json_schema(
            {"allOf": [{"anyOf": [{"const": f"{i}{j}"} for j in range(60)]} for i in range(12)]}
        ),
        Grammar.ebnf('root ::= "a" root'),
        Grammar.ebnf("root ::= " + "(" * 3000 + '"a"' + ")" * 3000),
    ],
)
def test_monstrous_grammars_end_soon_in_one_way_or_another(grammar):
    import time

    started = time.perf_counter()
    try:
        state = compile_grammar(grammar, byte_vocabulary()).begin(())
        import numpy as np

        words = np.zeros(state.words, np.uint32)
        for _ in range(20):
            state.allow(words)
            token = int(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))[0])
            state.advance(token)
    except InvalidRequestError as error:
        assert "\n" not in error.message
    assert time.perf_counter() - started < 5
