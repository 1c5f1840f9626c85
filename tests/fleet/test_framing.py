import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenpath.protocol import framing
from tokenpath.protocol.errors import ErrorInfo
from tokenpath.protocol.events import (
    EngineStages,
    Failed,
    Finish,
    FinishReason,
    TokenDelta,
    TokenLogprob,
    Usage,
)
from tokenpath.protocol.framing import FrameReader, FrameSplitter, FramingError, encode
from tokenpath.protocol.link import (
    PROTOCOL_VERSION,
    Abort,
    Drain,
    Hello,
    Progress,
    StatsQuery,
    StatsReply,
    StepOutput,
    Submit,
)
from tokenpath.protocol.replica import ReplicaStats
from tokenpath.protocol.request import GenerationRequest, SamplingParams, TokenPrompt

TO = framing.to_replica_codec()
FROM = framing.from_replica_codec()

text = st.text(max_size=40)
events = st.one_of(
    st.builds(TokenDelta, text, st.lists(st.integers(0, 2**31), max_size=3), text),
    st.builds(
        Failed,
        text,
        st.builds(ErrorInfo, text, text, st.none() | text),
        st.none() | st.builds(EngineStages, st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)),
        st.none() | st.builds(Usage, st.none() | st.integers(0, 9)),
    ),
)
frames_from = st.one_of(
    st.builds(Progress, text, st.floats(0, 1)),
    st.builds(
        StepOutput, st.lists(events, max_size=5), st.none() | st.just(ReplicaStats(steps_total=3))
    ),
    st.builds(StatsReply, st.integers(0, 2**60), st.just(ReplicaStats(requests_running=1))),
)


def test_every_kind_of_request_survives():
    submit = Submit(
        GenerationRequest(
            request_id="é",
            model="m",
            prompt=TokenPrompt([1, 2, 3]),
            sampling=SamplingParams(
                max_tokens=3, logit_bias={5: -1.5}, stop=("a", "b"), seed=2**63
            ),
            timeout_s=1.5,
        )
    )
    for frame in (
        submit,
        Abort("x"),
        StatsQuery(2**63),
        Drain(1.5),
        Hello(version=PROTOCOL_VERSION, token="t"),
    ):
        assert TO.decode(encode(frame)[4:]) == frame


def test_every_kind_of_event_survives():
    delta = TokenDelta(
        "id",
        [7],
        "text",
        [TokenLogprob(7, -0.5, "\N{REPLACEMENT CHARACTER}", b"\xff", [(7, -0.5, "a", b"a")])],
        Finish(FinishReason.STOP, Usage(prompt_tokens=3), matched_stop="END"),
    )
    frame = StepOutput([delta, Failed("other", ErrorInfo("engine_error", "no"))])
    assert FROM.decode(encode(frame)[4:]) == frame


@given(st.lists(frames_from, max_size=8), st.data())
def test_any_chunking_of_the_stream_gives_the_same_frames(frames, data):
    stream = b"".join(encode(frame) for frame in frames)
    splitter, got = FrameSplitter(), []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        got += splitter.feed(stream[:cut])
        stream = stream[cut:]
    assert [FROM.decode(payload) for payload in got] == frames
    assert splitter.pending_bytes == 0


@given(st.binary(max_size=200))
def test_garbage_is_a_framing_error_and_nothing_else(junk):
    for codec in (TO, FROM):
        try:
            codec.decode(junk)
        except FramingError:
            continue
        pytest.fail("random bytes were taken for a frame")


def test_a_frame_of_the_other_direction_is_refused():
    with pytest.raises(FramingError):
        FROM.decode(encode(Abort("x"))[4:])
    with pytest.raises(FramingError):
        TO.decode(encode(Progress("x", 0.1))[4:])


def test_deep_nesting_is_a_framing_error():
    with pytest.raises(FramingError):
        TO.decode(b"\x91" * 100_000)


def test_a_too_long_frame_is_refused_at_its_header():
    splitter = FrameSplitter(max_frame_bytes=10)
    assert splitter.feed((10).to_bytes(4, "big") + b"x" * 10) == [b"x" * 10]
    with pytest.raises(FramingError, match="11 bytes is longer than the 10"):
        splitter.feed((11).to_bytes(4, "big"))


def test_a_too_long_frame_is_not_written(monkeypatch):
    monkeypatch.setattr(framing, "MAX_FRAME_BYTES", 10)
    with pytest.raises(FramingError):
        encode(Abort("x" * 100))


async def reader_over(*chunks: bytes) -> FrameReader:
    stream = asyncio.StreamReader()
    for chunk in chunks:
        stream.feed_data(chunk)
    stream.feed_eof()
    return FrameReader(stream, TO)


async def test_the_reader_tells_a_clean_end_from_a_torn_frame():
    whole = encode(Abort("a")) + encode(Abort("b"))
    reader = await reader_over(whole)
    assert [await reader.read() for _ in range(3)] == [Abort("a"), Abort("b"), None]
    torn = await reader_over(whole[:-1])
    assert await torn.read() == Abort("a")
    with pytest.raises(FramingError, match="in the middle of a frame"):
        await torn.read()
