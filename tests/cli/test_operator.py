"""Sleep, wake and reload of a server's models: scripted engines in real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fleet"))
import scripted_engine
from link_helpers import request, tokens, until

from tokenpath.cli import operator as operator_module
from tokenpath.cli.operator import Operator
from tokenpath.config.spec import EngineSettings
from tokenpath.fleet.local import LocalFleet, ReplicaPlan
from tokenpath.fleet.reload import RELOAD_TRANSITIONS, ReloadState
from tokenpath.observe.metrics import Metrics
from tokenpath.policy.admission import QueueLimits
from tokenpath.policy.backoff import BackoffConfig
from tokenpath.protocol.errors import ConflictError, ModelFileError, ModelNotFoundError
from tokenpath.protocol.replica import ReplicaState
from tokenpath.router.router import Router
from tokenpath.router.served import ServedModel

SCRIPTED = (sys.executable, scripted_engine.__file__)
LIMITS = QueueLimits(requests=100, tokens=100_000)


class House:
    """A router, a fleet and an operator; ``files`` is the path of the model's next version."""

    def __init__(self) -> None:
        self.files = "slow-steps"
        self.refusal: Exception | None = None
        self.metrics = Metrics()
        plan = self.plan(SimpleNamespace(files="slow-steps"), "m-0")
        self.fleet = LocalFleet(
            [plan],
            command=SCRIPTED,
            on_happening=self.metrics.replica_event,
            backoff=BackoffConfig(initial_s=0.05, max_s=0.1),
        )
        self.router = Router([self.serve(None, self.fleet.replicas[0])])
        self.operator = Operator(
            fleet=self.fleet,
            router=self.router,
            metrics=self.metrics,
            prepare=self.prepare,
            plan=self.plan,
            serve=self.serve,
            request_s=20.0,
            available_bytes=lambda: 2_000_000_000,
        )

    @property
    def replica(self):
        return self.fleet.replicas[0]

    @staticmethod
    def plan(model, replica_id):
        return ReplicaPlan(
            replica_id=replica_id,
            name="m",
            model=Path(model.files),
            engine=EngineSettings(threads=1),
        )

    @staticmethod
    def serve(_, replica):
        return ServedModel(
            name="m", created=0, tokenizer=None, template=None, replicas=[replica], max_running=64
        )

    def prepare(self, name):
        if self.refusal is not None:
            raise self.refusal
        return SimpleNamespace(name=name, files=self.files)

    async def ask(self, max_tokens=5) -> list:
        """As the gateway does: a place by the router, then the events."""
        lease = self.router.reserve(self.router.model("m"), LIMITS, sequences=1, prompt_tokens=1)
        try:
            stream = lease.replica.generate(request(os.urandom(8).hex(), max_tokens=max_tokens))
            return [event async for event in stream]
        finally:
            lease.release()

    def counted(self, name: str, **labels) -> float:
        return self.metrics.registry.get_sample_value(name, {"model": "m", **labels}) or 0.0


@pytest.fixture
async def house(monkeypatch):
    monkeypatch.setattr(operator_module, "room_for", lambda model, card: 1_000_000_000)
    with tempfile.TemporaryDirectory(prefix="tp-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        made = House()
        await made.fleet.start()
        async with asyncio.timeout(20):
            await made.fleet.wait_ready()
        yield made
        await made.fleet.stop(0.0)
        assert list(Path(folder).iterdir()) == [], "processes or their folders are left"


async def test_a_model_is_replaced_while_requests_stream_and_none_is_dropped(house):
    old, old_pid = house.replica, house.replica.pid
    ended = []
    stopping = asyncio.Event()

    async def client():
        while not stopping.is_set():
            events = await house.ask(max_tokens=7)
            assert tokens(events) == [1000 + i for i in range(7)]
            ended.append(events[-1].finish)

    clients = [asyncio.create_task(client()) for _ in range(6)]
    long = asyncio.create_task(house.ask(max_tokens=40))
    await until(lambda: len(ended) > 5)
    house.files = "loads-slowly"
    await house.operator.reload("m")
    new = house.replica
    assert new is not old
    assert new.replica_id == "m-0.1"
    assert old.state is ReplicaState.READY, "it still has a stream"
    assert house.operator.status("m").reload.state == "retiring"
    with pytest.raises(ConflictError, match="is being reloaded already"):
        await house.operator.reload("m")
    assert tokens(await long) == [1000 + i for i in range(40)]
    at = len(ended)
    await until(lambda: len(ended) > at + 10)
    stopping.set()
    await asyncio.gather(*clients)
    await until(lambda: old.state is ReplicaState.STOPPED)
    await until(lambda: house.operator.status("m").reload.state == "done")
    assert house.operator.status("m").pid == new.pid != old_pid
    assert house.counted("tokenpath_reloads_total", outcome="done") == 1
    assert len(house.router._posts) == 1


async def test_a_new_version_that_cannot_be_loaded_changes_nothing(house):
    old = house.replica
    stream = asyncio.create_task(house.ask(max_tokens=30))
    for files, why in (
        ("bad-file", "model 'm': bad-file is truncated"),
        ("dies-loading", r"exit code 9 before it was ready; its last line was: the last words"),
    ):
        house.files = files
        with pytest.raises(ConflictError, match=why):
            await house.operator.reload("m")
        status = house.operator.status("m")
        assert status.reload.state == "failed"
        assert status.reload.reason
        assert (status.state, status.pid) == (ReplicaState.READY, old.pid)
    house.refusal = ModelFileError("the file is no GGUF")
    with pytest.raises(ConflictError, match="the file is no GGUF"):
        await house.operator.reload("m")
    assert tokens(await stream) == [1000 + i for i in range(30)]
    assert house.replica is old
    assert house.counted("tokenpath_reloads_total", outcome="failed") == 3


async def test_a_new_version_killed_in_mid_load_leaves_the_old_one_serving(house):
    stream = asyncio.create_task(house.ask(max_tokens=30))
    house.files = "loads-forever"
    reloading = asyncio.create_task(house.operator.reload("m"))
    await until(lambda: [r for r in house.fleet._beside if r.pid is not None])
    [candidate] = house.fleet._beside
    await until(lambda: candidate.state is ReplicaState.LOADING)
    with pytest.raises(ConflictError, match="is being reloaded"):
        await house.operator.sleep("m", grace_s=0.0, keep_kv=True)
    os.kill(candidate.pid, signal.SIGKILL)
    with pytest.raises(ConflictError, match=r"was ended by SIGKILL.* before it was ready"):
        await reloading
    assert candidate.restarts == 0
    assert not house.fleet._beside
    assert tokens(await stream) == [1000 + i for i in range(30)]
    house.files = "good"
    await house.operator.reload("m")
    assert len(await house.ask()) == 5


async def test_too_little_memory_for_two_is_refused_with_numbers(house, monkeypatch):
    monkeypatch.setattr(operator_module, "room_for", lambda model, card: 3_000_000_000)
    with pytest.raises(
        ConflictError, match=r"takes about 3.0 GB, and 2.0 GB are available; put it to"
    ):
        await house.operator.reload("m")
    assert len(await house.ask()) == 5


async def test_sleep_and_wake_are_told_and_counted(house):
    await house.operator.sleep("m", grace_s=1.0, keep_kv=True)
    status = house.operator.status("m")
    assert status.state is ReplicaState.ASLEEP
    assert status.resident_bytes > 0
    assert len(await house.ask()) == 5, "a request wakes it"
    await house.operator.sleep("m", grace_s=1.0, keep_kv=True)
    await house.operator.wake("m")
    assert house.operator.status("m").state is ReplicaState.READY
    for event, count in (("ready", 1), ("slept", 2), ("woke", 2), ("ended", 0)):
        assert house.counted("tokenpath_replica_events_total", event=event) == count
    running = asyncio.create_task(house.ask(max_tokens=20))
    await until(lambda: house.replica.last_stats.requests_running)
    with pytest.raises(ConflictError, match=r"^1 request runs, so"):
        await house.operator.sleep("m", grace_s=0.0, keep_kv=True)
    await running
    with pytest.raises(ModelNotFoundError):
        await house.operator.wake("n")


async def test_a_server_that_stops_in_mid_reload_leaves_nothing(house):
    house.files = "loads-forever"
    reloading = asyncio.create_task(house.operator.reload("m"))
    await until(lambda: [r for r in house.fleet._beside if r.state is ReplicaState.LOADING])
    async with asyncio.timeout(10):
        await house.fleet.stop(0.0)
    with pytest.raises(ConflictError):
        await reloading


def test_a_reload_ends_in_two_states():
    assert {s for s in ReloadState if not RELOAD_TRANSITIONS[s]} == {
        ReloadState.DONE,
        ReloadState.FAILED,
    }
