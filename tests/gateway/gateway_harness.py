"""A scripted replica behind the real application on a real socket."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import httpx
import uvicorn
import uvloop
from openai import OpenAI

from tokenpath.config.spec import Spec
from tokenpath.engine.stage_clock import StageClock
from tokenpath.gateway.app import App, create_app
from tokenpath.gateway.auth import Authenticator
from tokenpath.models.dialects.detect import PLAIN, Dialect
from tokenpath.observe.log import JsonFormatter, TextFormatter
from tokenpath.observe.metrics import Metrics
from tokenpath.protocol.errors import ErrorInfo, InvalidRequestError, TokenpathError
from tokenpath.protocol.events import (
    EngineStages,
    Failed,
    Finish,
    FinishReason,
    GenerationEvent,
    TokenDelta,
    TokenLogprob,
    Usage,
)
from tokenpath.protocol.replica import ModelCard, ReplicaState, ReplicaStats
from tokenpath.protocol.request import GenerationRequest
from tokenpath.protocol.stages import Stage
from tokenpath.router.router import Router
from tokenpath.router.served import ServedModel

CARD = ModelCard(
    name="toy",
    architecture="toy",
    parameters=1,
    vocab_size=256,
    max_context_tokens=1_000,
    dtype="float32",
    kv_dtype="bfloat16",
    weight_bytes=1,
    kv_bytes_per_token=1,
    kv_blocks_total=64,
    block_tokens=16,
)


class ByteTokenizer:
    """A token a byte; a beginning token (1) if special tokens are asked for."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return ([1] if add_special else []) + list(text.encode())

    def decode(self, token_ids) -> str:
        return bytes(token_ids).decode(errors="replace")


class ToyTemplate:
    def render(self, messages, *, add_generation_prompt=True, tools=None, **switches) -> str:
        if any("refuse" in message["content"] for message in messages):
            raise InvalidRequestError("The template refuses this.", param="messages")
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        return "\n".join([*lines, "assistant: " if add_generation_prompt else ""])


@dataclass
class Script:
    """What a sequence does: wait, give its words with a gap between, then end or fail."""

    words: tuple[str, ...] = ("Hello", " wor", "ld", "!")
    before_s: float = 0.0
    gap_s: float = 0.0
    fail_after: int | None = None
    """Fail with ``error`` once this many words are out."""
    error: ErrorInfo | TokenpathError | Exception = field(
        default_factory=lambda: ErrorInfo("engine_error", "It broke.")
    )
    endless: bool = False
    stages: EngineStages = field(
        default_factory=lambda: EngineStages(queue_s=0.001, prefill_s=0.002, decode_s=0.003)
    )
    cached: int | None = 3
    hold_first: bool = False
    """Wait for ever before the first word, in the engine's queue."""
    prefill_s: float = 0.0
    """Between the queue and the first word."""
    hidden: int = 0
    """Tokens that were generated and not shown; an abort or a failure reports them."""
    deaf: bool = False
    """Never answer an abort."""
    fails_with_stages: bool = False
    """A failure tells its usage and its stages, measured as an abort's are."""


class Run:
    """One sequence that follows its script."""

    def __init__(self, request: GenerationRequest, script: Script) -> None:
        self.request, self.script = request, script
        self.clock = StageClock(time.monotonic())
        self.given = 0
        self.withdrawn = False

    def stages(self) -> EngineStages:
        return self.clock.total(time.monotonic())

    def usage(self) -> Usage:
        prompt = len(self.request.prompt.token_ids)
        return Usage(prompt, self.script.cached, self.given + self.script.hidden)


class ScriptedReplica:
    """Implements the Replica protocol by script; counts what is open."""

    def __init__(self) -> None:
        self.replica_id = "toy-0"
        self.state = ReplicaState.READY
        self.card: ModelCard | None = CARD
        self.last_stats = ReplicaStats(kv_blocks_total=64)
        self.script: Script | Callable[[GenerationRequest], Script] = Script()
        self.requests: list[GenerationRequest] = []
        self.open = 0
        self.aborted = 0
        self.sent = 0
        self._withdrawn: dict[str, asyncio.Event] = {}

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        self.requests.append(request)
        script = self.script(request) if callable(self.script) else self.script
        self.open += 1
        self._withdrawn[request.request_id] = asyncio.Event()
        run = Run(request, script)
        ended = False
        try:
            events = self._play(run)
            while (event := await self._next(events, run)) is not None:
                ended = not isinstance(event, TokenDelta) or (
                    event.finish is not None and event.finish.reason is not FinishReason.ABORT
                )
                self.sent += 1
                yield event
        finally:
            del self._withdrawn[request.request_id]
            self.open -= 1
            self.aborted += not ended

    def abort(self, request_id: str) -> None:
        if request_id in self._withdrawn:
            self._withdrawn[request_id].set()

    async def _next(self, events: AsyncIterator, run: Run) -> GenerationEvent | None:
        """The script's next event, or the end of a withdrawn sequence."""
        if run.withdrawn:
            return None
        withdrawn = self._withdrawn[run.request.request_id]
        waiting = [asyncio.ensure_future(anext(events, None))]
        if not run.script.deaf:
            waiting.append(asyncio.create_task(withdrawn.wait()))
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if waiting[0].done() and not (withdrawn.is_set() and not run.script.deaf):
                return waiting[0].result()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        run.withdrawn = True
        finish = Finish(FinishReason.ABORT, run.usage(), run.stages())
        return TokenDelta(run.request.request_id, finish=finish)

    async def _play(self, run: Run) -> AsyncIterator[GenerationEvent]:
        request, script = run.request, run.script
        await asyncio.sleep(script.before_s)
        if script.hold_first:
            await asyncio.Event().wait()
        run.clock.enter(Stage.PREFILL, time.monotonic())
        await asyncio.sleep(script.prefill_s)
        run.clock.enter(Stage.DECODE, time.monotonic())
        words = list(script.words)[: request.sampling.max_tokens]
        given = 0
        while True:
            if script.fail_after == given:
                if isinstance(script.error, Exception):
                    raise script.error
                cost = (run.stages(), run.usage()) if script.fails_with_stages else ()
                yield Failed(request.request_id, script.error, *cost)
                return
            if given == len(words) and not script.endless:
                break
            if given:
                await asyncio.sleep(script.gap_s)
            word = words[given % len(words)]
            given += 1
            run.given = given
            yield TokenDelta(
                request.request_id,
                token_ids=[given],
                text=word,
                logprobs=self._logprobs(request, word),
            )
        length = len(words) < len(script.words)
        yield TokenDelta(
            request.request_id,
            finish=Finish(
                reason=FinishReason.LENGTH if length else FinishReason.STOP,
                usage=Usage(len(request.prompt.token_ids), script.cached, given),
                stages=script.stages,
            ),
        )

    @staticmethod
    def _logprobs(request, word):
        if request.sampling.logprobs is None:
            return None
        raw = word.encode()
        top = [(i, -0.5 - i, f"t{i}", f"t{i}".encode()) for i in range(request.sampling.logprobs)]
        return [TokenLogprob(1, -0.5, word, raw, top)]

    async def stats(self) -> ReplicaStats:
        return self.last_stats

    async def drain(self, grace_s: float) -> None:
        self.state = ReplicaState.DRAINING


class Served:
    """The application on a socket, in a thread with an event loop of its own."""

    def __init__(self, app: App, replica: ScriptedReplica, metrics: Metrics, router: Router):
        self.app, self.replica, self.metrics, self.router = app, replica, metrics, router
        self.loop = uvloop.new_event_loop()
        config = uvicorn.Config(
            app, log_level="warning", server_header=False, access_log=False, lifespan="off"
        )
        self._server = uvicorn.Server(config)
        # With the protocol named, so that event loops switch off Nagle on its connections.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._idle_tasks = 0

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._server.serve(sockets=[self._socket]))

    def start(self) -> None:
        self._thread.start()
        while not self._server.started:
            pass
        self._idle_tasks = self.tasks()

    def stop(self) -> None:
        self.http.close()
        self._server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()
        self.loop.close()
        self._socket.close()

    def tasks(self) -> int:
        async def count() -> int:
            return len(asyncio.all_tasks())

        return self.call(count())

    def call(self, coroutine) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @cached_property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, verify=False)

    def client(self, **options) -> OpenAI:
        return OpenAI(
            base_url=f"{self.url}/v1",
            api_key="none",
            max_retries=0,
            http_client=self.http,
            **options,
        )

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def settle(self, seconds: float = 10.0) -> None:
        """Wait until nothing is open or counted and no task is left over."""
        waited = 0.0
        model = self.router.models[0]
        while waited < seconds:
            if (
                self.replica.open == 0
                and self.router.in_flight(model) == 0
                and self.app.draining.running == 0
                and self.tasks() <= self._idle_tasks
            ):
                return
            threading.Event().wait(0.02)
            waited += 0.02
        raise AssertionError(
            f"left over: {self.replica.open} open, {self.router.in_flight(model)} in flight, "
            f"{self.app.draining.running} running, {self.tasks() - self._idle_tasks} tasks"
        )


def make_spec(limits: dict | None = None, **gateway) -> Spec:
    return Spec.model_validate(
        {"models": [{"source": "toy"}], "gateway": {"limits": limits or {}, **gateway}}
    )


@contextmanager
def serving(
    *,
    limits: dict | None = None,
    template: Any = "toy",
    dialect: Dialect = PLAIN,
    authenticator: Any = None,
    max_running: int = 64,
    body_s: float = 60.0,
    replica: Any = None,
    model: dict | None = None,
    operator: Any = None,
    **gateway,
) -> Iterator[Served]:
    """The application with one model; ``model`` has further fields of it."""
    replica = replica or ScriptedReplica()
    model = ServedModel(
        name="toy",
        created=1_700_000_000,
        tokenizer=ByteTokenizer(),
        template=ToyTemplate() if template == "toy" else template,
        dialect=dialect,
        replicas=[replica],
        max_running=max_running,
        **(model or {}),
    )
    router, metrics = Router([model]), Metrics()
    app = create_app(
        spec=make_spec(limits, **gateway),
        router=router,
        authenticator=authenticator or Authenticator(None, mode="none"),
        metrics=metrics,
        operator=operator,
        body_s=body_s,
    )
    served = Served(app, replica, metrics, router)
    served.start()
    try:
        yield served
    finally:
        served.stop()


class Log:
    """The request log as text and as JSON."""

    def __init__(self) -> None:
        self._text, self._json = io.StringIO(), io.StringIO()
        self.handlers = []
        self._taken = 0
        for stream, formatter in ((self._text, TextFormatter()), (self._json, JsonFormatter())):
            handler = logging.StreamHandler(stream)
            handler.setFormatter(formatter)
            self.handlers.append(handler)

    @property
    def text(self) -> str:
        return self._text.getvalue()

    def next(self) -> dict:
        """The next completion's record; the line is written after the answer was sent."""
        end = time.monotonic() + 10
        while True:
            lines = [json.loads(line) for line in self._json.getvalue().splitlines()]
            lines = [line for line in lines if line.get("endpoint") == "/v1/completions"]
            if len(lines) > self._taken:
                self._taken += 1
                return lines[self._taken - 1]
            assert time.monotonic() < end
            time.sleep(0.005)
