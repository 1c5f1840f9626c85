"""What every call at the front door needs, and the beginning that all calls have in common."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

from starlette.types import Receive

from tokenpath.config.spec import Gateway
from tokenpath.gateway.auth import Authenticator
from tokenpath.gateway.body import read_body
from tokenpath.gateway.call import Call
from tokenpath.gateway.lifeline import Draining
from tokenpath.gateway.tasks import check_task
from tokenpath.observe.metrics import Metrics
from tokenpath.policy.admission import QueueLimits
from tokenpath.protocol.replica import Task
from tokenpath.protocol.stages import Stage
from tokenpath.router.router import Router
from tokenpath.router.served import ServedModel

Request = TypeVar("Request")


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """What every call needs; one a server."""

    settings: Gateway
    router: Router
    authenticator: Authenticator
    metrics: Metrics
    draining: Draining
    body_s: float
    """How long a body may take to arrive."""

    @property
    def queue_limits(self) -> QueueLimits:
        limits = self.settings.limits
        return QueueLimits(
            requests=limits.queued_requests,
            tokens=limits.queued_tokens,
            tenant_share=limits.tenant_queue_share,
        )

    async def receive(
        self, call: Call, receive: Receive, decode: Callable[[bytes], Request]
    ) -> Request:
        """Find out who calls, and only then read and decode the body.

        Raises ``AuthenticationError`` and what ``read_body`` and ``decode`` raise.
        """
        with call.ledger.stage(Stage.AUTHENTICATE):
            identity = self.authenticator.authenticate(call.headers)
        if identity.key_id is not None:
            call.key_id, call.tenant = str(identity.key_id), identity.name
        with call.ledger.stage(Stage.RECEIVE):
            limit_bytes = self.settings.limits.body_bytes
            body = await read_body(
                receive, call.headers, limit_bytes=limit_bytes, seconds=self.body_s
            )
            return decode(body)

    def model(self, call: Call, name: str, tasks: Collection[Task]) -> ServedModel:
        """The model of that name, if it is served for one of the endpoint's tasks.

        Raises ``ModelNotFoundError`` and ``UnsupportedError``.
        """
        model = self.router.model(name)
        call.model = model.name
        check_task(model, tasks, call.endpoint)
        return model
