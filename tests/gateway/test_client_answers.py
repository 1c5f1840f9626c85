"""The unmodified ``openai`` client against the application: answers, streams and typed errors."""

from __future__ import annotations

import openai
import pytest
from gateway_harness import Script, serving

from tokenpath.protocol.errors import ErrorInfo

MESSAGES = [{"role": "user", "content": "Hi"}]


def test_chat(server):
    answer = server.client().chat.completions.create(model="toy", messages=MESSAGES)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "toy"
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello world!")
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    prompt = len(b"user: Hi\nassistant: ")
    assert answer.usage.prompt_tokens == prompt
    assert answer.usage.completion_tokens == 4
    assert answer.usage.total_tokens == prompt + 4
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    request = server.replica.requests[0]
    assert request.prompt.token_ids == list(b"user: Hi\nassistant: ")
    assert request.sampling.max_tokens == 1_000 - prompt
    assert 590 < request.timeout_s <= 600


def test_chat_stream(server):
    stream = server.client().chat.completions.create(
        model="toy", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello world!"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 4
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_stream_without_usage_has_none(server):
    stream = server.client().chat.completions.create(model="toy", messages=MESSAGES, stream=True)
    assert all(chunk.choices and chunk.usage is None for chunk in stream)


def test_choices_take_seeds_in_order(server):
    answer = server.client().chat.completions.create(
        model="toy", messages=MESSAGES, n=3, seed=41, temperature=0.5
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    seeds = {request.request_id[-1]: request.sampling.seed for request in server.replica.requests}
    assert seeds == {"0": 41, "1": 42, "2": 43}
    assert len({request.request_id for request in server.replica.requests}) == 3
    assert answer.usage.prompt_tokens == 20
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_chat_logprobs(server):
    answer = server.client().chat.completions.create(
        model="toy", messages=MESSAGES, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["Hello", " wor", "ld", "!"]
    assert content[0].bytes == list(b"Hello")
    assert [top.token for top in content[0].top_logprobs] == ["t0", "t1"]
    assert content[0].logprob == -0.5


def test_chat_logprobs_streamed(server):
    stream = server.client().chat.completions.create(
        model="toy", messages=MESSAGES, logprobs=True, stream=True
    )
    tokens = [
        entry.token
        for chunk in stream
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert tokens == ["Hello", " wor", "ld", "!"]
    assert server.replica.requests[0].sampling.logprobs == 0


def test_every_parameter_arrives(server):
    server.client().chat.completions.create(
        model="toy",
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "a"}]},
            {
                "role": "user",
                "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}],
            },
        ],
        max_completion_tokens=5,
        temperature=0.25,
        top_p=0.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"7": -100},
        stop=["x", "y"],
        user="me",
        extra_body={
            "top_k": 3,
            "min_p": 0.1,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "stop_token_ids": [9],
            "ignore_eos": True,
            "priority": -4,
            "something_unknown": {"is": "ignored"},
            "tools": [],
            "response_format": {"type": "text"},
        },
    )
    request = server.replica.requests[0]
    assert bytes(request.prompt.token_ids) == b"system: a\nuser: b\nc\nassistant: "
    sampling = request.sampling
    assert request.priority == -4
    assert sampling.max_tokens == 5
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.25, 0.5, 3)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.min_tokens) == (0.1, 1.5, 2)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert sampling.logit_bias == {7: -100.0}
    assert sampling.stop == ("x", "y")
    assert sampling.stop_token_ids == (9,)
    assert sampling.ignore_eos


def test_completion(server):
    answer = server.client().completions.create(model="toy", prompt="Say", max_tokens=2, echo=True)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == "SayHello wor"
    assert answer.choices[0].finish_reason == "length"
    assert server.replica.requests[0].prompt.token_ids == [1, *b"Say"]


def test_completion_defaults_to_16_tokens(server):
    server.client().completions.create(model="toy", prompt="Say")
    assert server.replica.requests[0].sampling.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (["a", "b"], [[1, 97], [1, 98]]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_completion_prompt_forms(server, prompt, expected):
    answer = server.client().completions.create(model="toy", prompt=prompt, n=2)
    assert len(answer.choices) == 2 * len(expected)
    by_place = sorted(server.replica.requests, key=lambda r: int(r.request_id.split("-")[1]))
    assert [r.prompt.token_ids for r in by_place] == [p for p in expected for _ in range(2)]
    assert answer.usage.prompt_tokens == sum(map(len, expected))


def test_completion_echo_of_token_ids(server):
    answer = server.client().completions.create(model="toy", prompt=[[72, 105], [33]], echo=True)
    assert [choice.text[:2] for choice in answer.choices] == ["Hi", "!H"]


def test_completion_logprobs(server):
    answer = server.client().completions.create(model="toy", prompt="x", logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["Hello", " wor", "ld", "!"]
    assert logprobs.text_offset == [0, 5, 9, 11]
    assert logprobs.top_logprobs[0] == {"t0": -0.5}


def test_completion_stream(server):
    stream = server.client().completions.create(
        model="toy", prompt=["a", "b"], n=2, stream=True, echo=True, logprobs=None
    )
    texts = dict.fromkeys(range(4), "")
    ends = {}
    for chunk in stream:
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        ends.setdefault(choice.index, choice.finish_reason)
        ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert texts == {0: "aHello world!", 1: "aHello world!", 2: "bHello world!", 3: "bHello world!"}
    assert set(ends.values()) == {"stop"}


def test_models(server):
    listed = server.client().models.list()
    assert [model.id for model in listed] == ["toy"]
    one = server.client().models.retrieve("toy")
    assert (one.object, one.created, one.owned_by) == ("model", 1_700_000_000, "tokenpath")
    with pytest.raises(openai.NotFoundError):
        server.client().models.retrieve("other")


def test_error_before_output_keeps_its_status(server):
    server.replica.script = Script(fail_after=0, error=ErrorInfo("overloaded", "Full."))
    with pytest.raises(openai.RateLimitError) as caught:
        server.client().chat.completions.create(model="toy", messages=MESSAGES, stream=True)
    assert caught.value.code == "overloaded"
    server.replica.script = Script(fail_after=0)
    with pytest.raises(openai.InternalServerError) as caught:
        server.client().completions.create(model="toy", prompt="x")
    assert caught.value.body["message"] == "It broke."


def test_error_after_output_is_an_event(server):
    server.replica.script = Script(fail_after=2)
    stream = server.client().chat.completions.create(model="toy", messages=MESSAGES, stream=True)
    seen = []
    with pytest.raises(openai.APIError) as caught:
        seen.extend(chunk.choices[0].delta.content for chunk in stream)
    assert caught.value.body["code"] == "engine_error"


def test_unexpected_exception_after_output_is_an_event(server):
    server.replica.script = Script(fail_after=2, error=ZeroDivisionError("secret prompt"))
    stream = server.client().completions.create(model="toy", prompt="x", stream=True)
    texts = []
    with pytest.raises(openai.APIError) as caught:
        texts.extend(chunk.choices[0].text for chunk in stream)
    assert caught.value.body["code"] == "engine_error"
    assert "secret" not in str(caught.value)


def test_unexpected_exception_is_a_500_without_detail(server):
    server.replica.script = Script(fail_after=0, error=ZeroDivisionError("secret prompt"))
    with pytest.raises(openai.InternalServerError) as caught:
        server.client().chat.completions.create(model="toy", messages=MESSAGES)
    assert "secret" not in str(caught.value)
    server.replica.script = Script()
    assert server.client().chat.completions.create(model="toy", messages=MESSAGES).choices


def test_request_id_is_returned(server):
    client = server.client(default_headers={"X-Request-Id": "my-id.1"})
    answer = client.chat.completions.create(model="toy", messages=MESSAGES)
    assert answer._request_id == "my-id.1"
    client = server.client(default_headers={"X-Request-Id": "bad id " + "x" * 200})
    answer = client.chat.completions.create(model="toy", messages=MESSAGES)
    assert len(answer._request_id) == 32


def test_base_model_explains_that_it_cannot_chat():
    with serving(template=None) as served:
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            served.client().chat.completions.create(model="toy", messages=MESSAGES)
        assert served.client().completions.create(model="toy", prompt="x").choices
