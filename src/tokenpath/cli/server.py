"""The life of a server: engines started, requests answered, and an end in good order.

Everything runs on one event loop: the HTTP server, the links to the engine processes and the
signals. The first SIGINT or SIGTERM asks the server to stop: new requests are refused, running ones
may finish within the spec's grace, then the engines end and the exit code is 0. A second one
insists: everything ends now.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import uvicorn

from tokenpath.cli import banner, listening
from tokenpath.cli.banner import Say
from tokenpath.cli.deployment import ReadyModel
from tokenpath.cli.errors import INTERRUPTED
from tokenpath.cli.operator import Operator
from tokenpath.config.spec import Spec
from tokenpath.fleet.local import LocalFleet, LocalReplica, ReplicaPlan
from tokenpath.gateway.app import App, create_app
from tokenpath.gateway.auth import Authenticator
from tokenpath.observe.metrics import Metrics
from tokenpath.policy.cpu_shares import Division, Share
from tokenpath.router.router import Router
from tokenpath.router.served import ServedModel

KEEP_ALIVE_S = 75
"""Longer than clients and proxies keep an idle connection, so that it is they who close it and no
request is sent into a connection that is just being closed."""
LAST_WORDS_S = 3
"""For connections to close after the last request has ended."""
ENDING_S = 10.0
"""For connections and engines together. What is left then ends with this process."""

_log = logging.getLogger("tokenpath.serve")


@dataclass(frozen=True, slots=True)
class Door:
    """Who may come in, for the banner."""

    line: str
    key_needed: bool


class _QuietServer(uvicorn.Server):
    """uvicorn without its own signal handlers, which would end requests that may still finish."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """One run of the HTTP server and its engines."""

    def __init__(
        self,
        *,
        spec: Spec,
        models: Sequence[ReadyModel],
        division: Division,
        prepare: Callable[[str], ReadyModel],
        bound: socket.socket,
        authenticator: Authenticator,
        door: Callable[[], Door],
        say: Say,
    ) -> None:
        """``prepare`` opens a model by its name, as spec and disk have it when it is called."""
        self._spec = spec
        self._models = models
        self._division = division
        self._prepare = prepare
        self._bound = bound
        self._authenticator = authenticator
        self._door = door
        self._say = say
        self._loading: dict[str, str] = {}

    async def run(self) -> int:
        """Serve until a signal; 0 after an orderly end, 130 after an insisted one.

        Raises the error of an engine that cannot load its model.
        """
        asked = _on_signals()
        shares = self._division.shares
        plans = [_replica_plan(*each) for each in zip(self._models, shares, strict=True)]
        metrics = self._metrics()
        fleet = LocalFleet(plans, on_progress=self._progressed, on_happening=metrics.replica_event)
        created = int(time.time())
        served = [
            _served(model, replica, created)
            for model, replica in zip(self._models, fleet.replicas, strict=True)
        ]
        router = Router(served)
        app = create_app(
            spec=self._spec,
            router=router,
            authenticator=self._authenticator,
            metrics=metrics,
            operator=self._operator(fleet, router, metrics),
        )
        http = _QuietServer(_http_config(app))
        listening.listen(self._bound)
        serving = asyncio.create_task(http.serve(sockets=[self._bound]))
        try:
            try:
                await self._until_asked(asked, fleet, serving)
                await self._drain(app)
            except Exception:
                await _end(http, serving, fleet)
                raise
            await _end(http, serving, fleet)
        except asyncio.CancelledError:
            # The second signal. Clients are told; the tasks that hold the engines are cancelled
            # as the loop ends, and kill them on their way out.
            http.should_exit = http.force_exit = True
            await app.draining.drain(0)
            return INTERRUPTED
        self._say("Stopped.")
        return 0

    async def _until_asked(
        self, asked: asyncio.Event, fleet: LocalFleet, serving: asyncio.Task[None]
    ) -> None:
        """Load the models and return when a signal came. Raises what ends the server before."""
        loading = asyncio.create_task(self._load(fleet))
        stopping = asyncio.create_task(asked.wait())
        try:
            await asyncio.wait({serving, loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
        finally:
            loading.cancel()
            stopping.cancel()

    async def _load(self, fleet: LocalFleet) -> None:
        """Start the engines and tell when the models can be used."""
        url = listening.url(self._bound)
        self._say(f"Listening on {url}, loading {', '.join(m.name for m in self._models)}.")
        await fleet.start()
        await fleet.wait_ready()
        for replica in fleet.replicas:
            if replica.card is not None:
                self._say(banner.loaded_line(replica.card))
        door = self._door()
        self._say(door.line)
        self._say(f"Ready at {url} (its API is described at {url}/docs). Try:")
        for model in self._models:
            kind: banner.Example = "chat" if model.template is not None else "complete"
            if model.task != "generate":
                kind = model.task
            line = banner.curl_line(url, model.name, kind, key_needed=door.key_needed)
            self._say(f"  {line}")

    def _operator(self, fleet: LocalFleet, router: Router, metrics: Metrics) -> Operator:
        # A new version computes where the old one did: CPUs are divided once, at the start.
        shares = dict(
            zip((model.name for model in self._models), self._division.shares, strict=True)
        )
        return Operator(
            fleet=fleet,
            router=router,
            metrics=metrics,
            prepare=self._prepare,
            plan=lambda model, replica_id: _replica_plan(model, shares[model.name], replica_id),
            serve=lambda model, replica: _served(model, replica, int(time.time())),
            request_s=self._spec.gateway.limits.request_s,
        )

    def _progressed(self, replica_id: str, what: str, fraction: float) -> None:
        """One line for each part of the loading, not for each step of it."""
        _log.debug("%s: %s %.0f %%", replica_id, what, fraction * 100)
        if self._loading.get(replica_id) != what:
            self._loading[replica_id] = what
            self._say(f"Loading {replica_id}: {what} …")

    def _metrics(self) -> Metrics:
        metrics = Metrics()
        threads = {
            m.name: s.threads for m, s in zip(self._models, self._division.shares, strict=True)
        }
        metrics.cpus_divided(self._division.capacity, threads)
        return metrics

    async def _drain(self, app: App) -> None:
        grace_s = self._spec.gateway.shutdown_grace_s
        running = app.draining.running
        self._say(
            f"Stopping; requests still running ({running}) may finish within {grace_s:g} s. "
            "Ctrl-C again ends them now."
            if running
            else "Stopping."
        )
        ended = await app.draining.drain(grace_s)
        if ended:
            _log.warning("%d requests were ended after the grace of %g s", ended, grace_s)


async def _end(http: uvicorn.Server, serving: asyncio.Task[None], fleet: LocalFleet) -> None:
    """Close what is left of the connections and end the engines."""
    http.should_exit = True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ENDING_S):
            await asyncio.gather(serving, fleet.stop(0))


def _on_signals() -> asyncio.Event:
    """Set the event at the first SIGINT or SIGTERM; cancel the current task at the second."""
    asked = asyncio.Event()
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()

    def take() -> None:
        if not asked.is_set():
            asked.set()
        elif not task.cancelling():
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, take)
    return asked


def replica_id(model: ReadyModel) -> str:
    """Of a model's one replica."""
    return f"{model.name}-0"


def _replica_plan(model: ReadyModel, share: Share, identity: str | None = None) -> ReplicaPlan:
    return ReplicaPlan(
        replica_id=identity or replica_id(model),
        name=model.name,
        model=model.local.path,
        engine=model.spec.engine.model_copy(update={"threads": share.threads}),
        cpus=share.cpus,
    )


def _served(model: ReadyModel, replica: LocalReplica, created: int) -> ServedModel:
    """A model with its one replica."""
    return ServedModel(
        name=model.name,
        created=created,
        tokenizer=model.tokenizer,
        template=model.template,
        dialect=model.dialect,
        replicas=[replica],
        max_running=model.spec.engine.max_running,
        task=model.task,
        inputs=model.inputs,
        wakes=model.spec.engine.when_asleep == "wake",
    )


def _http_config(app: App) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        # Who the client is does not matter here, and headers that claim it are not to be trusted.
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_WORDS_S,
    )
