"""From a model's name to the replica that answers, and the own count of what was sent there.

The count is synchronous: it changes in the same moment as the decision, so that a burst sees
itself even while the replicas' reports are a step old.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from tokenpath.policy.admission import Load, QueueLimits, admit
from tokenpath.protocol.errors import ModelNotFoundError, OverloadedError
from tokenpath.protocol.replica import Replica, ReplicaState, ReplicaStats
from tokenpath.router.served import ServedModel

SETTLED_POLL_S: Final = 0.02


class Lease:
    """A call's places on a replica, counted from ``Router.reserve`` until each is given back."""

    def __init__(self, post: Post, sequences: int) -> None:
        self._post = post
        self._sequences = sequences

    @property
    def replica(self) -> Replica:
        return self._post.replica

    def ended(self) -> None:
        """One of the sequences has ended."""
        if self._sequences:
            self._sequences -= 1
            self._post.in_flight -= 1

    def release(self) -> None:
        """All of them have. Releasing again changes nothing."""
        self._post.in_flight -= self._sequences
        self._sequences = 0


class Post:
    """One replica and what this gateway has sent it."""

    def __init__(self, replica: Replica, slots: int) -> None:
        self.replica = replica
        self.slots = slots
        self.in_flight = 0
        self._report: ReplicaStats | None = None
        self._unreported = 0
        self._unreported_tokens = 0

    def load(self) -> Load:
        """Both signals, now. A new report from the replica restarts the count since the report."""
        report = self.replica.last_stats
        if report is not self._report:
            self._report = report
            self._unreported = self._unreported_tokens = 0
        return Load(
            slots=self.slots,
            running=report.requests_running,
            waiting=report.requests_waiting,
            waiting_tokens=report.waiting_tokens,
            in_flight=self.in_flight,
            # What has already ended again cannot be waiting.
            unreported=min(self._unreported, self.in_flight),
            unreported_tokens=self._unreported_tokens if self.in_flight else 0,
        )

    def take(self, sequences: int, prompt_tokens: int) -> Lease:
        self.in_flight += sequences
        self._unreported += sequences
        self._unreported_tokens += prompt_tokens
        return Lease(self, sequences)


class Router:
    """The served models by name, and the choice among each one's replicas."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._by_name = {model.name: model for model in models}
        self._posts = {model: _posts(model) for model in models}
        """Also of models that were replaced, until their last call has ended."""

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """Those served now, in the order of the spec."""
        return tuple(self._by_name.values())

    def model(self, name: str) -> ServedModel:
        """The model that clients call ``name``. Raises ``ModelNotFoundError``."""
        found = self._by_name.get(name)
        if found is None:
            served = ", ".join(f"'{known}'" for known in self._by_name)
            shown = name if len(name) <= 100 else name[:100] + "…"  # noqa: PLR2004 (a line's worth)
            raise ModelNotFoundError(
                f"Model '{shown}' is not served here; served: {served}.", param="model"
            )
        return found

    def is_current(self, model: ServedModel) -> bool:
        """Whether the model is served still, and was not replaced by a newer version."""
        return self._by_name.get(model.name) is model

    def replace(self, model: ServedModel) -> ServedModel:
        """Serve this version of a model from now on; the one that it replaces.

        Calls that have places on the old one's replicas keep them; see ``settled``.
        """
        old = self.model(model.name)
        self._posts[model] = _posts(model)
        self._by_name[model.name] = model
        return old

    async def settled(self, old: ServedModel) -> None:
        """Wait until a replaced model's last call has ended, then forget it."""
        assert not self.is_current(old), "calls that come would never let it end"
        while self.in_flight(old):  # noqa: ASYNC110 - once a reload; not worth an event a call
            await asyncio.sleep(SETTLED_POLL_S)
        del self._posts[old]

    def choose(self, model: ServedModel) -> Replica:
        """The least loaded ready replica. Raises as ``ServedModel.unready`` if there is none."""
        return self._least_loaded(model).replica

    def reserve(
        self, model: ServedModel, limits: QueueLimits, *, sequences: int, prompt_tokens: int
    ) -> Lease:
        """Choose a replica and take places on it for one call, in one step.

        Raises ``OverloadedError`` (with Retry-After) if the least loaded replica's queue has no
        room, and as ``ServedModel.unready`` if no replica is ready.
        """
        post = self._least_loaded(model)
        refusal = admit(post.load(), limits, sequences=sequences, prompt_tokens=prompt_tokens)
        if refusal is not None:
            raise OverloadedError(refusal.reason, retry_after_s=refusal.retry_after_s)
        return post.take(sequences, prompt_tokens)

    def in_flight(self, model: ServedModel) -> int:
        """Sequences that this gateway has on the model's replicas now."""
        return sum(post.in_flight for post in self._posts[model])

    def _least_loaded(self, model: ServedModel) -> Post:
        able = [post for post in self._posts[model] if model.takes(post.replica)]
        if not able:
            raise model.unready()
        # One that sleeps is woken only where none is awake.
        ready = [post for post in able if post.replica.state is ReplicaState.READY]
        return min(ready or able, key=lambda post: post.load().sequences)


def _posts(model: ServedModel) -> list[Post]:
    return [Post(replica, model.max_running) for replica in model.replicas]
