"""The way of a call for vectors through the gateway: embeddings, scores and classes.

The steps and stages are those of ``generate``; what differs is that inputs are read whole, and the
answer is sent when the last vector is here. A client that leaves, a deadline and the server's end
all cancel the call, which withdraws its inputs from the engine before the next step.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from starlette.types import Receive, Scope, Send

from tokenpath.config.spec import Limits
from tokenpath.gateway.call import Call, call_of
from tokenpath.gateway.house import House
from tokenpath.gateway.lifeline import Lifeline
from tokenpath.gateway.respond import send_json
from tokenpath.protocol.errors import ReplicaLostError, UnavailableError, from_info
from tokenpath.protocol.events import Failed, Finish, FinishReason, Usage
from tokenpath.protocol.pooling import PoolingInput, PoolingRequest
from tokenpath.protocol.replica import Task
from tokenpath.protocol.stages import Stage
from tokenpath.router.router import Lease
from tokenpath.router.served import ServedModel

Vectors = npt.NDArray[np.float32]
Request = TypeVar("Request")


@dataclass(frozen=True, slots=True)
class PoolingPlan:
    """One call, ready to run."""

    model: ServedModel
    inputs: list[PoolingInput]

    @property
    def tokens(self) -> int:
        return sum(len(each.token_ids) for each in self.inputs)


class PoolingDoor(Protocol[Request]):
    """One API: how its requests become inputs, and vectors its answers."""

    @property
    def endpoint(self) -> str:
        """The route."""
        ...

    @property
    def tasks(self) -> Collection[Task]:
        """Of the models that it can answer for."""
        ...

    def decode(self, body: bytes) -> Request:
        """Raises ``InvalidRequestError``."""
        ...

    def model_name(self, request: Request) -> str: ...

    def priority(self, request: Request) -> int:
        """Lower is served first."""
        ...

    def check(self, request: Request, limits: Limits) -> None:
        """Everything that needs no tokens. Raises ``InvalidRequestError`` and its kinds."""
        ...

    async def inputs(
        self, request: Request, model: ServedModel, limits: Limits
    ) -> list[PoolingInput]:
        """Tokenize and check against the model. Raises ``InvalidRequestError`` and its kinds."""
        ...

    def answer(self, request: Request, plan: PoolingPlan, vectors: Vectors, /) -> bytes:
        """The JSON body; ``vectors`` has one row for each of the plan's inputs."""
        ...


class PoolingEndpoint(Generic[Request]):
    """The ASGI endpoint of one door."""

    def __init__(self, door: PoolingDoor[Request], house: House) -> None:
        self._door = door
        self._house = house

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = call_of(scope)
        call.endpoint = self._door.endpoint
        lifeline = Lifeline(self._house.settings.limits.request_s)
        async with lifeline.hold(), self._house.draining.admit(lifeline):
            await self._serve(call, lifeline, receive, send)

    async def _serve(self, call: Call, lifeline: Lifeline, receive: Receive, send: Send) -> None:
        house, door, limits = self._house, self._door, self._house.settings.limits
        request = await house.receive(call, receive, door.decode)
        async with lifeline.watch(receive, lambda: call.answered):
            plan: PoolingPlan | None = None
            # Again if the model is replaced meanwhile: its tokens may be others.
            while plan is None or not house.router.is_current(plan.model):
                with call.ledger.stage(Stage.POLICY):
                    model = house.model(call, door.model_name(request), door.tasks)
                    door.check(request, limits)
                with call.ledger.stage(Stage.TOKENIZE):
                    plan = PoolingPlan(model, await door.inputs(request, model, limits))
            call.usage = Usage(prompt_tokens=plan.tokens)
            with call.ledger.stage(Stage.ROUTE):
                lease = house.router.reserve(
                    model, house.queue_limits, sequences=1, prompt_tokens=plan.tokens
                )
            try:
                vectors = await _run(call, plan, lease, door.priority(request), lifeline.left_s)
            finally:
                lease.release()
            with call.ledger.stage(Stage.FLUSH):
                await send_json(send, door.answer(request, plan, vectors))


async def _run(
    call: Call, plan: PoolingPlan, lease: Lease, priority: int, timeout_s: float
) -> Vectors:
    """The vectors of all inputs, in their order.

    Cancelled, it withdraws them. Raises the replica's error, ``ReplicaLostError`` among them.
    """
    request = PoolingRequest(
        request_id=uuid.uuid4().hex,
        model=plan.model.name,
        inputs=plan.inputs,
        priority=priority,
        timeout_s=timeout_s,
    )
    parts: list[tuple[Sequence[int], Vectors]] = []
    async with aclosing(lease.replica.pool(request)) as events:
        async for event in events:
            if isinstance(event, Failed):
                if event.stages is not None:
                    call.ledger.merge(event.stages)
                raise from_info(event.error)
            if event.places:
                rows = np.frombuffer(event.vectors, "<f4").reshape(len(event.places), -1)
                parts.append((event.places, rows))
            if event.finish is not None:
                return _assembled(call, event.finish, parts, len(plan.inputs))
    raise ReplicaLostError("The replica's stream ended before the request had finished.")


def _assembled(
    call: Call, finish: Finish, parts: Sequence[tuple[Sequence[int], Vectors]], inputs: int
) -> Vectors:
    call.ledger.merge(finish.stages)
    call.usage = finish.usage
    if finish.reason is FinishReason.ABORT:
        raise UnavailableError("The server withdrew the request.", retry_after_s=1.0)
    vectors = np.empty((inputs, parts[0][1].shape[1]), dtype=np.float32)
    for places, rows in parts:
        vectors[list(places)] = rows
    return vectors
