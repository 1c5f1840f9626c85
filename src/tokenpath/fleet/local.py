"""Engine processes on this machine, kept alive: the local fleet.

Each replica has one supervising task that starts its process, links to it, waits for its end and
decides what is next. A model that cannot be loaded is final, since starting again would change
nothing; any other end is followed by a restart after a pause (``policy.backoff``).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from tokenpath.config.launch import EXIT_STUCK
from tokenpath.config.spec import EngineSettings
from tokenpath.fleet.lifecycle import Lifecycle, move
from tokenpath.fleet.process import ENGINE_COMMAND, EngineProcess
from tokenpath.fleet.replica import LinkedReplica
from tokenpath.policy.backoff import Backoff, BackoffConfig
from tokenpath.protocol.errors import (
    DrainingError,
    ModelError,
    NotReadyError,
    ReplicaLostError,
    SpecError,
    TokenpathError,
    UnavailableError,
)
from tokenpath.protocol.events import Failed, GenerationEvent
from tokenpath.protocol.pooling import Pooled, PoolingRequest
from tokenpath.protocol.replica import RESTING, ModelCard, ReplicaState, ReplicaStats
from tokenpath.protocol.request import GenerationRequest

LISTEN_TIMEOUT_S: Final = 60.0
"""From the start of a process until it accepts a connection; loading comes after."""
LISTEN_POLL_S: Final = 0.02
EXIT_NOTICE_S: Final = 1.0
"""A link that ends is mostly a process that ends; wait this long to see its exit code."""
TERM_S: Final = 3.0
"""From SIGTERM to SIGKILL for a process that has already drained."""

LOADED: Final = RESTING | {ReplicaState.READY}
"""States in which a process has loaded its model, whether it holds it or not."""

_S = ReplicaState
_HAPPENINGS: Final[dict[tuple[ReplicaState, ReplicaState], Happening]] = {
    (_S.LOADING, _S.READY): "ready",
    (_S.FALLING_ASLEEP, _S.ASLEEP): "slept",
    (_S.WAKING, _S.READY): "woke",
    (_S.WAKING, _S.ASLEEP): "wake_failed",
}

log = logging.getLogger("tokenpath.fleet")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """A replica to run."""

    replica_id: str
    name: str
    """The served model's name."""
    model: Path
    """A GGUF file or a Hugging Face folder."""
    engine: EngineSettings
    cpus: tuple[int, ...] | None = None
    """Where it may run. None: wherever this process may."""


OnProgress = Callable[[str, str, float], None]
"""Replica id, what is being loaded, fraction."""
Happening = Literal["ready", "slept", "woke", "wake_failed", "ended", "stuck"]
"""What a replica goes through. ``ended`` is a process that ended without having been asked to."""
OnHappening = Callable[[str, Happening], None]
"""The model's name, and what its replica went through."""


class LocalReplica:
    """A ``Replica`` whose process is started, watched and restarted here."""

    def __init__(
        self,
        plan: ReplicaPlan,
        *,
        on_progress: OnProgress = lambda _replica_id, _what, _fraction: None,
        on_happening: OnHappening = lambda _name, _happening: None,
        backoff: BackoffConfig = BackoffConfig(),  # noqa: B008 - frozen
        command: Sequence[str] = ENGINE_COMMAND,
        one_try: bool = False,
    ) -> None:
        """With ``one_try`` a process that ends before it was ever ready is not started again."""
        self._plan = plan
        self._on_progress = on_progress
        self._on_happening = on_happening
        self._one_try = one_try
        self._backoff = Backoff(backoff)
        self._command = command
        self._life = Lifecycle()
        self._changed = asyncio.Event()
        self._process: EngineProcess | None = None
        self._link: LinkedReplica | None = None
        self._ready_at: float | None = None
        self._starts = 0
        self._last_words: list[str] = []
        self._final_error: TokenpathError | None = None
        self._stopping = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self._log = logging.getLogger(f"tokenpath.engine.{plan.replica_id}")

    @property
    def replica_id(self) -> str:
        return self._plan.replica_id

    @property
    def state(self) -> ReplicaState:
        return self._life.state

    @property
    def reason(self) -> str:
        """Why it is in this state; empty where the state says all."""
        return self._life.reason

    @property
    def card(self) -> ModelCard | None:
        return None if self._link is None else self._link.card

    @property
    def last_stats(self) -> ReplicaStats:
        return ReplicaStats() if self._link is None else self._link.last_stats

    @property
    def pid(self) -> int | None:
        """Of the running process."""
        return None if self._process is None else self._process.pid

    @property
    def restarts(self) -> int:
        """How often the process was started again."""
        return max(0, self._starts - 1)

    @property
    def last_words(self) -> list[str]:
        """The last lines of the process that runs, or of the one that ended last."""
        return self._last_words if self._process is None else self._process.tail

    def start(self) -> None:
        """Begin supervising; returns at once."""
        assert self._supervisor is None
        self._supervisor = asyncio.create_task(self._supervise())

    async def wait_ready(self) -> None:
        """Wait until a process is ready, through restarts.

        Raises the error of a replica that has failed for good: the load's own, or
        ``UnavailableError`` once it has been given up.
        """
        while self.state not in LOADED:
            if self.state is ReplicaState.FAILED:
                raise self._final_error or UnavailableError(self.reason)
            if self.state in {ReplicaState.DRAINING, ReplicaState.STOPPED}:
                raise DrainingError("the replica was stopped before it was ready")
            self._changed.clear()
            await self._changed.wait()

    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """Stream the events of one request; see ``protocol.replica``."""
        return self._ready_link().generate(request)

    def pool(self, request: PoolingRequest) -> AsyncGenerator[Pooled | Failed]:
        """Stream the vectors of one request; see ``protocol.replica``."""
        return self._ready_link().pool(request)

    def _ready_link(self) -> LinkedReplica:
        match self.state:
            case state if state in LOADED and self._link is not None:
                return self._link
            case ReplicaState.DRAINING:
                raise DrainingError("the replica is shutting down")
            case ReplicaState.FAILED | ReplicaState.STOPPED:
                raise ReplicaLostError(f"the replica is {self.state}: {self.reason}")
            case _:
                raise NotReadyError("the model is still loading")

    def abort(self, request_id: str) -> None:
        """Withdraw a request; see ``protocol.replica``."""
        if self._link is not None:
            self._link.abort(request_id)

    async def stats(self) -> ReplicaStats:
        """Ask the process now. Raises ``ReplicaLostError``."""
        if self._link is None:
            raise ReplicaLostError(f"the replica is {self.state}: {self.reason}")
        return await self._link.stats()

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, wait up to ``grace_s`` for the running ones, abort the rest."""
        if self._link is None:
            return
        if self.state in LOADED:
            self._move(ReplicaState.DRAINING)
        await self._link.drain(grace_s)

    async def sleep(self, grace_s: float, *, keep_kv: bool = True) -> None:
        """Give back weights and KV pool; see ``protocol.replica``."""
        await self._ready_link().sleep(grace_s, keep_kv=keep_kv)

    async def wake(self) -> None:
        """Load them again; see ``protocol.replica``."""
        await self._ready_link().wake()

    async def stop(self, grace_s: float) -> None:
        """Drain, end the process, and return when nothing of it is left."""
        self._stopping.set()
        supervisor = self._supervisor
        if supervisor is None:
            if self.state is not ReplicaState.STOPPED:
                self._move(ReplicaState.STOPPED)
            return
        # Between two runs, or just starting one: milliseconds, not worth an event of its own.
        while self._process is None and not supervisor.done():  # noqa: ASYNC110
            await asyncio.sleep(LISTEN_POLL_S)
        if self.state in LOADED | {ReplicaState.DRAINING}:
            try:
                async with asyncio.timeout(grace_s + TERM_S):
                    await self.drain(grace_s)
            except (TimeoutError, ReplicaLostError) as error:
                log.warning("replica %s did not drain: %s", self.replica_id, error)
        process = self._process
        if process is not None:
            process.signal(signal.SIGTERM)
            if await process.wait(TERM_S) is None:
                log.warning("replica %s did not end by itself; killing it", self.replica_id)
                process.signal(signal.SIGKILL)
        await supervisor

    # The supervising task.

    async def _supervise(self) -> None:
        try:
            while not self._stopping.is_set():
                pause_s = await self._run()
                if pause_s is None:
                    break
                await self._pause(pause_s)
        except Exception:
            log.exception("supervising replica %s failed", self.replica_id)
            self._move(ReplicaState.FAILED, "its supervisor failed; see the log")
        if self._stopping.is_set():
            self._move(ReplicaState.STOPPED)

    async def _run(self) -> float | None:
        """One life of a process; how long to pause before the next, None for no next."""
        self._starts += 1
        self._ready_at = None
        try:
            process = await EngineProcess.start(
                name=self._plan.name,
                model=self._plan.model,
                engine=self._plan.engine,
                cpus=self._plan.cpus,
                logger=self._log,
                command=self._command,
            )
        except SpecError as error:
            self._fail(error)
            return None
        self._process = process
        try:
            await self._attend(process)
            exit_code = process.exit_code
        finally:
            await process.discard()
            self._process = None
            self._last_words = process.tail
        return self._next(exit_code)

    async def _attend(self, process: EngineProcess) -> None:
        """Stay linked to the process until it ends, or never listens."""
        while process.exit_code is None:
            if self.state is ReplicaState.PENDING:
                self._move(ReplicaState.LOADING)
            link = await self._connect(process)
            if link is None:
                return
            self._link = link
            try:
                await self._follow(link)
            finally:
                self._link = None
                await link.close()
            if self.state in LOADED | {ReplicaState.LOADING}:
                self._move(ReplicaState.PENDING, link.reason)
            await process.wait(EXIT_NOTICE_S)

    async def _connect(self, process: EngineProcess) -> LinkedReplica | None:
        deadline = time.monotonic() + LISTEN_TIMEOUT_S
        while process.exit_code is None and time.monotonic() < deadline:
            try:
                return await LinkedReplica.connect(
                    process.address,
                    replica_id=self.replica_id,
                    token=process.token,
                    on_progress=self._progressed,
                    on_state=self._linked,
                )
            except ReplicaLostError:
                await process.wait(LISTEN_POLL_S)
        return None

    async def _follow(self, link: LinkedReplica) -> None:
        try:
            await link.wait_ready()
        except TokenpathError:
            self._final_error = link.load_error
        else:
            self._one_try = False
            if self._ready_at is None:
                self._ready_at = time.monotonic()
            if self.state is ReplicaState.LOADING:  # it was told before this side had the link
                self._linked(link.state)
        await link.wait_closed()

    def _next(self, exit_code: int | None) -> float | None:
        """Move on after a process has ended, or never listened; the pause before the next."""
        if self._stopping.is_set():
            return None
        if self.state is ReplicaState.DRAINING:
            self._move(ReplicaState.STOPPED, "it was drained and has ended")
            return None
        error = self._final_error or _final_error(exit_code, self._last_words)
        if error is not None:
            self._fail(error)
            return None
        ended = f"the engine process {_how_it_ended(exit_code)}"
        ready_s = None if self._ready_at is None else time.monotonic() - self._ready_at
        self._on_happening(self._plan.name, "stuck" if exit_code == EXIT_STUCK else "ended")
        pause_s = self._backoff.after_exit(ready_s)
        once = self._one_try and ready_s is None
        if pause_s is None or once:
            last = f"; its last line was: {self._last_words[-1]}" if self._last_words else ""
            times = "" if once else ", several times"
            self._fail(UnavailableError(f"{ended} before it was ready{times}{last}"))
            return None
        reason = f"{ended}; starting it again in {pause_s:g} s"
        log.warning("replica %s: %s", self.replica_id, reason)
        if self.state is ReplicaState.PENDING:
            self._life = Lifecycle(ReplicaState.PENDING, reason)
        else:
            self._move(ReplicaState.PENDING, reason)
        return pause_s

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return

    def _linked(self, state: ReplicaState) -> None:
        """Be in the state that the link tells, as far as this side has not decided otherwise."""
        mine = LOADED | {ReplicaState.LOADING}
        if self._link is not None and self.state in mine - {state} and state in LOADED:
            self._move(state)

    def _progressed(self, what: str, fraction: float) -> None:
        self._on_progress(self.replica_id, what, fraction)

    def _fail(self, error: TokenpathError) -> None:
        log.error("replica %s failed: %s", self.replica_id, error.message)
        self._final_error = error
        self._move(ReplicaState.FAILED, error.message)

    def _move(self, to: ReplicaState, reason: str = "") -> None:
        happening = _HAPPENINGS.get((self.state, to))
        if happening is not None:
            self._on_happening(self._plan.name, happening)
        self._life = move(self._life, to, reason)
        log.debug("replica %s is %s %s", self.replica_id, to, reason)
        self._changed.set()


class LocalFleet:
    """All engine processes of one server.

    Its event loop's thread must live as long as the fleet: on Linux the kernel ends an engine
    together with the thread that started it.
    """

    def __init__(
        self,
        plans: Sequence[ReplicaPlan],
        *,
        on_progress: OnProgress = lambda _replica_id, _what, _fraction: None,
        on_happening: OnHappening = lambda _name, _happening: None,
        backoff: BackoffConfig = BackoffConfig(),  # noqa: B008 - frozen
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        self._make = functools.partial(
            LocalReplica,
            on_progress=on_progress,
            on_happening=on_happening,
            backoff=backoff,
            command=command,
        )
        self.replicas: tuple[LocalReplica, ...] = tuple(self._make(plan) for plan in plans)
        """Those that serve, each in its place."""
        self._beside: set[LocalReplica] = set()
        """Those that are tried, and those that have been replaced and still end."""

    def try_beside(self, plan: ReplicaPlan) -> LocalReplica:
        """Start a replica beside those that serve; one that ends before it is ready has failed."""
        candidate = self._make(plan, one_try=True)
        self._beside.add(candidate)
        candidate.start()
        return candidate

    def put_in_place(self, candidate: LocalReplica, old: LocalReplica) -> None:
        """Let a replica that was tried serve in the place of another, which is to be ended."""
        self.replicas = tuple(candidate if each is old else each for each in self.replicas)
        self._beside.discard(candidate)
        self._beside.add(old)

    async def end(self, replica: LocalReplica, grace_s: float) -> None:
        """Drain and end a replica that does not serve, or no longer."""
        assert replica not in self.replicas
        await replica.stop(grace_s)
        self._beside.discard(replica)

    async def start(self) -> None:
        """Start every process; does not wait until they are ready."""
        for replica in self.replicas:
            replica.start()

    async def wait_ready(self) -> None:
        """Wait until every replica is ready. Raises the error of the first that never will be."""
        await asyncio.gather(*(replica.wait_ready() for replica in self.replicas))

    async def stop(self, grace_s: float) -> None:
        """Drain and end every process, all at once; nothing of them is left afterwards."""
        every = (*self.replicas, *self._beside)
        await asyncio.gather(*(replica.stop(grace_s) for replica in every))


def _final_error(exit_code: int | None, last_words: list[str]) -> TokenpathError | None:
    """The error of a process that said by its exit code that trying again is useless."""
    # The line is "LEVEL logger: sentence".
    sentence = last_words[-1].partition(": ")[2] if last_words else "the engine gave no reason"
    for error_class in (SpecError, ModelError):
        if exit_code == error_class.exit_code:
            return error_class(sentence)
    return None


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is None:
        return f"did not listen within {LISTEN_TIMEOUT_S:g} s and was killed"
    if exit_code < 0:
        hint = ", perhaps because memory ran out" if exit_code == -signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-exit_code).name}{hint}"
    if exit_code == EXIT_STUCK:
        return f"was stuck and ended itself (exit code {exit_code})"
    return f"ended with exit code {exit_code}"
