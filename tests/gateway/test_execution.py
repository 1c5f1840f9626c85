"""The execution by itself, on a clock of its own: any order of endings, any moment of leaving."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from tokenpath.gateway import execute
from tokenpath.gateway.call import Call
from tokenpath.gateway.execute import Execution
from tokenpath.observe.ledger import Ledger
from tokenpath.observe.metrics import Metrics
from tokenpath.policy.admission import QueueLimits
from tokenpath.protocol.errors import EngineError
from tokenpath.protocol.events import (
    EngineStages,
    Failed,
    Finish,
    FinishReason,
    TokenDelta,
    Usage,
)
from tokenpath.protocol.replica import ReplicaState, ReplicaStats
from tokenpath.protocol.request import GenerationRequest, SamplingParams, TokenPrompt
from tokenpath.protocol.stages import Stage
from tokenpath.router.router import Router
from tokenpath.router.served import ServedModel


class House:
    """A replica whose sequences do what the test says, when it says, on the test's clock."""

    replica_id = "r"
    state = ReplicaState.READY
    card = None
    last_stats = ReplicaStats()

    def __init__(self, sequences: int) -> None:
        self.now = 0.0
        self.queues: dict[str, asyncio.Queue] = {}
        self.started: dict[str, float] = {}
        self.tokens: dict[str, int] = {}
        self.open = 0
        self.deaf = False
        self.last_ended = 0.0
        model = ServedModel(name="m", created=0, tokenizer=None, template=None, replicas=[self])
        self.router = Router([model])
        self.model = model
        limits = QueueLimits(requests=99, tokens=99)
        lease = self.router.reserve(model, limits, sequences=sequences, prompt_tokens=1)
        self.call = Call("r", Headers(), lambda: self.now, Ledger(lambda: self.now))
        requests = [
            GenerationRequest(
                request_id=str(i),
                model="m",
                prompt=TokenPrompt([1]),
                sampling=SamplingParams(max_tokens=9),
            )
            for i in range(sequences)
        ]
        meter = Metrics().token_meter("m", lambda: self.now)
        self.execution = Execution(requests, lease=lease, call=self.call, meter=meter)

    async def generate(self, request):
        self.queues[request.request_id] = asyncio.Queue()
        self.started[request.request_id] = self.now
        self.tokens[request.request_id] = 0
        self.open += 1
        try:
            while True:
                yield await self.queues[request.request_id].get()
        finally:
            self.open -= 1

    def token(self, name: str) -> None:
        self.tokens[name] += 1
        self.queues[name].put_nowait(TokenDelta(name, [1], "x"))

    def end(self, name: str, reason: FinishReason) -> None:
        stages, usage = self._cost(name)
        self.queues[name].put_nowait(TokenDelta(name, finish=Finish(reason, usage, stages)))

    def fail(self, name: str) -> None:
        stages, usage = self._cost(name)
        error = EngineError("no").info()
        self.queues[name].put_nowait(Failed(name, error, stages, usage))

    def abort(self, request_id: str) -> None:
        if not self.deaf and request_id in self.queues:
            self.end(request_id, FinishReason.ABORT)

    def _cost(self, name: str) -> tuple[EngineStages, Usage]:
        self.last_ended = self.now
        lived = self.now - self.started[name]
        stages = EngineStages(queue_s=lived / 2, prefill_s=lived / 4, decode_s=lived / 4)
        return stages, Usage(1, 0, self.tokens[name])

    def settled(self) -> None:
        assert self.open == 0
        assert self.router.in_flight(self.model) == 0


async def breathe() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


moves = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["token", "token", "end", "fail"]),
              st.integers(0, 8)),
    max_size=20,
)  # fmt: skip


@given(sequences=st.integers(1, 4), steps=moves, after=st.integers(0, 8))
def test_wherever_it_is_left_the_engines_time_is_accounted_once(sequences, steps, after):
    """The stages are those of the sequence that ended last, and never more than the wall time."""

    async def run() -> None:
        house = House(sequences)
        house.now += 1  # before the engine
        over: set[str] = set()
        with pytest.raises(KeyError):
            async with house.execution:
                await breathe()
                for place, what, pause in steps:
                    house.now += pause
                    name = str(place)
                    if place >= sequences or name in over:
                        continue
                    if what == "token":
                        house.token(name)
                    elif what == "end":
                        house.end(name, FinishReason.STOP)
                        over.add(name)
                    else:
                        house.fail(name)
                        over.add(name)
                    await breathe()
                raise KeyError
        house.settled()
        assert house.execution.usage == Usage(completion_tokens=sum(house.tokens.values()))
        house.now += after
        times = house.call.ledger.close()
        engine = sum(times.stages.get(s, 0) for s in (Stage.QUEUE, Stage.PREFILL, Stage.DECODE))
        assert engine == house.last_ended - 1
        assert times.stages[Stage.FLUSH] == house.now - house.last_ended
        assert times.unattributed_s == 1

    asyncio.run(run())


async def test_leaving_before_anything_was_sent_sends_nothing():
    house = House(3)
    with pytest.raises(KeyError):
        async with house.execution:
            raise KeyError
    house.settled()
    assert house.started == {}
    assert house.execution.usage == Usage(completion_tokens=0, estimated=True)
    assert list(house.call.ledger.close().stages) == [Stage.FLUSH]


async def test_a_call_that_is_cancelled_while_it_waits_for_the_last_events_leaves_nothing():
    house = House(2)
    house.deaf = True

    async def call() -> None:
        async with house.execution:
            await asyncio.Event().wait()

    task = asyncio.create_task(call())
    await breathe()
    house.token("0")
    task.cancel()
    await breathe()
    assert not task.done()
    assert house.open == 2
    house.end("0", FinishReason.ABORT)
    await breathe()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    house.settled()
    assert house.execution.reported == [Usage(1, 0, 1), None]
    assert house.call.ledger.close().stages[Stage.QUEUE] == 0


async def test_the_wait_for_the_last_events_is_bounded(monkeypatch):
    monkeypatch.setattr(execute, "LAST_EVENTS_S", 0.05)
    house = House(2)
    house.deaf = True
    with pytest.raises(KeyError):
        async with asyncio.timeout(2), house.execution:
            await breathe()
            raise KeyError
    house.settled()


async def test_output_after_leaving_is_counted_and_not_measured(monkeypatch):
    monkeypatch.setattr(execute, "LAST_EVENTS_S", 0.05)
    house = House(1)
    house.deaf = True
    with pytest.raises(KeyError):
        async with house.execution:
            await breathe()
            house.token("0")  # on its way when the client leaves
            raise KeyError
    assert house.execution.usage == Usage(completion_tokens=1, estimated=True)
    assert house.execution.first_token_s is None


async def test_one_sequence_that_does_not_answer_leaves_the_others_account(monkeypatch):
    monkeypatch.setattr(execute, "LAST_EVENTS_S", 0.05)
    house = House(2)
    with pytest.raises(KeyError):
        async with house.execution:
            await breathe()
            house.now += 8
            house.end("0", FinishReason.STOP)
            await breathe()
            house.now += 8
            house.deaf = True
            raise KeyError
    house.settled()
    times = house.call.ledger.close()
    assert (times.stages[Stage.QUEUE], times.unattributed_s) == (4, 8)
