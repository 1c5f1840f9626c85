"""``/health``, ``/ready`` and ``/metrics``: for probes and scrapers, open to all, as elsewhere.

They say nothing about requests' contents; whoever must hide them puts the server behind a proxy.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenpath.gateway.call import call_of
from tokenpath.gateway.lifeline import Draining
from tokenpath.observe.metrics import CONTENT_TYPE, Metrics
from tokenpath.observe.replica_metrics import ReplicaMetrics
from tokenpath.router.router import Router

_NO_STORE = {"cache-control": "no-store"}


class Probes:
    """Is the process alive, can a model answer, and what is being counted."""

    def __init__(
        self, router: Router, draining: Draining, metrics: Metrics, replicas: ReplicaMetrics
    ) -> None:
        self._router = router
        self._draining = draining
        self._metrics = metrics
        self._replicas = replicas

    async def health(self, request: Request) -> Response:
        """200 as long as the event loop runs."""
        self._note(request, "/health")
        return Response(b'{"status":"ok"}', media_type="application/json", headers=_NO_STORE)

    async def ready(self, request: Request) -> Response:
        """200 once some model can answer, with all states; else what a request would get."""
        self._note(request, "/ready")
        self._draining.check()
        if not any(model.ready for model in self._router.models):
            raise self._router.models[0].unready()
        states = {model.name: model.state for model in self._router.models}
        body = msgspec.json.encode({"status": "ready", "models": states})
        return Response(body, media_type="application/json", headers=_NO_STORE)

    async def metrics(self, request: Request) -> Response:
        """Everything, in Prometheus' text format."""
        self._note(request, "/metrics")
        await self._replicas.refresh()
        return Response(
            self._metrics.exposition(), headers={"content-type": CONTENT_TYPE, **_NO_STORE}
        )

    @staticmethod
    def _note(request: Request, endpoint: str) -> None:
        call = call_of(request.scope)
        call.endpoint = endpoint
        call.quiet = True
