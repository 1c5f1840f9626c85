"""What a careless or hostile client sends: one clear sentence each, and the server goes on."""

import json

import httpx
import pytest

pytestmark = pytest.mark.real_model

CHAT = {"model": "gemma", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
TEXT = {"model": "gemma", "prompt": "x", "max_tokens": 1}

CASES = [
    # (path, change to the good body, status, param, words of the sentence)
    ("chat/completions", {"model": "nothing"}, 404, "model", "gemma"),
    ("chat/completions", {"messages": []}, 400, "messages", "length >= 1"),
    ("chat/completions", {"messages": "x"}, 400, "messages", "expected a list"),
    (
        "chat/completions",
        {"messages": [{"role": "wizard", "content": "x"}]},
        400,
        "messages",
        "must be one of system",
    ),
    ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages", "content"),
    ("chat/completions", {"max_tokens": 0}, 400, "max_tokens", "1"),
    ("chat/completions", {"max_tokens": -5}, 400, "max_tokens", "1"),
    ("chat/completions", {"max_tokens": "many"}, 400, "max_tokens", "int"),
    ("chat/completions", {"max_tokens": 10_000_000}, 400, "messages", "10000000"),
    ("chat/completions", {"n": 1000}, 400, "n", "16"),
    ("chat/completions", {"n": 0}, 400, "n", "1"),
    ("chat/completions", {"temperature": -1}, 400, "temperature", "0"),
    ("chat/completions", {"temperature": "hot"}, 400, "temperature", "expected a number"),
    ("chat/completions", {"top_p": 0}, 400, "top_p", "0"),
    ("chat/completions", {"stop": ["x"] * 10_000}, 400, "stop", "16"),
    ("chat/completions", {"stop": [""]}, 400, "stop", "length >= 1"),
    ("chat/completions", {"top_logprobs": 50, "logprobs": True}, 400, "top_logprobs", "20"),
    ("chat/completions", {"top_logprobs": 5}, 400, "top_logprobs", "logprobs"),
    ("chat/completions", {"logit_bias": {"99999999": 1}}, 400, "logit_bias", "99999999"),
    ("chat/completions", {"logit_bias": {"x": 1}}, 400, "logit_bias", "x"),
    ("chat/completions", {"tools": [{"type": "function"}]}, 400, "tools", "required"),
    ("chat/completions", {"response_format": {"type": "xml"}}, 400, "response_format", "xml"),
    (
        "chat/completions",
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        400,
        "guided_regex",
        "only one",
    ),
    (
        "completions",
        {"guided_json": {"not": {}}},
        400,
        "guided_json",
        "'not' at # is not supported",
    ),
    ("completions", {"guided_json": {"$ref": "http://x/y"}}, 400, "guided_json", "same schema"),
    ("completions", {"guided_json": {"$ref": "#"}}, 400, "guided_json", "without an end"),
    ("completions", {"guided_regex": "("}, 400, "guided_regex", "unclosed group"),
    ("completions", {"guided_grammar": "root ::= ("}, 400, "guided_grammar", "grammar"),
    ("completions", {"guided_regex": "a" * 300_000}, 400, "guided_regex", "262144"),
    ("completions", {"guided_choice": []}, 400, "guided_choice", "length >= 1"),
    ("chat/completions", {"seed": 2**80}, 400, "seed", ""),
    ("completions", {"prompt": [[]]}, 400, "prompt", "empty"),
    ("completions", {"prompt": [-1]}, 400, "prompt", ">= 0"),
    ("completions", {"prompt": [10**9]}, 400, "prompt", "1000000000"),
    ("completions", {"prompt": "word " * 30_000}, 400, "prompt", "token"),
    ("completions", {"prompt": {"text": "x"}}, 400, "prompt", ""),
    ("completions", {"best_of": 4}, 400, "best_of", ""),
    ("completions", {"suffix": "x"}, 400, "suffix", ""),
    ("completions", {"logprobs": 99}, 400, "logprobs", "20"),
]


@pytest.mark.parametrize(("path", "change", "status", "param", "words"), CASES)
def test_each_mistake_is_named(server, path, change, status, param, words):
    good = CHAT if path.startswith("chat") else TEXT
    answer = httpx.post(f"{server.url}/v1/{path}", json=good | change, timeout=30)
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert error["param"] is not None
    assert error["param"].split("[")[0].split(".")[0] == param
    assert words in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "JSON"),
        (b"{", 400, "JSON"),
        (b"[]", 400, "object"),
        (b'{"model": "gemma", "prompt": "\xff\xfe"}', 400, "UTF-8"),
        (b'{"model": "gemma", "prompt": "\\ud800"}', 400, ""),
        (b'{"model": "gemma", "prompt": "x", "temperature": NaN}', 400, "JSON"),
        (b'{"model": "gemma", "prompt": "x", "temperature": 1e999}', 400, ""),
        (b'{"model": "gemma", "prompt": "x", "max_tokens": 1.5}', 400, "int"),
        (b'{"model": "gemma", "prompt": ' + b"[" * 100_000, 400, ""),
    ],
)
def test_bodies_that_are_not_requests(server, body, status, words):
    answer = httpx.post(
        f"{server.url}/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("announced", [True, False])
def test_a_50_mb_body_is_refused_early(server, announced):
    data = b'{"model": "gemma", "prompt": "' + b"x" * 50_000_000 + b'"}'

    def chunks():
        for start in range(0, len(data), 1 << 16):
            yield data[start : start + (1 << 16)]

    content = data if announced else chunks()
    try:
        answer = httpx.post(f"{server.url}/v1/completions", content=content, timeout=30)
    except httpx.WriteError:
        pytest.skip("the server closed the connection before the client read its answer")
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"


def test_wrong_methods_and_paths(server):
    assert httpx.get(f"{server.url}/v1/completions").status_code == 405
    missing = httpx.post(f"{server.url}/v1/nothing", json={})
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "not_found"


def test_request_ids_go_in_and_out(server):
    given = httpx.post(
        f"{server.url}/v1/completions", json=TEXT, headers={"x-request-id": "my-id-1"}, timeout=30
    )
    assert given.headers["x-request-id"] == "my-id-1"
    evil = httpx.get(f"{server.url}/v1/models", headers={"x-request-id": "a b\tc" * 100})
    assert evil.headers["x-request-id"] not in {"a b\tc" * 100, ""}


def test_the_server_went_on_and_logged_no_prompt(server):
    secret = "xyzzy-plugh-7261"
    answer = httpx.post(f"{server.url}/v1/completions", json=TEXT | {"prompt": secret}, timeout=30)
    assert answer.status_code == 200
    httpx.post(f"{server.url}/v1/completions", json=TEXT | {"prompt": secret, "n": 0}, timeout=30)
    httpx.post(f"{server.url}/v1/completions", content=json.dumps({"prompt": [secret]}), timeout=30)
    assert secret not in server.output()
    assert "Traceback" not in server.output()
