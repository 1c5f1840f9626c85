"""Sleep and wake over the link: nothing is lost, and everybody hears the same state."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from link_helpers import Engine, collect, request, tokens, until
from scripted_engine import HANGS, ScriptedCore

from tokenpath.config.launch import EXIT_OK, EXIT_STUCK, UnixAddress
from tokenpath.config.spec import EngineSettings
from tokenpath.engine.life import TRANSITIONS, EngineState, IllegalMoveError, moved
from tokenpath.protocol.errors import (
    AsleepError,
    ConflictError,
    DrainingError,
    ModelFileError,
)
from tokenpath.protocol.events import Failed, FinishReason
from tokenpath.protocol.replica import ReplicaState

S = ReplicaState


class Loads:
    """Every load makes a new core; the next ones can be told to wait or to fail."""

    def __init__(self) -> None:
        self.cores: list[ScriptedCore] = []
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.step_s = 0.001

    def __call__(self, progress) -> ScriptedCore:
        progress("weights", 0.5)
        assert self.gate.wait(20)
        if self.error is not None:
            raise self.error
        self.cores.append(ScriptedCore(step_s=self.step_s))
        return self.cores[-1]


@pytest.fixture
def loads() -> Loads:
    return Loads()


async def asleep(engine, loads, **fields):
    started = engine(load=loads, settings=EngineSettings(**fields))
    link = await started.ready()
    await link.sleep(0.0)
    assert link.state is S.ASLEEP
    return started, link


async def test_sleep_lets_go_of_the_core_and_wake_makes_another(engine, loads):
    started = engine(load=loads)
    link, other = await started.ready(), await started.ready()
    assert tokens(await collect(link, request("a"))) == [1000 + i for i in range(5)]
    await link.sleep(0.0, keep_kv=False)
    await link.sleep(0.0)  # again is harmless
    [core] = loads.cores
    assert core.closed
    assert not core.kept_kv
    await until(lambda: other.state is S.ASLEEP)
    stats = await link.stats()
    assert (stats.generated_tokens_total, stats.kv_blocks_total) == (5, 0)
    assert stats.resident_bytes > 1_000_000
    assert (await started.connect()).last_stats.generated_tokens_total == 0
    late = await started.ready()
    assert (late.state, late.card.name) == (S.ASLEEP, "scripted")
    await link.wake()
    await link.wake()  # again is harmless
    assert len(loads.cores) == 2
    await until(lambda: {each.state for each in (link, other, late)} == {S.READY})
    assert len(await collect(other, request("b", max_tokens=7))) == 7
    assert (await link.stats()).generated_tokens_total == 12, "counters grow over a sleep"


async def test_a_request_wakes_the_model_and_is_the_first_served(engine, loads):
    _, link = await asleep(engine, loads)
    loads.gate.clear()
    requests = [asyncio.create_task(collect(link, request(f"r{i}"))) for i in range(3)]
    await until(lambda: link.state is S.WAKING)
    loads.gate.set()
    for each in requests:
        events = await each
        assert tokens(events) == [1000 + i for i in range(5)]
    assert len(loads.cores) == 2
    assert events[-1].finish.stages.queue_s > 0


async def test_a_request_that_waits_for_the_wake_may_leave(engine, loads):
    started, link = await asleep(engine, loads)
    loads.gate.clear()
    stream = asyncio.create_task(collect(link, request("leaves")))
    await until(lambda: link.state is S.WAKING)
    link.abort("leaves")
    [event] = await stream
    assert event.finish.reason is FinishReason.ABORT
    assert event.finish.usage.completion_tokens == 0
    loads.gate.set()
    await until(lambda: link.state is S.READY)
    await started.idle()


async def test_where_requests_do_not_wake_they_are_told_so(engine, loads):
    _, link = await asleep(engine, loads, when_asleep="refuse")
    [event] = await collect(link, request("a"))
    assert event.error.code == AsleepError.code
    assert len(loads.cores) == 1
    await link.wake()
    assert len(await collect(link, request("a"))) == 5


async def test_what_runs_is_waited_for_or_keeps_the_model_awake(engine, loads):
    loads.step_s = 0.01
    started = engine(load=loads)
    link = await started.ready()
    running = asyncio.create_task(collect(link, request("a", max_tokens=30)))
    await until(lambda: started.server._live)
    with pytest.raises(ConflictError, match=r"^1 request runs, so the model was not put to sleep"):
        await link.sleep(0.0)
    with pytest.raises(ConflictError, match=r"1 request runs still after 0\.02 s"):
        await link.sleep(0.02)
    assert link.state is S.READY
    await link.sleep(10.0)
    assert len(await running) == 30
    assert link.state is S.ASLEEP


async def test_a_request_that_comes_while_it_settles_calls_the_sleep_off(engine, loads):
    loads.step_s = 0.01
    started = engine(load=loads)
    link = await started.ready()
    running = asyncio.create_task(collect(link, request("a", max_tokens=30)))
    await until(lambda: started.server._live)
    sleeping = asyncio.create_task(link.sleep(10.0))
    await until(lambda: link.state is S.FALLING_ASLEEP)
    assert len(await collect(link, request("b", max_tokens=2))) == 2
    with pytest.raises(ConflictError, match="a request came"):
        await sleeping
    assert link.state is S.READY
    assert len(await running) == 30
    assert len(loads.cores) == 1


async def test_a_wake_that_fails_leaves_it_asleep_and_says_why(engine, loads):
    started, link = await asleep(engine, loads)
    loads.error = ModelFileError("the file is gone")
    with pytest.raises(ModelFileError, match="the file is gone"):
        await link.wake()
    assert link.state is S.ASLEEP
    [event] = await collect(link, request("a"))
    assert isinstance(event, Failed)
    assert event.error.code == "asleep"
    assert "gone" not in event.error.message, "paths and sizes are for the log"
    assert not started.serving.done()
    loads.error = None
    assert len(await collect(link, request("b"))) == 5


async def test_idleness_puts_it_to_sleep_and_work_does_not(engine, loads):
    loads.step_s = 0.02
    started = engine(load=loads, settings=EngineSettings(sleep_after_s=0.1))
    link = await started.ready()
    assert len(await collect(link, request("a", max_tokens=15))) == 15
    assert link.state is S.READY
    await until(lambda: link.state is S.ASLEEP)
    assert len(await collect(link, request("b"))) == 5
    await until(lambda: link.state is S.ASLEEP)


async def test_a_process_that_ends_while_asleep_or_waking_ends_at_once(engine, loads):
    started, link = await asleep(engine, loads)
    loads.gate.clear()
    waiting = asyncio.create_task(collect(link, request("a")))
    await until(lambda: link.state is S.WAKING)
    async with asyncio.timeout(2):
        await link.drain(30.0)
    assert (await waiting)[-1].error.code == DrainingError.code
    loads.gate.set()
    with pytest.raises(DrainingError):
        await link.wake()
    assert await started.server.drain(1.0) == 0


@given(st.lists(st.sampled_from(["ask", "sleep", "wake", "leave", "pause"]), max_size=14))
@settings(
    max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_whatever_comes_in_whatever_order_every_request_has_its_end(orders):
    asyncio.run(_any_order(orders))


async def _any_order(orders) -> None:
    with tempfile.TemporaryDirectory() as folder:
        loads = Loads()
        started = Engine(ScriptedCore(), loads, UnixAddress(Path(folder) / "s"), None)
        link = await started.ready()
        asked, told = [], []
        for number, order in enumerate(orders):
            if order == "ask":
                asked.append(asyncio.create_task(collect(link, request(f"r{number}"))))
            elif order == "sleep":
                told.append(asyncio.create_task(link.sleep(5.0 if number % 2 else 0.0)))
            elif order == "wake":
                told.append(asyncio.create_task(link.wake()))
            elif order == "leave":
                link.abort(f"r{number - 1}")
            await asyncio.sleep(0.002 if order == "pause" else 0)
        async with asyncio.timeout(10):
            for events in await asyncio.gather(*asked):
                assert not isinstance(events[-1], Failed)
                assert len(events) == 5 or events[-1].finish.reason is FinishReason.ABORT
            for outcome in await asyncio.gather(*told, return_exceptions=True):
                assert outcome is None or isinstance(outcome, ConflictError), outcome
            await link.wake()
            assert len(await collect(link, request("last"))) == 5
        assert not started.server._live
        await link.close()
        started.server.end(EXIT_OK)
        assert await started.serving == EXIT_OK


async def test_a_step_that_does_not_end_ends_the_process_and_its_requests_hear_why(engine):
    started = engine(settings=EngineSettings(step_timeout_s=0.2))
    link = await started.ready()
    events = await collect(link, request("hangs", kind=HANGS))
    assert events[-1].error.code == "replica_lost"
    assert "a step took more than 0.2 s" in events[-1].error.message
    assert await started.serving == EXIT_STUCK


async def test_a_load_without_progress_ends_the_process(engine, loads):
    loads.gate.clear()
    started = engine(load=loads, settings=EngineSettings(load_stall_s=0.2))
    assert await started.serving == EXIT_STUCK
    loads.gate.set()


def test_only_moves_of_the_table_are_made():
    for state, to in [(a, b) for a in EngineState for b in EngineState]:
        if to in TRANSITIONS[state]:
            assert moved(state, to) is to
        else:
            with pytest.raises(IllegalMoveError):
                moved(state, to)
