"""Embeddings, scores and classes over HTTP, from real engine processes with small random encoders."""

import base64
import json
import socket
import time
from urllib.parse import urlsplit

import httpx
import numpy as np
import openai
import pytest
import torch
from tests.e2e.server import serving
from tests.engine.encoders import (
    CLASSIFIERS,
    ENCODERS,
    made,
    reference_hidden,
    reference_logits,
    saved,
    word_tokenizer,
)
from tests.engine.reference import small_reference

TEXTS = ["the cat sleeps", "a dog", "the tide is high and the moon is low in the sea"]
FIRST = {
    "embed": ("embeddings", {"input": "a"}),
    "cross": ("score", {"text_1": "a", "text_2": "a"}),
    "classes": ("classify", {"input": "a"}),
}
ERRORS = [
    ("embeddings", {"input": []}, "input", "at least one input"),
    ("embeddings", {"input": ""}, "input", "empty"),
    ("embeddings", {"input": ["a", ""]}, "input", "Entry 1 of field 'input' is empty"),
    ("embeddings", {"input": [[]]}, "input", "empty"),
    ("embeddings", {"input": ["a", 3]}, "input", "mixes"),
    ("embeddings", {"input": ["a"] * 101}, "input", "101 entries; this server allows 100"),
    ("embeddings", {"input": [5, 900]}, "input", "token id 900"),
    ("embeddings", {"input": "cat " * 70}, "input", "has 72 tokens, but at most 64"),
    ("embeddings", {"input": "cat", "dimensions": 33}, "dimensions", "have 32"),
    ("embeddings", {"input": "cat", "encoding_format": "int8"}, "encoding_format", "not valid"),
    (
        "embeddings",
        {"input": "cat", "truncate_prompt_tokens": 65},
        "truncate_prompt_tokens",
        "1 to 64",
    ),
    (
        "embeddings",
        {"input": "cat", "truncate_prompt_tokens": 2},
        "truncate_prompt_tokens",
        "at least 3",
    ),
    ("embeddings", {}, "input", "required"),
    ("rerank", {"query": "a", "documents": []}, "documents", "not valid"),
    ("rerank", {"query": "", "documents": ["a"]}, "query", "not valid"),
    ("rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n", "not valid"),
    ("score", {"text_1": ["a", "cat"], "text_2": ["a", "dog", "cat"]}, "text_1", "equally many"),
    ("classify", {"input": "cat"}, "model", "makes embeddings"),
    ("completions", {"prompt": "cat"}, "model", "not /v1/completions"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "a"}]},
        "model",
        "makes embeddings",
    ),
]


@pytest.fixture(scope="module")
def models():
    return {
        "embed": made(ENCODERS["bert"]),
        "cross": made(CLASSIFIERS["bert-1"]),
        "classes": made(CLASSIFIERS["bert-3"]),
    }


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    home = tmp_path_factory.mktemp("vectors")
    spec = {
        "models": [
            {"name": name, "source": str(saved(model, home / name)), "engine": {"threads": 1}}
            for name, model in models.items()
        ],
        "gateway": {"limits": {"inputs": 100}},
    }
    with serving(home, spec) as served:
        # The server is ready when one of its models is.
        deadline = time.monotonic() + 60
        for model, (path, body) in FIRST.items():
            while post(served, path, model=model, **body).status_code == 503:
                assert time.monotonic() < deadline, served.output()
                time.sleep(0.05)
        yield served


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def post(server, path, **body):
    return httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)


def expected(models, texts):
    """Means of the encoder's vectors: what a folder without sentence-transformers' files means."""
    ids = [word_tokenizer().encode(text).ids for text in texts]
    return np.stack([reference_hidden(models["embed"], each).mean(0).numpy() for each in ids])


def cosine(one, other):
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def test_openais_client_gets_the_models_own_vectors(client, models):
    answer = client.embeddings.create(model="embed", input=TEXTS)
    assert [each.index for each in answer.data] == [0, 1, 2]
    vectors = np.array([each.embedding for each in answer.data])
    np.testing.assert_allclose(vectors, expected(models, TEXTS), atol=1e-5)
    tokens = sum(len(word_tokenizer().encode(text).ids) for text in TEXTS)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == tokens


def test_floats_bytes_and_token_ids_are_the_same_vectors(server, client):
    floats = client.embeddings.create(model="embed", input=TEXTS, encoding_format="float")
    raw = post(server, "embeddings", model="embed", input=TEXTS, encoding_format="base64").json()
    ids = [word_tokenizer().encode(text).ids for text in TEXTS]
    by_ids = client.embeddings.create(model="embed", input=ids, encoding_format="float")
    one = client.embeddings.create(model="embed", input=ids[0], encoding_format="float")
    for plain, coded, tokens in zip(floats.data, raw["data"], by_ids.data, strict=True):
        decoded = np.frombuffer(base64.b64decode(coded["embedding"]), "<f4")
        np.testing.assert_array_equal(np.float32(plain.embedding), decoded)
        np.testing.assert_allclose(tokens.embedding, plain.embedding, atol=1e-6)
    np.testing.assert_allclose(one.data[0].embedding, floats.data[0].embedding, atol=1e-6)


def test_dimensions_cut_and_normalise(client, models):
    answer = client.embeddings.create(model="embed", input=TEXTS[0], dimensions=8)
    cut = expected(models, TEXTS[:1])[0, :8]
    np.testing.assert_allclose(answer.data[0].embedding, cut / np.linalg.norm(cut), atol=1e-5)


def test_long_inputs_are_cut_if_asked(server, models):
    long = "cat dog " * 60
    answer = post(server, "embeddings", model="embed", input=long, truncate_prompt_tokens=-1)
    body = answer.json()
    assert body["usage"]["prompt_tokens"] == 64
    kept = " ".join(long.split()[:62])
    np.testing.assert_allclose(body["data"][0]["embedding"], expected(models, [kept])[0], atol=1e-5)


def test_an_embedding_model_ranks_by_cosine(server, models):
    query, documents = TEXTS[0], [*TEXTS[1:], {"text": TEXTS[0]}]
    body = post(
        server,
        "rerank",
        model="embed",
        query=query,
        documents=documents,
        top_n=2,
        return_documents=True,
    ).json()
    vectors = expected(models, [query, *TEXTS[1:], TEXTS[0]])
    scores = [cosine(vectors[0], each) for each in vectors[1:]]
    best = sorted(range(3), key=lambda i: -scores[i])[:2]
    assert [each["index"] for each in body["results"]] == best
    for each in body["results"]:
        assert each["relevance_score"] == pytest.approx(scores[each["index"]], abs=1e-5)
    assert body["results"][0]["document"] == {"text": TEXTS[0]}


def test_a_cross_encoder_scores_pairs(server, models):
    pairs = [word_tokenizer().encode(TEXTS[0], text) for text in TEXTS]
    truth = [
        float(reference_logits(models["cross"], pair.ids, pair.type_ids.index(1)).sigmoid())
        for pair in pairs
    ]
    body = post(server, "score", model="cross", text_1=TEXTS[0], text_2=TEXTS).json()
    assert [each["score"] for each in body["data"]] == pytest.approx(truth, abs=1e-5)
    assert body["usage"]["prompt_tokens"] == sum(len(pair.ids) for pair in pairs)
    each = post(server, "score", model="cross", text_1=[TEXTS[0]] * 3, text_2=TEXTS).json()
    assert [e["score"] for e in each["data"]] == pytest.approx(truth, abs=1e-5)
    ranked = post(server, "rerank", model="cross", query=TEXTS[0], documents=TEXTS).json()
    order = [e["index"] for e in ranked["results"]]
    assert order == sorted(range(3), key=lambda i: -truth[i])
    assert "document" not in ranked["results"][0]


def test_a_classifier_gives_labels(server, models):
    body = post(server, "classify", model="classes", input=TEXTS).json()
    for text, each in zip(TEXTS, body["data"], strict=True):
        ids = word_tokenizer().encode(text).ids
        truth = reference_logits(models["classes"], ids).softmax(-1)
        assert each["probs"] == pytest.approx(truth.tolist(), abs=1e-5)
        assert each["label"] == f"LABEL_{int(truth.argmax())}" and each["num_classes"] == 3


@pytest.mark.parametrize(("path", "fields", "param", "words"), ERRORS)
def test_wrong_requests_are_told_what_is_wrong(server, path, fields, param, words):
    answer = post(server, path, model="embed", **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and words in error["message"]


def test_a_length_error_has_its_code(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="embed", input=["cat", "cat " * 70])
    assert caught.value.code == "context_length_exceeded"
    assert "Input 1 has 72 tokens" in caught.value.message


def test_models_tell_what_they_do(client):
    listed = {model.id: model for model in client.models.list().data}
    assert {name: model.task for name, model in listed.items()} == {
        "embed": "embed",
        "cross": "rerank",
        "classes": "classify",
    }
    assert listed["embed"].dimensions == 32 and listed["embed"].max_model_len == 64
    assert listed["cross"].dimensions is None


def test_the_page_describes_the_calls(server):
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert {"/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/classify"} <= paths.keys()


def test_calls_are_counted_and_logged(server, client):
    before = server.metric("tokenpath_prompt_tokens_total")
    answer = client.embeddings.create(model="embed", input=TEXTS)
    assert server.metric("tokenpath_prompt_tokens_total") - before == answer.usage.prompt_tokens
    text = httpx.get(f"{server.url}/metrics").text
    assert 'tokenpath_requests_total{code="200",endpoint="/v1/embeddings",model="embed"' in text
    lines = [line for line in server.lines if "endpoint=/v1/embeddings" in line]
    assert f"in={answer.usage.prompt_tokens}" in lines[-1] and "prefill:" in lines[-1]


def test_a_client_that_leaves_takes_its_inputs_along(server):
    before = server.metric("tokenpath_aborts_total")
    body = json.dumps({"model": "embed", "input": ["cat dog sea " * 20] * 100}).encode()
    head = (
        "POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    deadline = time.monotonic() + 20
    while server.metric("tokenpath_aborts_total") == before:
        assert time.monotonic() < deadline, "no request was aborted"
        with socket.create_connection(("127.0.0.1", urlsplit(server.url).port)) as link:
            link.sendall(head.encode() + body)
            time.sleep(0.01)
    server.wait_idle()


def test_a_decoder_embeds_if_the_spec_says_so(tmp_path):
    model = small_reference("qwen3")
    model.save_pretrained(tmp_path / "model")
    word_tokenizer().save(str(tmp_path / "model" / "tokenizer.json"))
    engine = {"threads": 1, "task": "embed", "dtype": "float32"}
    spec = {"models": [{"name": "toy", "source": str(tmp_path / "model"), "engine": engine}]}
    with serving(tmp_path / "home", spec) as served:
        body = post(served, "embeddings", model="toy", input=TEXTS).json()
    for text, each in zip(TEXTS, body["data"], strict=True):
        ids = word_tokenizer().encode(text).ids
        with torch.inference_mode():
            last = model.model(torch.tensor([ids])).last_hidden_state[0, -1]
        np.testing.assert_allclose(each["embedding"], last / last.norm(), atol=1e-5)
