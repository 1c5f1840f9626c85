"""How clients ask for structured output, and what the engine is asked for then."""

from __future__ import annotations

import json

import httpx
import pytest
from gateway_harness import Script
from pydantic import BaseModel

from tokenpath.protocol.errors import ErrorInfo
from tokenpath.protocol.grammar import Grammar

CHAT = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETE = {"model": "toy", "prompt": "Hi"}
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}}


def asked(server, path: str, **fields) -> Grammar | None:
    body = {**(CHAT if path.startswith("chat") else COMPLETE), **fields}
    answer = server.http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    return server.replica.requests[-1].sampling.grammar


def refused(server, path: str, **fields) -> dict:
    body = {**(CHAT if path.startswith("chat") else COMPLETE), **fields}
    answer = server.http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 400, answer.text
    assert not server.replica.requests
    return answer.json()["error"]


def json_schema(schema, **more) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": None}, None),
        ({"response_format": {"type": "text"}}, None),
        (
            {"response_format": {"type": "json_object"}},
            Grammar.json_object(field="response_format"),
        ),
        (
            {"response_format": json_schema(SCHEMA, strict=True, description="d")},
            Grammar.json_schema(SCHEMA, field="response_format"),
        ),
        ({"guided_json": SCHEMA}, Grammar.json_schema(SCHEMA, field="guided_json")),
        (
            {"guided_json": json.dumps(SCHEMA)},
            Grammar.json_schema(json.dumps(SCHEMA), field="guided_json"),
        ),
        ({"guided_regex": "a+"}, Grammar.regex("a+", field="guided_regex")),
        ({"guided_choice": ["a", "é"]}, Grammar.choice(["a", "é"], field="guided_choice")),
        ({"guided_grammar": "root ::= x"}, Grammar.ebnf("root ::= x", field="guided_grammar")),
        (
            {"structured_outputs": {"json": SCHEMA}},
            Grammar.json_schema(SCHEMA, field="structured_outputs.json"),
        ),
        (
            {"structured_outputs": {"json_object": True}},
            Grammar.json_object(field="structured_outputs.json_object"),
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": None}},
            Grammar.regex("a", field="structured_outputs.regex"),
        ),
        (
            {"structured_outputs": {"choice": ["x"]}},
            Grammar.choice(["x"], field="structured_outputs.choice"),
        ),
        (
            {"structured_outputs": {"grammar": "start: X"}},
            Grammar.ebnf("start: X", field="structured_outputs.grammar"),
        ),
    ],
)
def test_every_form_means_one_grammar(server, path, fields, grammar):
    assert asked(server, path, **fields) == grammar


def test_a_schema_keeps_its_order(server):
    grammar = asked(server, "chat/completions", response_format=json_schema(SCHEMA))
    assert list(json.loads(grammar.source)["properties"]) == ["b", "a"]


def test_every_choice_and_every_prompt_gets_it(server):
    body = {**COMPLETE, "prompt": ["x", "y"], "n": 2, "seed": 1, "guided_regex": "a"}
    assert server.http.post("/v1/completions", json=body).status_code == 200
    grammars = {request.sampling.grammar for request in server.replica.requests}
    assert grammars == {Grammar.regex("a", field="guided_regex")}
    assert len(server.replica.requests) == 4


def test_the_openai_client_parses_into_a_class(server):
    class Answer(BaseModel):
        colour: str

    server.replica.script = Script(words=('{"colour"', ': "red"}'))
    answer = server.client().chat.completions.parse(
        model="toy", messages=CHAT["messages"], response_format=Answer
    )
    assert answer.choices[0].message.parsed == Answer(colour="red")
    grammar = server.replica.requests[-1].sampling.grammar
    assert json.loads(grammar.source)["required"] == ["colour"]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "guided_regex",
            "'response_format' and 'guided_regex' each say what the output must be; only one",
        ),
        ({"guided_json": {}, "guided_choice": ["a"]}, "guided_choice", "only one"),
        (
            {"structured_outputs": {"json": {}, "regex": "a"}},
            "structured_outputs.regex",
            "'structured_outputs.json' and 'structured_outputs.regex'",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "is empty; it needs one of json"),
        (
            {"structured_outputs": {"json_object": False}},
            "structured_outputs",
            "is empty",
        ),
        (
            {"structured_outputs": {"structural_tag": "x"}},
            "structured_outputs",
            "unknown field",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"response_format": {}}, "response_format.type", "is required"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "is required with type 'json_schema'",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "is required",
        ),
        ({"response_format": json_schema([])}, "response_format.json_schema.schema", "expected"),
        ({"guided_regex": ""}, "guided_regex", "length >= 1"),
        ({"guided_choice": []}, "guided_choice", "length >= 1"),
        ({"guided_choice": [""]}, "guided_choice[...]", "length >= 1"),
        ({"guided_choice": "a"}, "guided_choice", "expected"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "cannot be combined"),
        (
            {"guided_json": {"description": "x" * 300_000}},
            "guided_json",
            "this server allows 262144",
        ),
    ],
)
def test_contradictions_and_mistakes_are_named(server, path, fields, param, says):
    error = refused(server, path, **fields)
    assert error["param"].replace("[0]", "[...]") in {param, param.removesuffix("[...]")}
    assert says in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_a_400_before_anything_is_sent(server, stream):
    server.replica.script = Script(
        fail_after=0,
        error=ErrorInfo("unsupported_parameter", "the JSON schema's 'not' …", "response_format"),
    )
    answer = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={**CHAT, "stream": stream, "response_format": json_schema({"not": {}})},
    )
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": "the JSON schema's 'not' …",
        "type": "invalid_request_error",
        "param": "response_format",
        "code": "unsupported_parameter",
    }
