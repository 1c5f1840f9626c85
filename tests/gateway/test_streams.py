"""However the replica cuts its output into events, and however the reader lags, the text is one."""

from __future__ import annotations

import asyncio
import json

from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from tokenpath.gateway.call import Call
from tokenpath.gateway.execute import Execution, Output
from tokenpath.gateway.openai.chat import ChatDoor
from tokenpath.gateway.openai.completions import CompletionDoor, LogprobWriter
from tokenpath.gateway.plan import Plan, Whole
from tokenpath.observe.ledger import Ledger
from tokenpath.observe.metrics import Metrics
from tokenpath.policy.admission import QueueLimits
from tokenpath.protocol.events import (
    Finish,
    FinishReason,
    TokenDelta,
    TokenLogprob,
    Usage,
)
from tokenpath.protocol.replica import ReplicaState, ReplicaStats
from tokenpath.protocol.request import GenerationRequest, SamplingParams, TokenPrompt
from tokenpath.router.router import Router
from tokenpath.router.served import ServedModel

USAGE = Usage(prompt_tokens=2, cached_prompt_tokens=1, completion_tokens=3)
FINISH = Finish(reason=FinishReason.STOP, usage=USAGE)
texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=8)
sequences = st.lists(texts, min_size=1, max_size=3)


def make_plan(n: int, **fields) -> Plan:
    model = ServedModel(name="toy", created=0, tokenizer=None, template=None, replicas=[])
    params = [SamplingParams(max_tokens=9)]
    return Plan(model=model, prompts=[[1, 2]], params=params, n=n, stream=True, **fields)


def parse(stream: bytes) -> list[dict]:
    """What an SSE client makes of the bytes, checked line by line."""
    events = stream.decode().split("\n\n")
    assert events.pop() == ""
    assert events.pop() == "data: [DONE]"
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def outputs_of(pieces: list[list[str]]) -> list[Output]:
    outputs = []
    for sequence, texts in enumerate(pieces):
        for text in texts:
            output = Output(sequence)
            output.add(TokenDelta("r", token_ids=[1], text=text))
            outputs.append(output.seal())
        last = Output(sequence)
        last.add(TokenDelta("r", finish=FINISH))
        outputs.append(last.seal())
    return outputs


@given(sequences, st.booleans())
def test_chat_streams_carry_the_whole_text(pieces, include_usage):
    plan = make_plan(len(pieces), include_usage=include_usage)
    writer = ChatDoor().writer(plan, created=7)
    stream = b"".join(map(writer.chunk, outputs_of(pieces))) + writer.closing(USAGE)
    events = parse(stream)
    found = ["" for _ in pieces]
    roles, ends = [], []
    for event in events[: -1 if include_usage else None]:
        (choice,) = event["choices"]
        found[choice["index"]] += choice["delta"].get("content", "")
        roles += [choice["index"]] if "role" in choice["delta"] else []
        ends += [choice["index"]] if choice["finish_reason"] else []
    assert found == ["".join(texts) for texts in pieces]
    assert sorted(roles) == sorted(ends) == list(range(len(pieces)))
    if include_usage:
        assert events[-1]["choices"] == []
        assert events[-1]["usage"]["total_tokens"] == 5


@given(sequences, st.text(st.characters(exclude_categories=["Cs"]), max_size=5), st.booleans())
def test_completion_streams_equal_the_whole_answer(pieces, prompt, echo):
    plan = make_plan(len(pieces), echo=[prompt] if echo else None)
    door = CompletionDoor()
    writer = door.writer(plan, created=7)
    outputs = outputs_of(pieces)
    events = parse(b"".join(map(writer.chunk, outputs)) + writer.closing(USAGE))
    found = ["" for _ in pieces]
    for event in events:
        found[event["choices"][0]["index"]] += event["choices"][0]["text"]
    wholes = [Whole() for _ in pieces]
    for output in outputs:
        wholes[output.sequence].add(output)
    answer = json.loads(door.answer(plan, wholes, USAGE, created=7))
    assert found == [choice["text"] for choice in answer["choices"]]
    assert found == [(prompt if echo else "") + "".join(texts) for texts in pieces]


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), st.data())
def test_text_offsets_point_at_their_tokens(text, data):
    """For any split of the text's bytes into tokens, and of the tokens into chunks."""
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw)), max_size=6)) | {len(raw)})
    tokens = [raw[a:b] for a, b in zip([0, *cuts], cuts, strict=False)]
    entries = [TokenLogprob(1, -1.0, t.decode(errors="replace"), t) for t in tokens]
    at = data.draw(st.integers(0, len(entries)))
    writer = LogprobWriter()
    offsets = [
        *writer.write(entries[:at]).text_offset,
        *writer.write(entries[at:]).text_offset,
    ]
    for offset, start in zip(offsets, [0, *cuts], strict=False):
        assert offset == len(raw[:start].decode(errors="ignore"))


class Cutting:
    """A replica that gives each sequence's texts with pauses in between."""

    replica_id, state, last_stats = "r", ReplicaState.READY, ReplicaStats()

    def __init__(self, pieces, pauses) -> None:
        self._pieces, self._pauses = pieces, pauses

    async def generate(self, request):
        sequence = int(request.request_id)
        for place, text in enumerate(self._pieces[sequence]):
            for _ in range(self._pauses[(sequence + place) % len(self._pauses)]):
                await asyncio.sleep(0)
            yield TokenDelta(request.request_id, token_ids=[place], text=text)
        yield TokenDelta(request.request_id, finish=FINISH)


@given(sequences, st.lists(st.integers(0, 3), min_size=1), st.integers(0, 5))
def test_a_lagging_reader_gets_the_same_text_in_fewer_pieces(pieces, pauses, lag):
    async def run() -> None:
        replica = Cutting(pieces, pauses)
        model = ServedModel(name="m", created=0, tokenizer=None, template=None, replicas=[replica])
        router = Router([model])
        lease = router.reserve(
            model, QueueLimits(requests=9, tokens=9), sequences=len(pieces), prompt_tokens=1
        )
        clock = asyncio.get_running_loop().time
        call = Call(rid="r", headers=Headers(), clock=clock, ledger=Ledger(clock))
        requests = [
            GenerationRequest(
                request_id=str(i),
                model="m",
                prompt=TokenPrompt([1]),
                sampling=SamplingParams(max_tokens=9),
            )
            for i in range(len(pieces))
        ]
        meter = Metrics().token_meter("m", clock)
        wholes = [Whole() for _ in pieces]
        taken = 0
        async with Execution(requests, lease=lease, call=call, meter=meter) as execution:
            while not execution.done():
                await execution.wait()
                for _ in range(lag):
                    await asyncio.sleep(0)
                for output in execution.take():
                    wholes[output.sequence].add(output)
                    taken += 1
        assert [whole.text for whole in wholes] == ["".join(texts) for texts in pieces]
        assert taken <= sum(len(texts) + 1 for texts in pieces)
        assert router.in_flight(model) == 0
        assert execution.reported == [FINISH.usage] * len(pieces)

    asyncio.run(run())
