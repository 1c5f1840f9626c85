"""What an operator can do with the models of a running server: sleep, wake, reload.

The gateway decides who may; here the fleet's processes, the router's choice and the spec on the
disk are brought together. At most one order for a model is carried out at a time: a second one is
told of the first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from tokenpath.cli.deployment import ReadyModel, room_for
from tokenpath.fleet.local import LocalFleet, LocalReplica, ReplicaPlan
from tokenpath.fleet.reload import Reload
from tokenpath.gateway.admin import ModelStatus, ReloadStatus
from tokenpath.models import memory
from tokenpath.models.sizes import human_bytes
from tokenpath.observe.metrics import Metrics
from tokenpath.protocol.errors import (
    ConflictError,
    EngineError,
    ModelError,
    SpecError,
    UnavailableError,
)
from tokenpath.protocol.replica import ReplicaState
from tokenpath.router.router import Router
from tokenpath.router.served import ServedModel

MARGIN_S: Final = 30.0
"""On top of the longest life of a request, for one that had hardly begun when its model was
replaced."""

log = logging.getLogger("tokenpath.serve")


class Operator:
    """Carries out orders. Lives on the server's event loop."""

    def __init__(
        self,
        *,
        fleet: LocalFleet,
        router: Router,
        metrics: Metrics,
        prepare: Callable[[str], ReadyModel],
        plan: Callable[[ReadyModel, str], ReplicaPlan],
        serve: Callable[[ReadyModel, LocalReplica], ServedModel],
        request_s: float,
        available_bytes: Callable[[], int] = memory.available_bytes,
    ) -> None:
        """``request_s`` is the longest life of a request.

        ``prepare`` opens a model by its name as it is now, in a thread; ``plan`` says how to run
        it under a replica's id, and ``serve`` makes it known to the router.
        """
        self._fleet = fleet
        self._router = router
        self._metrics = metrics
        self._prepare = prepare
        self._plan = plan
        self._serve = serve
        self._request_s = request_s
        self._available_bytes = available_bytes
        self._reloads: dict[str, Reload] = {}
        self._versions: dict[str, int] = {}
        self._busy: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def status(self, name: str) -> ModelStatus:
        """See ``gateway.admin``."""
        model = self._router.model(name)
        replica = self._replica(model)
        reload = self._reloads.get(model.name)
        resident = replica.last_stats.resident_bytes
        return ModelStatus(
            name=model.name,
            state=replica.state,
            reason=replica.reason,
            replica=replica.replica_id,
            pid=replica.pid,
            restarts=replica.restarts,
            in_flight=self._router.in_flight(model),
            resident_bytes=resident or None,
            reload=None if reload is None else ReloadStatus(
                state=reload.state.value, reason=reload.reason
            ),
        )  # fmt: skip

    def every(self) -> list[ModelStatus]:
        """See ``gateway.admin``."""
        return [self.status(model.name) for model in self._router.models]

    async def sleep(self, name: str, *, grace_s: float, keep_kv: bool) -> None:
        """See ``gateway.admin``."""
        replica = self._replica(self._router.model(name))
        with self._alone(name, "put to sleep"), _as_conflict(name):
            await replica.sleep(grace_s, keep_kv=keep_kv)
            await self._ask(replica)

    async def wake(self, name: str) -> None:
        """See ``gateway.admin``."""
        replica = self._replica(self._router.model(name))
        with self._alone(name, "woken"), _as_conflict(name):
            await replica.wake()
            await self._ask(replica)

    async def reload(self, name: str) -> None:
        """See ``gateway.admin``. The old version's last requests may run on after this returns."""
        model = self._router.model(name)
        before = self._reloads.get(model.name)
        if before is not None and before.running:
            raise ConflictError(f"model '{name}' is being reloaded already ({before.state})")
        with self._alone(name, "reloaded"), _as_conflict(name):
            old = self._replica(model)
            reload = self._reloads[model.name] = Reload(self._fleet, old)
            made: list[ReadyModel] = []

            async def prepare() -> ReplicaPlan:
                ready = await asyncio.to_thread(self._prepare, model.name)
                self._check_room(ready, old)
                made.append(ready)
                number = self._versions[model.name] = self._versions.get(model.name, 0) + 1
                return self._plan(ready, f"{model.name}-0.{number}")

            def switch(new: LocalReplica) -> None:
                self._router.replace(self._serve(made[0], new))

            try:
                await reload.run(prepare, switch)
            except BaseException:
                self._metrics.reloaded(model.name, "failed")
                raise
            self._metrics.reloaded(model.name, "done")
            settled = self._router.settled(model)
            retiring = asyncio.create_task(reload.retire(settled, self._request_s + MARGIN_S))
            self._tasks.add(retiring)
            retiring.add_done_callback(self._tasks.discard)

    @staticmethod
    def _replica(model: ServedModel) -> LocalReplica:
        (replica,) = model.replicas
        assert isinstance(replica, LocalReplica)
        return replica

    @staticmethod
    async def _ask(replica: LocalReplica) -> None:
        """So that the answer tells the memory of now."""
        await replica.stats()

    @contextmanager
    def _alone(self, name: str, what: str) -> Iterator[None]:
        if name in self._busy:
            raise ConflictError(f"model '{name}' is being {self._busy[name]} just now")
        self._busy[name] = what
        try:
            yield
        finally:
            del self._busy[name]

    def _check_room(self, ready: ReadyModel, old: LocalReplica) -> None:
        """Refuse what the machine has no room for beside what runs. Raises ``ConflictError``."""
        needed, available = room_for(ready, old.card), self._available_bytes()
        if needed > available:
            hint = (
                "make room first"
                if old.state is ReplicaState.ASLEEP
                else f"put it to sleep first (`tokenpath replicas sleep {ready.name}`) or make room"
            )
            raise ConflictError(
                f"there is no room for a second '{ready.name}' beside the first: it takes about "
                f"{human_bytes(needed)}, and {human_bytes(available)} are available; {hint}"
            )


@contextmanager
def _as_conflict(name: str) -> Iterator[None]:
    """What stood in the way of an order, in the words of its cause: an operator may read them."""
    try:
        yield
    except (ModelError, SpecError, EngineError, UnavailableError) as error:
        raise ConflictError(f"model '{name}': {error.message}") from None
