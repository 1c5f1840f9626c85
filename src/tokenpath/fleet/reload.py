"""Replacing a replica by a newer version of the same model, without a moment in which none serves.

::

    PREPARING ──> LOADING ──> RETIRING ──> DONE
        └────────────┴──> FAILED   the old one serves on, as if nothing had been asked

The new process is started beside the old one. Only when it is ready do requests go to it, and only
when the last request of the old one has ended is that one ended.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Final

from tokenpath.fleet.lifecycle import IllegalTransitionError
from tokenpath.fleet.local import LocalFleet, LocalReplica, ReplicaPlan
from tokenpath.protocol.errors import TokenpathError

log = logging.getLogger("tokenpath.fleet")


class ReloadState(enum.StrEnum):
    """Where a reload stands."""

    PREPARING = "preparing"
    LOADING = "loading"
    RETIRING = "retiring"
    DONE = "done"
    FAILED = "failed"


_S = ReloadState
RELOAD_TRANSITIONS: Final[Mapping[ReloadState, frozenset[ReloadState]]] = MappingProxyType(
    {
        _S.PREPARING: frozenset({_S.LOADING, _S.FAILED}),
        _S.LOADING: frozenset({_S.RETIRING, _S.FAILED}),
        _S.RETIRING: frozenset({_S.DONE}),
        _S.DONE: frozenset(),
        _S.FAILED: frozenset(),
    }
)
RUNNING: Final = frozenset({_S.PREPARING, _S.LOADING, _S.RETIRING})


class Reload:
    """One reload of one replica, from its beginning."""

    def __init__(self, fleet: LocalFleet, old: LocalReplica) -> None:
        self.state = ReloadState.PREPARING
        self.reason = ""
        """Why it failed."""
        self._fleet = fleet
        self._old = old

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.state in RUNNING

    async def run(
        self,
        prepare: Callable[[], Awaitable[ReplicaPlan]],
        switch: Callable[[LocalReplica], None],
    ) -> None:
        """Bring the new version to serve. ``retire`` is to follow.

        ``prepare`` finds out what to run; ``switch`` sends requests to the new replica from the
        moment in which it is called. Raises what either of them or the new replica failed with;
        the old one then serves on.
        """
        candidate: LocalReplica | None = None
        try:
            plan = await prepare()
            self._move(ReloadState.LOADING)
            candidate = self._fleet.try_beside(plan)
            await candidate.wait_ready()
            switch(candidate)
        except BaseException as error:
            why = error.message if isinstance(error, TokenpathError) else type(error).__name__
            self._move(ReloadState.FAILED, why)
            if candidate is not None:
                await self._fleet.end(candidate, 0.0)
            raise
        self._fleet.put_in_place(candidate, self._old)
        self._move(ReloadState.RETIRING)

    async def retire(self, settled: Awaitable[None], grace_s: float) -> None:
        """End the old replica when ``settled`` tells that nobody needs it, or after ``grace_s``."""
        try:
            async with asyncio.timeout(grace_s):
                await settled
        except TimeoutError:
            log.warning("%s still works after %g s; ending it", self._old.replica_id, grace_s)
        await self._fleet.end(self._old, 0.0)
        self._move(ReloadState.DONE)

    def _move(self, to: ReloadState, reason: str = "") -> None:
        if to not in RELOAD_TRANSITIONS[self.state]:
            raise IllegalTransitionError(f"a reload cannot go from {self.state} to {to}")
        self.state, self.reason = to, reason
        log.info("reload of %s: %s %s", self._old.replica_id, to, reason)
