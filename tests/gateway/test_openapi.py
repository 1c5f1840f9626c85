"""The API's description fits what the API does, and its page needs nothing from elsewhere."""

from __future__ import annotations

import json
import re

import jsonschema_rs
import pytest


@pytest.fixture
def document(server):
    return server.http.get("/openapi.json").json()


def validator(document, name: str):
    return jsonschema_rs.Draft202012Validator(
        {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    )


CHAT = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize("extra", [{}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}])
def test_answers_fit_their_schemas(server, document, extra):
    answer = server.http.post("/v1/chat/completions", json={**CHAT, **extra}).json()
    validator(document, "ChatCompletion").validate(answer)
    stream = server.http.post(
        "/v1/chat/completions",
        json={**CHAT, **extra, "stream": True, "stream_options": {"include_usage": True}},
    )
    events = [line[6:] for line in stream.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    for event in events:
        validator(document, "ChatCompletionChunk").validate(json.loads(event))
    body = {"model": "toy", "prompt": "x", "logprobs": 1}
    answer = server.http.post("/v1/completions", json=body).json()
    validator(document, "Completion").validate(answer)
    validator(document, "ModelList").validate(server.http.get("/v1/models").json())
    error = server.http.post("/v1/completions", json={}).json()
    validator(document, "ErrorBody").validate(error)


def test_the_request_schema_says_what_is_refused(document):
    schema = validator(document, "ChatCompletionRequest")
    schema.validate({**CHAT, "temperature": 2, "anything_else": 1, "tools": []})
    for wrong in (
        {"temperature": 3},
        {"n": 17},
        {"tools": [1]},
        {"messages": []},
        {"top_logprobs": 21},
    ):
        assert not schema.is_valid({**CHAT, **wrong}), wrong


def test_every_route_is_described(server, document):
    assert set(document["paths"]) == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/score",
        "/v1/classify",
        "/v1/models",
        "/v1/models/{id}",
        "/health",
        "/ready",
        "/metrics",
        "/openapi.json",
        "/docs",
    }
    for path, methods in document["paths"].items():
        for method in methods:
            answer = server.http.request(method, path.replace("{id}", "toy"), json={})
            assert str(answer.status_code) in methods[method]["responses"], path


def test_the_page_is_self_contained(server, document):
    answer = server.http.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert not re.search(r"(src|href)=\"https?:|<script", answer.text)
    for path in document["paths"]:
        assert path in answer.text
    for name in document["components"]["schemas"]:
        assert f'id="{name}"' in answer.text
