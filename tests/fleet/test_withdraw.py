"""Withdrawing over the link: a request that ends early tells what it has cost until then."""

from __future__ import annotations

import asyncio
import time

import pytest
from link_helpers import collect, request, tokens, until
from scripted_engine import FAILS_ALONE, ScriptedCore

from tokenpath.engine import server as server_module
from tokenpath.protocol.errors import ReplicaLostError
from tokenpath.protocol.events import FinishReason


def seconds(stages) -> float:
    return stages.queue_s + stages.prefill_s + stages.decode_s


async def test_an_abort_ends_the_stream_with_what_it_has_cost(engine):
    started = engine(ScriptedCore(step_s=0.02))
    link = await started.ready()
    neighbour = asyncio.create_task(collect(link, request("b", kind=2, max_tokens=30)))
    began = time.monotonic()
    stream = link.generate(request("a", max_tokens=10_000))
    for _ in range(3):
        await anext(stream)
    link.abort("a")
    link.abort("a")  # again tells nothing new
    steps = started.core.steps
    events = [event async for event in stream]
    lived = time.monotonic() - began
    finish = events[-1].finish
    assert finish.reason is FinishReason.ABORT
    assert {event.request_id for event in events} == {"a"}
    assert finish.usage.completion_tokens == 3 + len(tokens(events))
    assert lived - 0.2 < seconds(finish.stages) <= lived
    [aborted_after] = started.core.aborted.values()
    assert aborted_after <= steps + 1
    assert tokens(await neighbour) == [2000 + k for k in range(30)]
    assert link._wire_ids == link._streams == {}


async def test_the_answer_to_an_abort_does_not_wait_for_the_next_step(engine):
    started = engine(ScriptedCore(step_s=0.4))
    link = await started.ready()
    neighbour = link.generate(request("b", kind=2, max_tokens=10_000))
    stream = link.generate(request("a", max_tokens=10_000))
    await asyncio.gather(anext(neighbour), anext(stream))
    await anext(stream)  # a step has just begun
    asked = time.monotonic()
    link.abort("a")
    last = [event async for event in stream][-1]
    assert last.finish.reason is FinishReason.ABORT
    assert time.monotonic() - asked < 0.75  # one step, not two
    await neighbour.aclose()


async def test_an_abort_of_an_unknown_or_ended_request_is_ignored(engine):
    started = engine()
    link = await started.ready()
    link.abort("nobody")
    assert len(await collect(link, request("a"))) == 5
    link.abort("a")
    assert len(await collect(link, request("a"))) == 5
    assert started.core.aborted == {}


async def test_an_abort_reaches_the_own_request_of_two_gateways(engine):
    started = engine(ScriptedCore(step_s=0.002))
    one, two = await started.ready(), await started.ready()
    first = asyncio.create_task(collect(one, request("same", kind=1, max_tokens=10_000)))
    second = asyncio.create_task(collect(two, request("same", kind=2, max_tokens=50)))
    await until(lambda: len(started.core.live) == 2)
    one.abort("same")
    assert (await first)[-1].finish.reason is FinishReason.ABORT
    assert tokens(await second) == [2000 + k for k in range(50)]


async def test_leaving_while_an_abort_is_on_its_way_leaks_nothing(engine):
    started = engine(ScriptedCore(step_s=0.05))
    link = await started.ready()
    stream = link.generate(request("a", max_tokens=10_000))
    await anext(stream)
    link.abort("a")
    await stream.aclose()
    await started.idle()
    other = await started.ready()
    running = asyncio.create_task(collect(other, request("b", max_tokens=10_000)))
    await until(lambda: started.core.live)
    other.abort("b")
    await other.close()
    with pytest.raises(ReplicaLostError):
        await running
    await started.idle()
    assert len(started.core.aborted) == 2


async def test_waiting_for_the_running_step_is_time_in_the_queue(engine):
    started = engine(ScriptedCore(step_s=0.3))
    link = await started.ready()
    busy = link.generate(request("busy", max_tokens=10_000))
    await anext(busy)
    await asyncio.sleep(0.05)  # the next step is running
    began = time.monotonic()
    [event] = await collect(link, request("a", max_tokens=1))
    lived = time.monotonic() - began
    stages = event.finish.stages
    assert 0.05 < stages.queue_s < 0.4
    assert lived - 0.2 < seconds(stages) <= lived
    await busy.aclose()


async def test_failures_carry_stages_and_usage(engine):
    link = await engine(ScriptedCore(step_s=0.02)).ready()
    *_, failed = await collect(link, request("alone", kind=FAILS_ALONE))
    assert failed.usage.completion_tokens == 1
    assert seconds(failed.stages) >= 0.04


async def test_a_drain_tells_what_the_aborted_have_cost(engine):
    started = engine(ScriptedCore(step_s=0.02))
    link = await started.ready()
    slow = asyncio.create_task(collect(link, request("slow", max_tokens=10_000)))
    await until(lambda: started.core.generated)
    await link.drain(0.1)
    *before, last = await slow
    assert last.error.code == "draining"
    assert last.usage.completion_tokens == len(tokens(before))
    assert seconds(last.stages) >= 0.1


async def test_a_drain_does_not_wait_for_a_step_that_never_ends(engine, monkeypatch):
    monkeypatch.setattr(server_module, "LAST_STEP_S", 0.1)
    started = engine(ScriptedCore(step_s=1.0))
    link = await started.ready()
    slow = asyncio.create_task(collect(link, request("slow", max_tokens=10_000)))
    await until(lambda: started.core.live)
    began = time.monotonic()
    await link.drain(0.05)
    assert time.monotonic() - began < 0.8
    [last] = await slow
    assert last.error.code == "draining"
    assert last.stages is None
