"""Every kind of wrong request gets one clear sentence in OpenAI's form, and the server goes on."""

from __future__ import annotations

import json

import httpx
import pytest
from gateway_harness import serving

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


def post(server, path: str, body) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return server.http.post(path, content=content, headers={"content-type": "application/json"})


def check(answer: httpx.Response, status: int, code: str, param: str | None, says: str) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param), error
    assert says.lower() in error["message"].lower(), error
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "empty"),
        (b"   ", "empty"),
        (b"{", "ends too early, at byte 1"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"model": "toy", }', "byte 17"),
        (b'{"model": "t\xffy"}', "not valid UTF-8 at byte 12"),
        (b'{"model": "\\ud800"}', "broken escape"),
        (b'{"temperature": NaN}', "NaN and Infinity are not JSON"),
        (b'{"temperature": Infinity}', "NaN and Infinity are not JSON"),
        (b'{"temperature": -Infinity}', "byte"),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"model": "toy", "prompt": "x", "messages": [{"role": "user"}]} {}', "trailing"),
    ],
)
def test_malformed(server, body, says):
    for path in (CHAT, COMPLETE):
        check(post(server, path, body), 400, "invalid_request", None, says)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": None}, "messages", "list"),
        ({"messages": []}, "messages", "length >= 1"),
        ({"messages": "Hi"}, "messages", "expected a list, got a string"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "required"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "developer"),
        ({"messages": [{"role": 7, "content": "x"}]}, "messages[0].role", "string"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "got an integer"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "empty list"),
        (
            {"messages": [*MESSAGES, {"role": "user", "content": [{"type": "text"}]}]},
            "messages[1].content[0].text",
            "required",
        ),
        ({"messages": [{"role": "user", "content": "refuse"}]}, "messages", "refuses"),
        ({"model": 5}, "model", "string"),
        ({"model": ""}, "model", "length >= 1"),
        ({"temperature": "hot"}, "temperature", "a number or null"),
        ({"temperature": 2.5}, "temperature", "<= 2.0"),
        ({"temperature": -1}, "temperature", ">= 0"),
        ({"temperature": True}, "temperature", "boolean"),
        ({"top_p": 0}, "top_p", "> 0"),
        ({"top_p": 1.5}, "top_p", "<= 1"),
        ({"top_k": -2}, "top_k", ">= -1"),
        ({"min_p": 2}, "min_p", "<= 1"),
        ({"presence_penalty": 3}, "presence_penalty", "<= 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", ">= -2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "> 0"),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"max_tokens": -5}, "max_tokens", ">= 1"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", ">= 1"),
        ({"max_tokens": 1.5}, "max_tokens", "integer"),
        ({"max_tokens": 10**30}, "max_tokens", "<= 2147483647"),
        ({"min_tokens": -1}, "min_tokens", ">= 0"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "more than the 5"),
        ({"n": 0}, "n", ">= 1"),
        ({"n": 17}, "n", "1 to 16"),
        ({"n": 10**9}, "n", "1 to 16"),
        ({"seed": 2**63}, "seed", "<="),
        ({"seed": "x"}, "seed", "integer"),
        ({"stop": ["x"] * 10_000}, "stop", "10000 strings"),
        ({"stop": ""}, "stop", "length >= 1"),
        ({"stop": [""]}, "stop[0]", "length >= 1"),
        ({"stop": ["x" * 5_000]}, "stop", "longer than 1000"),
        ({"stop": [3]}, "stop[0]", "string"),
        ({"stop_token_ids": [256]}, "stop_token_ids", "0 to 255"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", ">= 0"),
        ({"stop_token_ids": [1] * 2_000}, "stop_token_ids", "1000"),
        ({"logit_bias": {"256": 1}}, "logit_bias", "0 to 255"),
        ({"logit_bias": {"999999999999999999999": 1}}, "logit_bias", "0 to 255"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "0 to 255"),
        ({"logit_bias": {"two": 1}}, "logit_bias", "0 to 255"),
        ({"logit_bias": {"²": 1}}, "logit_bias", "0 to 255"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "<= 100"),
        ({"logit_bias": {str(i): 0 for i in range(2_000)}}, "logit_bias", "1000"),
        ({"top_logprobs": 2}, "top_logprobs", "needs 'logprobs'"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
        ({"logprobs": 3}, "logprobs", "boolean"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"priority": 2**40}, "priority", "<="),
        ({"user": 5}, "user", "string"),
    ],
)
def test_chat_fields(server, fields, param, says):
    answer = post(server, CHAT, {"model": "toy", "messages": MESSAGES, **fields})
    check(answer, 400, "invalid_request", param, says)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({}, "prompt", "required"),
        ({"prompt": []}, "prompt", "empty list"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": ["a", 1]}, "prompt", "mixes"),
        ({"prompt": [1, [2]]}, "prompt", "mixes"),
        ({"prompt": 5}, "prompt", "got an integer"),
        ({"prompt": [256]}, "prompt", "0 to 255"),
        ({"prompt": [-1]}, "prompt[0]", ">= 0"),
        ({"prompt": ["x"] * 300}, "prompt", "300 sequences; this server allows 256"),
        ({"prompt": "x", "logprobs": 30}, "logprobs", "0 to 20"),
        ({"prompt": "x", "logprobs": True}, "logprobs", "boolean"),
    ],
)
def test_completion_fields(server, fields, param, says):
    check(post(server, COMPLETE, {"model": "toy", **fields}), 400, "invalid_request", param, says)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        (CHAT, {"functions": [{}]}, "functions"),
        (CHAT, {"modalities": ["audio"]}, "modalities"),
        (CHAT, {"audio": {"voice": "x"}}, "audio"),
        (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
        (CHAT, {"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        (
            CHAT,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
            "messages[0].content[0].type",
        ),
        (COMPLETE, {"suffix": "x"}, "suffix"),
        (COMPLETE, {"tools": [{"type": "function"}]}, "tools"),
        (COMPLETE, {"best_of": 2}, "best_of"),
        (COMPLETE, {"best_of": True}, "best_of"),
        (COMPLETE, {"echo": True, "logprobs": 1}, "echo"),
        (COMPLETE, {"use_beam_search": True}, "use_beam_search"),
    ],
)
def test_not_implemented(server, path, fields, param):
    body = {"model": "toy", "messages": MESSAGES, "prompt": "x", **fields}
    answer = post(server, path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", param)
    assert param in error["message"]


def test_unknown_model(server):
    for path in (CHAT, COMPLETE):
        body = {"model": "gpt-9" + "z" * 5_000, "messages": MESSAGES, "prompt": "x"}
        answer = post(server, path, body)
        check(answer, 404, "model_not_found", "model", "served: 'toy'")
        assert len(answer.content) < 500


def test_context_length(server):
    answer = post(server, CHAT, {"model": "toy", "messages": MESSAGES, "max_tokens": 981})
    check(answer, 400, "context_length_exceeded", "messages", "holds 1000 tokens, but 20")
    answer = post(server, COMPLETE, {"model": "toy", "prompt": "x" * 2_000})
    check(answer, 400, "context_length_exceeded", "prompt", "2001 of prompt")
    answer = post(server, COMPLETE, {"model": "toy", "prompt": "x" * 995})
    assert answer.status_code == 200
    assert server.replica.requests[-1].sampling.max_tokens == 4


def test_limits_of_the_spec():
    limits = {
        "input_tokens": 30,
        "output_tokens": 10,
        "choices": 2,
        "logprobs": 3,
        "stop_strings": 1,
    }
    with serving(limits=limits) as server:
        cases = [
            ({"max_tokens": 11}, "invalid_request", "max_tokens", "1 to 10"),
            ({"n": 3}, "invalid_request", "n", "1 to 2"),
            ({"stop": ["a", "b"]}, "invalid_request", "stop", "allows 1"),
            ({"logprobs": True, "top_logprobs": 4}, "invalid_request", "top_logprobs", "0 to 3"),
            (
                {"messages": [{"role": "user", "content": "x" * 40}]},
                "context_length_exceeded",
                "messages",
                "allows 30",
            ),
        ]
        for fields, code, param, says in cases:
            answer = post(server, CHAT, {"model": "toy", "messages": MESSAGES, **fields})
            check(answer, 400, code, param, says)
        post(server, CHAT, {"model": "toy", "messages": MESSAGES})
        assert server.replica.requests[-1].sampling.max_tokens == 10
    with serving(limits={"default_output_tokens": 7}) as server:
        for path in (CHAT, COMPLETE):
            post(server, path, {"model": "toy", "messages": MESSAGES, "prompt": "x"})
            assert server.replica.requests[-1].sampling.max_tokens == 7


def test_a_long_prompt_is_tokenized_off_the_loop(server):
    answer = post(server, COMPLETE, {"model": "toy", "prompt": "x" * 1_000_000})
    check(answer, 400, "context_length_exceeded", "prompt", "1000001 of prompt")


def test_content_type(server):
    for kind, status in [("application/json; charset=utf-8", 200), ("text/plain", 400)]:
        answer = server.http.post(
            COMPLETE,
            content=b'{"model": "toy", "prompt": "x"}',
            headers={"content-type": kind},
        )
        assert answer.status_code == status
    with server.connect() as connection:
        body = b'{"model": "toy", "prompt": "x"}'
        head = f"POST {COMPLETE} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        assert connection.recv(50).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("POST", "/v1/images", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", "/health/", 404, "not_found"),
        ("GET", "/v1/models/a/b/c", 404, "model_not_found"),
        ("GET", "//", 404, "not_found"),
    ],
)
def test_paths_and_methods(server, method, path, status, code):
    answer = server.http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    if status == 405:
        assert answer.headers["allow"]


def test_head_and_options(server):
    for path in ("/health", "/ready", "/metrics", "/docs", "/v1/models"):
        answer = server.http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
    answer = server.http.options(CHAT)
    assert (answer.status_code, answer.headers["allow"]) == (204, "POST, OPTIONS")
    answer = server.http.head(CHAT)
    assert (answer.status_code, answer.content) == (405, b"")


def test_server_header_is_ours(server):
    answer = server.http.get("/health")
    assert answer.headers.get_list("server") == ["tokenpath"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("embeddings", {"input": "Hi"}),
        ("rerank", {"query": "Hi", "documents": ["Ho"]}),
        ("score", {"text_1": "Hi", "text_2": "Ho"}),
        ("classify", {"input": "Hi"}),
    ],
)
def test_a_model_that_generates_makes_no_vectors(server, path, fields):
    answer = post(server, f"/v1/{path}", {"model": "toy", **fields})
    says = f"generates text: use /v1/chat/completions or /v1/completions, not /v1/{path}"
    check(answer, 400, "unsupported_parameter", "model", says)
