"""The one state of an engine's server, and what moves it: loads, sleeps, wakes, the end.

Orders to sleep and to wake come from any gateway, from requests and from idleness; whoever waits
for the same end shares it. Everything happens on one event loop, so that a state asked for and a
state moved have no moment between them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Literal

import psutil

from tokenpath.config.spec import EngineSettings
from tokenpath.engine import worker as work
from tokenpath.engine.life import COMPUTING, RESTING, EngineState, moved
from tokenpath.protocol.errors import (
    ConflictError,
    DrainingError,
    NotReadyError,
    TokenpathError,
)
from tokenpath.protocol.link import LoadFailed, Progress, Ready, Resting
from tokenpath.protocol.replica import ModelCard, ReplicaStats

Status = Progress | Ready | Resting | LoadFailed
_S = EngineState
_SHOWN: dict[EngineState, Literal["falling_asleep", "asleep", "waking"]] = {
    _S.SETTLING: "falling_asleep",
    _S.RELEASING: "falling_asleep",
    _S.ASLEEP: "asleep",
    _S.WAKING: "waking",
}
PROGRESS_STEP = 0.01

log = logging.getLogger("tokenpath.engine")


class Rest:
    """Where the engine stands. Lives on one event loop."""

    def __init__(
        self,
        inbox: work.Inbox,
        settings: EngineSettings,
        *,
        live: Callable[[], int],
        announce: Callable[[Status], None],
    ) -> None:
        """``live`` counts the requests that are not ended; ``announce`` tells all gateways."""
        self.state = EngineState.LOADING
        self.status: Status = Progress("starting", 0.0)
        """What a gateway that connects now is told."""
        self.core = False
        """Whether the worker has a core."""
        self.wakes_on_request = settings.when_asleep == "wake"
        self._sleep_after_s = settings.sleep_after_s
        self._inbox = inbox
        self._live = live
        self._announce = announce
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._card: ModelCard | None = None
        self._totals = ReplicaStats()
        self._wake_error: TokenpathError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._falling: asyncio.Task[None] | None = None

    # What happened.

    def progressed(self, what: str, fraction: float) -> None:
        """A load has come so far. Steps too small to be seen are not told."""
        last = self.status
        if (
            isinstance(last, Progress)
            and last.what == what
            and fraction < 1.0
            and fraction - last.fraction < PROGRESS_STEP
        ):
            return
        progress = Progress(what, fraction)
        if self.state is _S.LOADING:
            self.status = progress
        self._announce(progress)

    def loaded(self, card: ModelCard) -> None:
        """There is a core, for the first time or again."""
        self._card, self.core = card, True
        if self.state is not _S.DRAINING:
            self._move(_S.READY, Ready(card))
            self.became_idle()

    def load_failed(self, error: TokenpathError) -> None:
        """There will never be a core."""
        if self.state is not _S.DRAINING:
            self._move(_S.FAILED, LoadFailed(error.info()))

    def slept(self, totals: ReplicaStats) -> None:
        """The core is gone. Wakes again at once if a request came meanwhile."""
        self._totals, self.core = totals, False
        if self.state is _S.DRAINING:
            return
        self._rest(_S.ASLEEP)
        log.info("asleep, with %d MB resident", self.stats().resident_bytes // 1_000_000)
        if self._live():
            self._begin_wake()

    def wake_failed(self, error: TokenpathError) -> None:
        """There is no core still."""
        log.error("the model could not be woken: %s", error.message)
        self._wake_error = error
        if self.state is not _S.DRAINING:
            self._rest(_S.ASLEEP)

    def drain(self) -> None:
        """Take no more requests, for good."""
        self._disarm()
        if self.state is not _S.DRAINING:
            self.state = moved(self.state, _S.DRAINING)
            self._tell()

    def request_came(self) -> None:
        """A request was taken: sleep is called off, or ended."""
        self._disarm()
        if self.state is _S.SETTLING:
            self._call_off()
        elif self.state is _S.ASLEEP:
            self._begin_wake()

    def became_idle(self) -> None:
        """The last request has ended, or there was none yet."""
        self._tell()
        if self._sleep_after_s is not None and self.state is _S.READY and not self._live():
            self._disarm()
            self._timer = self._loop.call_later(self._sleep_after_s, self._fall_asleep)

    # Orders.

    async def sleep(self, grace_s: float, *, keep_kv: bool) -> None:
        """Let go of the core once nothing runs; see ``protocol.replica``. Raises ConflictError."""
        if self.state is _S.READY:
            running = self._live()
            if running and grace_s <= 0:
                raise ConflictError(f"{_running(running)}, so the model was not put to sleep")
            self._disarm()
            self._rest(_S.SETTLING)
            await self._settle(grace_s, keep_kv=keep_kv)
        elif self.state not in {_S.SETTLING, _S.RELEASING, _S.ASLEEP}:
            raise ConflictError(
                f"the model is {self.state}; only one that is ready can be put to sleep"
            )
        await self._while(_S.SETTLING, _S.RELEASING)
        if self.state not in RESTING:
            raise ConflictError("a request came while the model was going to sleep; it stays awake")

    async def wake(self) -> None:
        """Load the core again; see ``protocol.replica``. Raises what loading raised."""
        if self.state is _S.SETTLING:
            self._call_off()
        await self._while(_S.RELEASING)
        if self.state is _S.ASLEEP:
            self._begin_wake()
        await self._while(_S.WAKING)
        if self.state in COMPUTING:
            return
        if self.state is _S.ASLEEP and self._wake_error is not None:
            raise self._wake_error
        if self.state is _S.LOADING:
            raise NotReadyError("the model is still loading")
        raise DrainingError("the replica is shutting down")

    async def until_core(self) -> None:
        """Wait until there is a core to give a request to."""
        while self.state not in COMPUTING:
            await self._changed.wait()

    def stats(self) -> ReplicaStats:
        """While there is no core: all that the cores before have counted, and the memory now."""
        resident = int(psutil.Process().memory_info().rss)
        return ReplicaStats(resident_bytes=resident).after(self._totals)

    # Moves.

    async def _settle(self, grace_s: float, *, keep_kv: bool) -> None:
        """Wait for what runs, then have the worker let go of its core."""
        try:
            async with asyncio.timeout(grace_s):
                while self.state is _S.SETTLING and self._live():
                    await self._changed.wait()
        except TimeoutError:
            running = self._live()
            if self.state is _S.SETTLING and running:
                self._call_off()
                raise ConflictError(
                    f"{_running(running)} still after {grace_s:g} s, so the model was not put to "
                    "sleep"
                ) from None
        if self.state is _S.SETTLING:
            self._rest(_S.RELEASING)
            self._inbox.put(work.Sleep(keep_kv))

    def _fall_asleep(self) -> None:
        async def fall() -> None:
            try:
                await self.sleep(0.0, keep_kv=True)
            except ConflictError as error:
                log.debug("not asleep: %s", error.message)

        if self.state is _S.READY and not self._live():
            log.info("nothing to do for %g s; going to sleep", self._sleep_after_s)
            self._falling = self._loop.create_task(fall())

    def _call_off(self) -> None:
        assert self._card is not None
        self._move(_S.READY, Ready(self._card))
        self.became_idle()

    def _begin_wake(self) -> None:
        self._wake_error = None
        self._rest(_S.WAKING)
        self._inbox.put(work.Wake())

    def _rest(self, to: EngineState) -> None:
        assert self._card is not None
        self._move(to, Resting(_SHOWN[to], self._card))

    def _move(self, to: EngineState, status: Status) -> None:
        self.state = moved(self.state, to)
        repeated = status == self.status
        self.status = status
        if not repeated:
            self._announce(status)
        self._tell()

    async def _while(self, *states: EngineState) -> None:
        while self.state in states:
            await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _running(count: int) -> str:
    return f"{count} request{'s run' if count > 1 else ' runs'}"
