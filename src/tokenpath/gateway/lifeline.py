"""What may end a call from outside: its deadline, its client, or the server's shutdown.

All three cut the same line, so that there is one way in which a running call stops, wherever it is
waiting: the body of ``async with lifeline`` is cancelled, everything in it is cleaned up, and the
cause comes out as a typed error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from starlette.types import Receive

from tokenpath.protocol.errors import CancelledError, DeadlineError, DrainingError, TokenpathError

RESTART_RETRY_S = 5.0
"""Retry-After while shutting down: about what a restart takes."""
LAST_WORDS_S = 2.0
"""How long calls that were cut at the end of the grace have to tell their clients."""


class Lifeline:
    """One call's line. Used once."""

    def __init__(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self.seconds = seconds
        self._deadline = loop.time() + seconds
        self._cause: TokenpathError | None = None
        self._timeout = asyncio.timeout_at(self._deadline)
        self._held = False

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; never less than 1 ms."""
        left = self._deadline - asyncio.get_running_loop().time()
        return min(self.seconds, max(0.001, left))

    def cut(self, cause: TokenpathError) -> None:
        """End the call now, with ``cause``. The first cause counts."""
        if self._cause is None:
            self._cause = cause
            if self._held and not self._timeout.expired():
                self._timeout.reschedule(0)

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Run the call's work. Raises what cut it, or ``DeadlineError``."""
        if self._cause is not None:
            raise self._cause
        try:
            async with self._timeout:
                self._held = True
                try:
                    yield
                finally:
                    self._held = False
        except TimeoutError:
            if not self._timeout.expired():
                raise
            raise self._cause or DeadlineError(
                f"The request ran longer than the {self.seconds:g} s it may."
            ) from None

    @asynccontextmanager
    async def watch(self, receive: Receive, answered: Callable[[], bool]) -> AsyncIterator[None]:
        """Cut the line when the client goes away. The body must have been read before.

        Servers also report a disconnect once the answer is complete, which ``answered`` tells.
        """
        watcher = asyncio.create_task(self._until_disconnect(receive, answered))
        try:
            yield
        finally:
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher

    async def _until_disconnect(self, receive: Receive, answered: Callable[[], bool]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not answered():
            self.cut(CancelledError("The client went away."))


class Draining:
    """The switch that lets the running calls finish and admits no new ones."""

    def __init__(self) -> None:
        self.on = False
        self._running: set[Lifeline] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        """Generation calls in work."""
        return len(self._running)

    def check(self) -> None:
        """Raise ``DrainingError`` once the switch is on."""
        if self.on:
            raise DrainingError(
                "The server is shutting down and takes no new requests.",
                retry_after_s=RESTART_RETRY_S,
            )

    @asynccontextmanager
    async def admit(self, lifeline: Lifeline) -> AsyncIterator[None]:
        """Count a call as running while the ``with`` lasts. Raises ``DrainingError``."""
        self.check()
        self._running.add(lifeline)
        self._idle.clear()
        try:
            yield
        finally:
            self._running.discard(lifeline)
            if not self._running:
                self._idle.set()

    def begin(self) -> None:
        """Refuse new calls from now on."""
        self.on = True

    async def drain(self, grace_s: float) -> int:
        """Refuse new calls, wait up to ``grace_s`` for the running ones, then end them.

        Each call that is ended gets an error (or an error event in its stream). Returns how many
        had to be.
        """
        self.begin()
        if await self._wait(grace_s):
            return 0
        cut = len(self._running)
        for lifeline in tuple(self._running):
            lifeline.cut(DrainingError("The server shut down before the request had finished."))
        await self._wait(LAST_WORDS_S)
        return cut

    async def _wait(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
