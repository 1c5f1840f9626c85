"""``/admin/models``: what runs, and the orders to put it to sleep, to wake it and to reload it.

What an order does is the operator's (``ModelOperator``); here are who may give it, its form and the
answer. An order that has begun goes on when its caller leaves: it is about the model, not the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenpath.gateway.auth import ANONYMOUS, Identity
from tokenpath.gateway.body import read_body
from tokenpath.gateway.call import call_of
from tokenpath.gateway.house import House
from tokenpath.gateway.openai.errors import decode
from tokenpath.protocol.errors import PermissionDeniedError
from tokenpath.protocol.replica import ReplicaState
from tokenpath.protocol.stages import Stage

ORDER_BYTES = 4096
"""Largest body of an order."""
MAX_GRACE_S = 3600.0
_Order = TypeVar("_Order", "SleepOrder", "NoOptions")


class ReloadStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The newest reload of a model."""

    state: Literal["preparing", "loading", "retiring", "done", "failed"]
    reason: str = ""
    """Why it failed."""


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A served model as its operator sees it."""

    name: str
    state: ReplicaState
    reason: str
    """Why it is in this state; empty where the state says all."""
    replica: str
    """The replica that takes its requests."""
    pid: int | None
    """Of the engine's process; null between two."""
    restarts: int
    """How often that replica's process was started again."""
    in_flight: int
    """Sequences that the gateway has with it."""
    resident_bytes: int | None
    """Memory of the process, as it last said; null if it is not known."""
    reload: ReloadStatus | None
    """Null if it was never reloaded."""


class ModelStatusList(msgspec.Struct, frozen=True):
    """All served models."""

    object: Literal["list"]
    data: list[ModelStatus]


class SleepOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to put a model to sleep."""

    grace_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_GRACE_S)] = 30.0
    """How long to wait for running requests; with 0 they keep the model awake."""
    kv: Literal["keep", "drop"] = "keep"
    """Whether KV blocks that would survive a restart survive the sleep."""


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of an order without options: an empty object, or nothing."""


class ModelOperator(Protocol):
    """What can be done with the models of a server. Every order names a served model."""

    def status(self, name: str) -> ModelStatus:
        """Raises ``ModelNotFoundError``."""
        ...

    def every(self) -> list[ModelStatus]:
        """Every model's status."""
        ...

    async def sleep(self, name: str, *, grace_s: float, keep_kv: bool) -> None:
        """Returns when it sleeps. Raises ``ConflictError``, ``ModelNotFoundError``."""
        ...

    async def wake(self, name: str) -> None:
        """Returns when it is ready. Raises ``ConflictError``, ``ModelNotFoundError``."""
        ...

    async def reload(self, name: str) -> None:
        """Returns when requests go to the new version. Raises ``ConflictError`` if it failed."""
        ...


class AdminEndpoints:
    """The routes under ``/admin``."""

    def __init__(self, house: House, operator: ModelOperator) -> None:
        self._house = house
        self._operator = operator
        self._sleep = msgspec.json.Decoder(SleepOrder)
        self._none = msgspec.json.Decoder(NoOptions)

    async def every(self, request: Request) -> Response:
        """All models."""
        self._admit(request, "/admin/models")
        return _answer(ModelStatusList("list", self._operator.every()))

    async def one(self, request: Request) -> Response:
        """One model."""
        self._admit(request, "/admin/models/{name}")
        return _answer(self._operator.status(request.path_params["name"]))

    async def sleep(self, request: Request) -> Response:
        """Put a model to sleep."""
        order = await self._order(request, "sleep", self._sleep)
        return await self._obey(
            request,
            lambda name: self._operator.sleep(
                name, grace_s=order.grace_s, keep_kv=order.kv == "keep"
            ),
        )

    async def wake(self, request: Request) -> Response:
        """Wake a model."""
        await self._order(request, "wake", self._none)
        return await self._obey(request, self._operator.wake)

    async def reload(self, request: Request) -> Response:
        """Replace a model's engine by one of the present files and spec."""
        await self._order(request, "reload", self._none)
        return await self._obey(request, self._operator.reload)

    async def _order(
        self, request: Request, verb: str, decoder: msgspec.json.Decoder[_Order]
    ) -> _Order:
        self._admit(request, f"/admin/models/{{name}}/{verb}")
        self._house.draining.check()
        call = call_of(request.scope)
        with call.ledger.stage(Stage.RECEIVE):
            body = await read_body(
                request.receive,
                call.headers,
                limit_bytes=ORDER_BYTES,
                seconds=self._house.body_s,
            )
            return decode(decoder, body if body.strip() else b"{}")

    async def _obey(self, request: Request, order: Callable[[str], Awaitable[None]]) -> Response:
        name = request.path_params["name"]
        call_of(request.scope).model = self._operator.status(name).name
        await asyncio.shield(asyncio.ensure_future(order(name)))
        return _answer(self._operator.status(name))

    def _admit(self, request: Request, endpoint: str) -> None:
        call = call_of(request.scope)
        call.endpoint = endpoint
        with call.ledger.stage(Stage.AUTHENTICATE):
            identity = self._house.authenticator.authenticate(call.headers)
        call.key_id = identity.key_id
        check_admin(identity, local=self._house.settings.admin == "local")


def check_admin(identity: Identity, *, local: bool) -> None:
    """Refuse who may not operate the server. Raises ``PermissionDeniedError``.

    ``local``: on a server without keys, whoever was let in may.
    """
    if identity.admin or (local and identity is ANONYMOUS):
        return
    if identity is ANONYMOUS:
        raise PermissionDeniedError(
            "a server without API keys is operated by nobody; create a key with `tokenpath keys "
            "create NAME --admin`, or set gateway.admin to 'local'"
        )
    raise PermissionDeniedError(
        "this key may ask models but not operate the server; use one made with `tokenpath keys "
        "create NAME --admin`"
    )


def _answer(body: ModelStatus | ModelStatusList) -> Response:
    return Response(
        msgspec.json.encode(body),
        media_type="application/json",
        headers={"cache-control": "no-store"},
    )
