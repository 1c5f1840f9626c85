"""The unmodified openai client against the real server and the real Gemma 270M."""

import math

import httpx
import openai
import pytest

pytestmark = pytest.mark.real_model
PROMPT = "The three primary colours are red,"
MESSAGES = [{"role": "user", "content": "Name a colour."}]


def test_models(client):
    assert [m.id for m in client.models.list().data] == ["gemma"]
    assert client.models.retrieve("gemma").object == "model"
    with pytest.raises(openai.NotFoundError, match="nothing"):
        client.models.retrieve("nothing")


def test_completion_streamed_and_whole_agree(client):
    asked = {"model": "gemma", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True))
    assert whole.choices[0].text == "".join(c.choices[0].text for c in chunks)
    assert "blue" in whole.choices[0].text
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 24
    assert len(chunks) > 5


def test_chat_streamed_and_whole_agree(client):
    asked = {"model": "gemma", "messages": MESSAGES, "max_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    *chunks, last = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert streamed == whole.choices[0].message.content
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_a_second_identical_prompt_is_cached(client):
    asked = {"model": "gemma", "prompt": "a b c d e f g h " * 20, "max_tokens": 1}
    client.completions.create(**asked)
    usage = client.completions.create(**asked).usage
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_two_choices_differ_and_are_reproducible(client):
    asked = {"model": "gemma", "messages": MESSAGES, "max_tokens": 12, "n": 2, "seed": 5}
    first, second = (client.chat.completions.create(**asked) for _ in range(2))
    texts = [c.message.content for c in first.choices]
    assert [c.index for c in first.choices] == [0, 1]
    assert texts == [c.message.content for c in second.choices]
    assert texts[0] != texts[1]
    assert first.usage.completion_tokens == 24


def test_two_streamed_choices_equal_the_whole(client):
    asked = {"model": "gemma", "messages": MESSAGES, "max_tokens": 12, "n": 2, "seed": 5}
    whole = client.chat.completions.create(**asked)
    texts = ["", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [c.message.content for c in whole.choices]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(client, stream):
    asked = {"model": "gemma", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    text = client.completions.create(**asked).choices[0].text
    stop = text[5:9]
    answer = client.completions.create(**asked, stop=[stop], stream=stream)
    chunks = list(answer) if stream else [answer]
    cut = "".join(c.choices[0].text for c in chunks)
    assert cut == text[: text.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_logprobs_of_chat(client):
    answer = client.chat.completions.create(
        model="gemma", messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 6
    assert "".join(t.token for t in content) == answer.choices[0].message.content
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == token.logprob, "greedy takes the likeliest"
        assert sum(math.exp(t.logprob) for t in token.top_logprobs) <= 1 + 1e-6
        assert bytes(token.bytes).decode() == token.token


def test_logprobs_of_completions(client):
    answer = client.completions.create(
        model="gemma", prompt=PROMPT, max_tokens=4, temperature=0, logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert len(logprobs.token_logprobs) == 4
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    assert logprobs.text_offset[0] == 0 or logprobs.text_offset[0] == len(PROMPT)


def test_logit_bias_forces_and_forbids(client):
    asked = {"model": "gemma", "prompt": PROMPT, "max_tokens": 3, "temperature": 0}
    forced = client.completions.create(**asked, logit_bias={"1000": 100}, logprobs=0)
    assert len(set(forced.choices[0].logprobs.tokens)) == 1


def test_errors_are_typed(client, server):
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-nothing", prompt="x")
    assert missing.value.code == "model_not_found"
    assert "gemma" in missing.value.message
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="gemma", prompt="word " * 20_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="gemma", prompt="x", temperature=9)
    assert bad.value.param == "temperature"
    assert httpx.get(f"{server.url}/v1/nothing").json()["error"]["code"] == "not_found"


def test_a_model_without_template_says_so(gemma_path, tmp_path):
    from tests.e2e.server import serving

    spec = {
        "models": [{"name": "base", "source": str(gemma_path), "engine": {"kv_cache_tokens": 1024}}]
    }
    with serving(tmp_path / "home", spec) as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="chat template"):
            client.chat.completions.create(model="base", messages=MESSAGES)
        assert client.completions.create(model="base", prompt="1 2 3", max_tokens=3).choices[0].text
        assert "curl" in served.output()


async def test_the_async_client_streams_many_at_once(server):
    import asyncio

    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    async def ask(index):
        stream = await client.completions.create(
            model="gemma", prompt=f"{index} plus one is", max_tokens=12, temperature=0, stream=True
        )
        return "".join([c.choices[0].text async for c in stream])

    together = await asyncio.gather(*(ask(i) for i in range(16)))
    assert together == [await ask(i) for i in range(16)]
    await client.close()
