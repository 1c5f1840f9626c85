"""The gateway as one ASGI application: routes in front of the house's endpoints.

To be served by uvicorn with ``server_header=False`` and ``access_log=False`` (both are done here),
on uvloop and httptools.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.routing import Route
from starlette.routing import Router as Routes
from starlette.types import Receive, Scope, Send

from tokenpath.config.spec import Spec
from tokenpath.gateway.admin import AdminEndpoints, ModelOperator
from tokenpath.gateway.auth import Authenticator
from tokenpath.gateway.body import BODY_S
from tokenpath.gateway.front import Front
from tokenpath.gateway.generate import GenerationEndpoint
from tokenpath.gateway.house import House
from tokenpath.gateway.lifeline import Draining
from tokenpath.gateway.openai.chat import ChatDoor
from tokenpath.gateway.openai.completions import CompletionDoor
from tokenpath.gateway.openai.models import ModelEndpoints
from tokenpath.gateway.openai.openapi import openapi_document
from tokenpath.gateway.openai.pooling_doors import DOORS
from tokenpath.gateway.pages import Pages
from tokenpath.gateway.pool import PoolingEndpoint
from tokenpath.gateway.probes import Probes
from tokenpath.observe.metrics import Metrics
from tokenpath.observe.replica_metrics import ReplicaMetrics
from tokenpath.router.router import Router


class App:
    """The ASGI application, and the switch that drains it."""

    def __init__(self, front: Front, draining: Draining) -> None:
        self._front = front
        self.draining = draining
        """``await app.draining.drain(grace_s)`` before stopping the server."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Starlette's routes raise instead of answering in plain text where there is an app.
        scope["app"] = self
        await self._front(scope, receive, send)


def create_app(
    *,
    spec: Spec,
    router: Router,
    authenticator: Authenticator,
    metrics: Metrics,
    operator: ModelOperator | None = None,
    clock: Callable[[], float] = time.monotonic,
    body_s: float = BODY_S,
) -> App:
    """Build the application. ``clock`` is monotonic, in seconds, and measures the stages.

    Without an ``operator`` there is nothing under ``/admin``.
    """
    draining = Draining()
    house = House(
        settings=spec.gateway,
        router=router,
        authenticator=authenticator,
        metrics=metrics,
        draining=draining,
        body_s=body_s,
    )
    replicas = ReplicaMetrics(lambda: {model.name: model.replicas for model in router.models})
    metrics.registry.register(replicas)
    probes = Probes(router, draining, metrics, replicas)
    models = ModelEndpoints(router, authenticator)
    names = [model.name for model in router.models]
    pages = Pages(openapi_document(spec.gateway.limits, names, admin=operator is not None))
    chat, completions = ChatDoor(), CompletionDoor()
    pooling = [Route(d.endpoint, PoolingEndpoint(d, house), methods=["POST"]) for d in DOORS]
    routes = Routes(
        [
            Route(chat.endpoint, GenerationEndpoint(chat, house), methods=["POST"]),
            Route(completions.endpoint, GenerationEndpoint(completions, house), methods=["POST"]),
            *pooling,
            *([] if operator is None else _admin(AdminEndpoints(house, operator))),
            Route("/v1/models", models.every),
            Route("/v1/models/{id:path}", models.one),
            Route("/health", probes.health),
            Route("/ready", probes.ready),
            Route("/metrics", probes.metrics),
            Route("/openapi.json", pages.document),
            Route("/docs", pages.page),
        ],
        redirect_slashes=False,
    )
    return App(Front(routes, metrics, clock), draining)


def _admin(admin: AdminEndpoints) -> list[Route]:
    path = "/admin/models/{name:path}"
    orders = {"sleep": admin.sleep, "wake": admin.wake, "reload": admin.reload}
    return [
        Route("/admin/models", admin.every),
        *(Route(f"{path}/{verb}", obey, methods=["POST"]) for verb, obey in orders.items()),
        Route(path, admin.one),
    ]
