"""What a client makes of a stream's bytes, however they were cut."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenpath.bench import wire
from tokenpath.bench.observe import ErrorKind, Observation
from tokenpath.bench.sse import EventSplitter
from tokenpath.bench.wire import Api, PromptKind
from tokenpath.bench.workload import Domain, PlannedRequest, Segment

STREAM = (
    b": keep-alive\n\n"
    b"data: one\n\n"
    b"event: x\r\ndata: two\r\ndata:three\r\n\r\n"
    b"id: 7\n\n"
    b"data:\n\n"
    b"data: [DONE]\n\n"
    b"data: cut off"
)
EVENTS = [b"one", b"two\nthree", b"", b"[DONE]"]


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_any_chunking_gives_the_same_events(cuts):
    places = [0, *sorted(cuts), len(STREAM)]
    splitter = EventSplitter()
    found = [event for a, b in pairwise(places) for event in splitter.feed(STREAM[a:b])]
    assert found == EVENTS


@pytest.mark.parametrize(
    ("choice", "carries"),
    [
        ({"delta": {"role": "assistant"}}, False),
        ({"delta": {"role": "assistant", "content": ""}}, False),
        ({"delta": {"content": "a"}}, True),
        ({"delta": {"reasoning_content": "a"}}, True),
        ({"delta": {"tool_calls": [{"index": 0}]}}, True),
        ({"delta": {}, "finish_reason": "stop"}, False),
        ({"delta": {"content": None}}, False),
        ({"text": ""}, False),
        ({"text": " "}, True),
        ({"text": "", "token_ids": [5]}, True),
    ],
)
def test_which_chunks_carry_tokens(choice, carries):
    assert wire.decode_chunk(json.dumps({"choices": [choice]})).carries_tokens is carries


def test_a_usage_chunk_carries_none():
    chunk = wire.decode_chunk(
        b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":2}}}'
    )
    assert not chunk.carries_tokens
    assert chunk.usage is not None
    assert (
        chunk.usage.prompt_tokens,
        chunk.usage.completion_tokens,
        chunk.usage.cached_tokens,
    ) == (3, 4, 2)


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (b'{"error":{"message":"m","code":"c","type":"t"}}', "c", "m"),
        (b'{"error":{"message":"m","code":429}}', 429, "m"),
        (b'{"error":"flat"}', None, "flat"),
        (b'{"message":"plain"}', None, "plain"),
        (b'{"detail":"not found"}', None, "not found"),
        (b"<html>", None, "<html>"),
        (b"[]", None, "[]"),
        (b"", None, ""),
    ],
)
def test_errors_of_any_server(body, code, message):
    found = wire.error_of(body)
    assert (found.code, found.message) == (code, message)


def observed(events, *, status=200, content_type="text/event-stream; charset=utf-8"):
    seen = Observation()
    seen.head(status, content_type)
    for at, data in events:
        seen.body(data, at)
    seen.finish()
    return seen


def data(payload):
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def token(text="x", finish=None):
    return data({"choices": [{"text": text, "finish_reason": finish}]})


def test_every_gap_between_output_events_is_kept():
    role = data({"choices": [{"delta": {"role": "assistant"}}]})
    seen = observed(
        [
            (1.0, role),
            (2.0, token()),
            (2.5, token() + token()),
            (4.0, token("", "stop")),
            (9.0, b"data: [DONE]\n\n"),
        ]
    )
    assert seen.error is None
    assert seen.first_output_at == 2.0
    assert seen.last_output_at == 2.5
    assert seen.output_events == 3
    assert list(seen.gaps) == [0.5, 0.0]
    assert (seen.finish_reason, seen.done) == ("stop", True)


@pytest.mark.parametrize(
    ("events", "options", "kind", "code"),
    [
        ([(1, token())], {}, ErrorKind.TRUNCATED, None),
        (
            [(1, token() + data({"error": {"message": "m", "code": "c"}}))],
            {},
            ErrorKind.STREAM,
            "c",
        ),
        ([(1, data({"error": "m"}) + b"data: [DONE]\n\n")], {}, ErrorKind.STREAM, None),
        ([(1, b"data: {\n\n")], {}, ErrorKind.MALFORMED, None),
        ([(1, b"{}")], {"content_type": "application/json"}, ErrorKind.MALFORMED, None),
        ([(1, b'{"error":{"message":"m","type":"t"}}')], {"status": 429}, ErrorKind.STATUS, "t"),
        ([], {"status": 307}, ErrorKind.STATUS, None),
    ],
)
def test_what_is_not_a_whole_answer_is_an_error(events, options, kind, code):
    error = observed(events, **options).error
    assert error is not None
    assert (error.kind, error.code) == (kind, code)
    assert error.status == options.get("status", 200)


def test_request_bodies():
    planned = PlannedRequest(0, (Segment(Domain.UNIQUE, 0, 12),), 7)
    shape = wire.RequestShape(
        api=Api.COMPLETIONS,
        model="m",
        prompt_kind=PromptKind.TOKENS,
        vocabulary=(1000, 1100),
        seed=1,
        temperature=0.5,
        ignore_eos=True,
    )
    body = json.loads(wire.request_body(planned, shape))
    prompt = body.pop("prompt")
    assert len(prompt) == 12
    assert all(1000 <= token_id < 1100 for token_id in prompt)
    assert body == {
        "model": "m",
        "max_tokens": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "ignore_eos": True,
    }
    chat = wire.RequestShape(
        api=Api.CHAT,
        model="m",
        prompt_kind=PromptKind.WORDS,
        vocabulary=(0, 2),
        seed=1,
        temperature=None,
        ignore_eos=False,
    )
    body = json.loads(wire.request_body(planned, chat))
    assert len(body["messages"][0]["content"].split(" ")) == 12
    assert "temperature" not in body
    assert "ignore_eos" not in body
