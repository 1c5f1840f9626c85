"""``/v1/models`` and ``/v1/models/{id}``: what is served."""

from __future__ import annotations

from contextlib import suppress

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenpath.gateway.auth import Authenticator
from tokenpath.gateway.call import call_of
from tokenpath.gateway.openai.answers import ModelList, ModelObject
from tokenpath.protocol.errors import UnavailableError
from tokenpath.protocol.stages import Stage
from tokenpath.router.router import Router
from tokenpath.router.served import ServedModel


class ModelEndpoints:
    """Lists the models; needs a key as generation does."""

    def __init__(self, router: Router, authenticator: Authenticator) -> None:
        self._router = router
        self._authenticator = authenticator

    async def every(self, request: Request) -> Response:
        """All served models."""
        self._admit(request, "/v1/models")
        models = ModelList("list", [_described(model) for model in self._router.models])
        return Response(msgspec.json.encode(models), media_type="application/json")

    async def one(self, request: Request) -> Response:
        """One served model. Raises ``ModelNotFoundError``."""
        self._admit(request, "/v1/models/{id}")
        model = self._router.model(request.path_params["id"])
        return Response(msgspec.json.encode(_described(model)), media_type="application/json")

    def _admit(self, request: Request, endpoint: str) -> None:
        call = call_of(request.scope)
        call.endpoint = endpoint
        with call.ledger.stage(Stage.AUTHENTICATE):
            identity = self._authenticator.authenticate(call.headers)
        call.key_id = None if identity.key_id is None else str(identity.key_id)


def _described(model: ServedModel) -> ModelObject:
    context: int | None = None
    dimensions: int | None = None
    with suppress(UnavailableError):  # loading
        context, dimensions = model.card.max_context_tokens, model.card.dimensions
    return ModelObject(
        model.name,
        "model",
        model.created,
        "tokenpath",
        context,
        model.task,
        dimensions,
        model.state,
    )
