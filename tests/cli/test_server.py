"""The life of a server, with engines that are not there: loading, signals, draining, failing."""

import asyncio
import contextlib
import json
import os
import signal
from types import SimpleNamespace

import httpx
import pytest

from tokenpath.cli import listening
from tokenpath.cli import server as server_module
from tokenpath.cli.server import Door, Server
from tokenpath.config.spec import Spec
from tokenpath.gateway.auth import Authenticator
from tokenpath.models.dialects.detect import PLAIN
from tokenpath.policy.cpu_shares import Division, Share
from tokenpath.protocol.errors import ModelFileError
from tokenpath.protocol.events import Finish, FinishReason, TokenDelta, Usage
from tokenpath.protocol.replica import ModelCard, ReplicaState, ReplicaStats

CARD = ModelCard(
    name="small", architecture="llama", parameters=1000, vocab_size=100, max_context_tokens=64,
    dtype="float32", kv_dtype="bfloat16", weight_bytes=4000, kv_bytes_per_token=8, kv_blocks_total=10, block_tokens=16,
)  # fmt: skip


class FakeReplica:
    replica_id = "small-0"
    last_stats = ReplicaStats()

    def __init__(self):
        self.state = ReplicaState.LOADING
        self.card = None
        self.go_on = asyncio.Event()
        self.reason = FinishReason.STOP
        self.generating = asyncio.Event()

    async def generate(self, request):
        self.generating.set()
        await self.go_on.wait()
        usage = Usage(prompt_tokens=1, completion_tokens=1)
        finish = Finish(reason=self.reason, usage=usage)
        yield TokenDelta(request_id=request.request_id, token_ids=[7], text="done", finish=finish)

    def abort(self, request_id):
        self.reason = FinishReason.ABORT
        self.go_on.set()

    async def stats(self):
        return self.last_stats


class FakeFleet:
    """Loads when told to."""

    def __init__(self, plans, *, on_progress, on_happening):
        self.plans = plans
        self.on_progress = on_progress
        self.replicas = (FakeReplica(),)
        self.outcome = asyncio.get_running_loop().create_future()
        self.stopped = False

    async def start(self):
        self.on_progress("small-0", "weights", 0.5)
        self.on_progress("small-0", "weights", 0.7)

    async def wait_ready(self):
        await self.outcome
        self.replicas[0].state, self.replicas[0].card = ReplicaState.READY, CARD

    async def stop(self, grace_s):
        self.stopped = True


class Tokenizer:
    def encode(self, text, *, add_special=True):
        return [1, 2, 3]

    def decode(self, token_ids):
        return "done"


class Run:
    """A server in this test's own loop."""

    def __init__(self, monkeypatch, *, grace_s=30.0):
        self.said = []
        self.fleet = None

        def make_fleet(plans, *, on_progress, on_happening):
            self.fleet = FakeFleet(plans, on_progress=on_progress, on_happening=on_happening)
            return self.fleet

        monkeypatch.setattr(server_module, "LocalFleet", make_fleet)
        spec = Spec.model_validate(
            {"gateway": {"shutdown_grace_s": grace_s}, "models": [{"source": "x"}]}
        )
        model = SimpleNamespace(
            name="small",
            spec=spec.models[0],
            local=SimpleNamespace(path="/models/small.gguf"),
            tokenizer=Tokenizer(),
            template=None,
            dialect=PLAIN,
            task="generate",
            inputs=None,
        )
        bound = listening.bind("127.0.0.1", 0)
        self.url = listening.url(bound)
        self.server = Server(
            spec=spec,
            models=[model],
            prepare=lambda name: model,
            division=Division((Share(2, (0, 1)),), 2),
            bound=bound,
            authenticator=Authenticator(None, mode="none"),
            door=lambda: Door(line="the door", key_needed=False),
            say=self.said.append,
        )
        self.task = asyncio.create_task(self.server.run())

    @contextlib.asynccontextmanager
    async def client(self):
        async with httpx.AsyncClient(base_url=self.url) as client:
            await self.hear("Listening")
            assert (await client.get("/health")).status_code == 200
            yield client

    async def hear(self, words):
        """Wait until the server has said something."""
        while not any(words in line for line in self.said):
            await asyncio.sleep(0.01)

    async def ready(self):
        self.fleet.outcome.set_result(None)
        await self.hear("curl")

    async def complete(self, client):
        return await client.post(
            "/v1/completions", json={"model": "small", "prompt": "x"}, timeout=30
        )

    def begin(self, client):
        return asyncio.create_task(self.complete(client))


@pytest.fixture
async def run(monkeypatch):
    run = Run(monkeypatch)
    yield run
    if not run.task.done():
        run.task.cancel()
        await run.task


async def test_it_answers_while_the_model_loads_then_says_how_to_use_it(run):
    async with run.client() as client:
        assert (await client.get("/ready")).status_code == 503
        assert (await run.complete(client)).json()["error"]["code"] == "not_ready"
        assert run.said == [
            f"Listening on {run.url}, loading small.",
            "Loading small-0: weights …",
        ]
        await run.ready()
        assert (await client.get("/ready")).status_code == 200
        assert (
            "float32, weights 4.0 kB, KV cache 160 tokens (1.3 kB in bfloat16), context 64"
            in run.said[2]
        )
        assert run.said[3] == "the door"
        assert run.said[4].startswith(f"Ready at {run.url} ")
        run.fleet.replicas[0].go_on.set()
        assert (await run.complete(client)).json()["choices"][0]["text"] == "done"


async def test_the_printed_curl_line_works_as_it_stands(run):
    async with run.client():
        await run.ready()
        run.fleet.replicas[0].go_on.set()
        process = await asyncio.create_subprocess_shell(
            f"{run.said[-1]} --silent", stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
        assert json.loads(output)["choices"][0]["text"] == "done"


async def test_a_signal_lets_running_requests_finish_and_refuses_new_ones(run):
    async with run.client() as client:
        await run.ready()
        running = run.begin(client)
        await run.fleet.replicas[0].generating.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await run.hear("Stopping; requests still running (1)")
        assert (await run.complete(client)).json()["error"]["code"] == "draining"
        run.fleet.replicas[0].go_on.set()
        assert (await running).json()["choices"][0]["text"] == "done"
        assert await asyncio.wait_for(run.task, 8) == 0
        assert run.fleet.stopped
        assert run.said[-1] == "Stopped."


async def test_a_second_signal_ends_at_once(run):
    async with run.client() as client:
        await run.ready()
        running = run.begin(client)
        await run.fleet.replicas[0].generating.wait()
        for _ in range(4):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.02)
        assert await asyncio.wait_for(run.task, 1) == 130
        assert (await running).json()["error"]["code"] == "draining"


async def test_requests_are_ended_when_the_grace_is_over(monkeypatch):
    run = Run(monkeypatch, grace_s=0.1)
    async with run.client() as client:
        await run.ready()
        running = run.begin(client)
        await run.fleet.replicas[0].generating.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await running).json()["error"]["code"] == "draining"
        assert await asyncio.wait_for(run.task, 8) == 0


async def test_a_signal_while_loading(run):
    async with run.client():
        os.kill(os.getpid(), signal.SIGINT)
        assert await asyncio.wait_for(run.task, 8) == 0
        assert run.fleet.stopped


async def test_a_model_that_cannot_be_loaded_ends_the_server(run):
    async with run.client():
        run.fleet.outcome.set_exception(ModelFileError("the file is cut off"))
        with pytest.raises(ModelFileError, match="cut off"):
            await asyncio.wait_for(run.task, 8)
        assert run.fleet.stopped
