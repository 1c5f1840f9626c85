"""The unmodified openai client and a real model that calls tools: Qwen 2.5 Coder 1.5B."""

import json

import openai
import pytest
from tests.e2e.server import serving

from tokenpath.config.paths import models_dir
from tokenpath.models.source import resolve
from tokenpath.protocol.errors import TokenpathError

pytestmark = pytest.mark.real_model
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "The city's name"}},
                "required": ["city"],
            },
        },
    }
]
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    try:
        path = resolve("qwen2.5-coder-1.5b", models_dir=models_dir(), pull=False)
    except TokenpathError:
        pytest.skip("qwen2.5-coder-1.5b has not been pulled")
    spec = {
        "models": [
            {
                "name": "qwen",
                "source": str(path),
                "engine": {"kv_cache_tokens": 4096, "dtype": "int8"},
            }
        ]
    }
    with serving(tmp_path_factory.mktemp("home"), spec) as served:
        yield openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60)


def ask(client, **options):
    options = {"messages": QUESTION, "tools": TOOLS, "temperature": 0, "max_tokens": 60} | options
    return client.chat.completions.create(model="qwen", **options)


def test_a_real_call_and_its_answer(client):
    choice = ask(client).choices[0]
    assert choice.finish_reason == "tool_calls", choice
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 31, "sky": "clear"}'}
    answer = ask(client, messages=[*QUESTION, choice.message, result], tool_choice="none").choices[
        0
    ]
    assert answer.finish_reason == "stop"
    assert "31" in answer.message.content


def test_the_stream_says_the_same(client):
    whole = ask(client).choices[0].message.tool_calls[0]
    chunks = list(ask(client, stream=True))
    deltas = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
    assert deltas[0].id
    assert (deltas[0].index, deltas[0].function.name) == (0, whole.function.name)
    assert "".join(delta.function.arguments for delta in deltas) == whole.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert not any(c.choices[0].delta.content for c in chunks)


def test_a_call_that_must_be_made_is_made(client):
    """The question has nothing to do with the tool, so that a free model would not call it."""
    hello = [{"role": "user", "content": "Say hello."}]
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice, end in (("required", "tool_calls"), (named, "stop")):
        options = {"messages": hello, "tool_choice": choice, "parallel_tool_calls": False}
        whole = ask(client, **options).choices[0]
        assert whole.finish_reason == end, whole
        (call,) = whole.message.tool_calls
        assert isinstance(json.loads(call.function.arguments)["city"], str)
        assert whole.message.content is None


def test_strict_leaves_the_model_free_to_answer_or_to_call(client):
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    (call,) = ask(client, tools=strict).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    hello = [{"role": "user", "content": "What is 2 + 2? Answer with the number alone."}]
    message = ask(client, tools=strict, messages=hello).choices[0].message
    assert "4" in message.content
    assert not message.tool_calls
