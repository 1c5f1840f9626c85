"""Structured output by the unmodified openai client, against the real server and the real Gemma."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from typing import Literal

import httpx
import jsonschema_rs
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field
from tests.e2e.server import serving

pytestmark = pytest.mark.real_model
MESSAGES = [{"role": "user", "content": "Describe a person as JSON."}]


class Pet(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["cat", "dog"]
    name: str = Field(max_length=8)


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=130)
    pets: list[Pet] = Field(max_length=1)


@pytest.fixture(scope="module")
def server(gemma_spec, tmp_path_factory):
    """In int8, which is several times as fast as what the other tests use."""
    with serving(tmp_path_factory.mktemp("home"), gemma_spec(dtype="int8")) as served:
        yield served


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def test_a_pydantic_class_comes_back_as_itself(client):
    answer = client.chat.completions.parse(
        model="gemma", messages=MESSAGES, response_format=Person, max_tokens=150, temperature=0
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_streamed_it_is_the_same(client):
    asked = {
        "model": "gemma", "messages": MESSAGES, "temperature": 0, "max_tokens": 150,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "person", "strict": True, "schema": Person.model_json_schema()},
        },
    }  # fmt: skip
    whole = client.chat.completions.create(**asked).choices[0]
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.message.content
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "stop"
    assert len(chunks) > 5


def test_any_json_object(client):
    answer = client.chat.completions.create(
        model="gemma", messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=60,
        temperature=0,
    ).choices[0]  # fmt: skip
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.message.content), dict)
    else:
        assert answer.message.content.startswith("{")


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": r"\d{4}-\d{2}"}, r"\d{4}-\d{2}"),
        ({"structured_outputs": {"regex": r"[a-z]{5}!"}}, r"[a-z]{5}!"),
        ({"guided_choice": ["red", "green"]}, "red|green"),
        ({"structured_outputs": {"choice": ["日本", "é🙂"]}}, "日本|é🙂"),
        ({"guided_grammar": 'root ::= "<" [0-9]{1,3} ("," [0-9]{1,3}){2} ">"'}, r"<\d+,\d+,\d+>"),
        ({"structured_outputs": {"grammar": 'start: "a" B\nB: /b{3}/'}}, "abbb"),
    ],
)
def test_vllms_fields_in_completions(client, fields, pattern):
    answer = client.completions.create(
        model="gemma", prompt="The answer is ", max_tokens=60, seed=3, extra_body=fields,
    ).choices[0]  # fmt: skip
    assert answer.finish_reason == "stop", answer.text
    assert re.fullmatch(pattern, answer.text)


def test_several_choices_with_logprobs_and_seeds(client):
    asked = {
        "model": "gemma", "prompt": "A colour: ", "n": 3, "seed": 11, "logprobs": 2, "max_tokens": 9,
        "extra_body": {"guided_choice": ["red", "green", "blue", "yellow"]},
    }  # fmt: skip
    first, second = (client.completions.create(**asked) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert set(texts) <= {"red", "green", "blue", "yellow"}
    for choice in first.choices:
        assert "".join(choice.logprobs.tokens) == choice.text
        assert all(len(top) == 2 for top in choice.logprobs.top_logprobs)


def test_a_bad_schema_is_a_typed_error_and_disturbs_nobody(client, server):
    running = client.completions.create(
        model="gemma", prompt="1 2 3", max_tokens=60, temperature=0, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    tokens = [next(running)]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model="gemma", messages=MESSAGES, stream=stream,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"items": {"uniqueItems": True}}},
                },
            )  # fmt: skip
        assert caught.value.param == "response_format"
        assert caught.value.code == "unsupported_parameter"
        assert "'uniqueItems' at #/items is not supported" in caught.value.message
    tokens += running
    assert len([c for c in tokens if c.choices[0].text]) > 10
    assert server.metric("tokenpath_grammars_compiled_total") > 0


async def test_constrained_and_free_requests_share_the_batch(server):
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    schema = Person.model_json_schema()

    async def ask(index: int) -> str:
        extra = {"guided_json": schema} if index % 2 else {}
        answer = await client.completions.create(
            model="gemma", prompt=f"{index} plus one is", max_tokens=150 if extra else 20,
            temperature=0, extra_body=extra,
        )  # fmt: skip
        if extra:
            assert answer.choices[0].finish_reason == "stop"
            jsonschema_rs.validator_for(schema).validate(json.loads(answer.choices[0].text))
        return answer.choices[0].text

    together = await asyncio.gather(*(ask(i) for i in range(8)))
    assert together == [await ask(i) for i in range(8)]
    await client.close()


def test_a_large_schema_does_not_stop_the_others(client, server):
    """A free stream keeps its pace while new large schemas are compiled, one after another."""
    properties = {
        f"field_{i}": {"type": "string", "pattern": f"^[a-z]{{{i % 30 + 1}}}$"} for i in range(1500)
    }
    body = {
        "model": "gemma",
        "prompt": "x",
        "max_tokens": 1,
        "guided_json": {"properties": properties, "type": "object"},
    }
    stream = client.completions.create(
        model="gemma", prompt="1 2 3", max_tokens=150, temperature=0, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    next(stream)
    gaps, last, sent = [], time.perf_counter(), False
    with httpx.Client(timeout=60) as http:
        answers = []

        def send() -> None:
            answers.append(http.post(f"{server.url}/v1/completions", json=body).status_code)

        thread = threading.Thread(target=send)
        for _ in stream:
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
            if not sent and len(gaps) == 20:
                thread.start()
                sent = True
        thread.join()
    assert answers == [200]
    assert max(gaps) < 1.5, f"the worst gap was {max(gaps):.2f} s"
