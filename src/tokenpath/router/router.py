"""From a model's name to the replica that answers, and the own count of what was sent there.

The count is synchronous: it changes in the same moment as the decision, so that a burst sees
itself even while the replicas' reports are a step old.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from tokenpath.policy.admission import Load, QueueLimits, admit
from tokenpath.policy.handover import least_busy
from tokenpath.protocol.errors import ModelNotFoundError, OverloadedError
from tokenpath.protocol.handover import PrefillPeer
from tokenpath.protocol.replica import Replica, ReplicaState, ReplicaStats
from tokenpath.router.served import Prefiller, ServedModel

SETTLED_POLL_S: Final = 0.02


class Lease:
    """A call's places on a replica, counted from ``Router.reserve`` until each is given back."""

    def __init__(
        self,
        post: Post,
        sequences: int,
        prompt_tokens: int,
        tenant: str,
        errand: Errand | None = None,
    ) -> None:
        self._post = post
        self._sequences = sequences
        self._prompt_tokens = prompt_tokens
        self._tenant = tenant
        self._errand = errand

    @property
    def replica(self) -> Replica:
        return self._post.replica

    @property
    def prefill_at(self) -> PrefillPeer | None:
        """Who may compute the call's long prompts for the replica; None: it does so itself."""
        return None if self._errand is None else self._errand.peer

    def prefilled(self) -> None:
        """The first token has come, so that nobody prefills for the call any more."""
        if self._errand is not None:
            self._errand.done()

    def ended(self) -> None:
        """One of the sequences has ended."""
        if self._sequences:
            self._give_back(1)

    def release(self) -> None:
        """All of them have. Releasing again changes nothing."""
        self._give_back(self._sequences)
        self.prefilled()

    def _give_back(self, sequences: int) -> None:
        self._sequences -= sequences
        # A call's prompts are counted until the last of its sequences ends.
        tokens, self._prompt_tokens = (
            (0, self._prompt_tokens) if self._sequences else (self._prompt_tokens, 0)
        )
        self._post.give_back(sequences, tokens, self._tenant)


class Errands:
    """A model's prefilling replicas, and the prompt tokens that this gateway has each compute."""

    def __init__(self, prefillers: Sequence[Prefiller]) -> None:
        self._prefillers = prefillers
        self.tokens = [0] * len(prefillers)

    def send(self, prompt_tokens: int) -> Errand | None:
        """Choose one for so many tokens; None if none takes orders now."""
        peers = [prefiller.prefills_at for prefiller in self._prefillers]
        place = least_busy(
            [
                None if peer is None else tokens
                for peer, tokens in zip(peers, self.tokens, strict=True)
            ]
        )
        peer = None if place is None else peers[place]
        if place is None or peer is None:
            return None
        self.tokens[place] += prompt_tokens
        return Errand(self, place, prompt_tokens, peer)


class Errand:
    """A call's prompts at one prefilling replica, counted until they are computed."""

    def __init__(self, errands: Errands, place: int, prompt_tokens: int, peer: PrefillPeer) -> None:
        self.peer = peer
        self._errands = errands
        self._place = place
        self._left = prompt_tokens

    def done(self) -> None:
        """They are. Calling it again changes nothing."""
        self._errands.tokens[self._place] -= self._left
        self._left = 0


class Post:
    """One replica and what this gateway has sent it."""

    def __init__(self, replica: Replica, slots: int) -> None:
        self.replica = replica
        self.slots = slots
        self.in_flight = 0
        self._report: ReplicaStats | None = None
        self._unreported = 0
        self._unreported_tokens = 0
        self._tenants: dict[str, tuple[int, int]] = {}
        """Sequences and prompt tokens in flight, of tenants that have any."""

    def load(self, tenant: str = "") -> Load:
        """Both signals, now. A new report from the replica restarts the count since the report."""
        sequences, tokens = self._tenants.get(tenant, (0, 0))
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
            tenant_in_flight=sequences,
            tenant_tokens=tokens,
        )

    def take(
        self, sequences: int, prompt_tokens: int, tenant: str = "", errand: Errand | None = None
    ) -> Lease:
        had, tokens = self._tenants.get(tenant, (0, 0))
        self._tenants[tenant] = had + sequences, tokens + prompt_tokens
        self.in_flight += sequences
        self._unreported += sequences
        self._unreported_tokens += prompt_tokens
        return Lease(self, sequences, prompt_tokens, tenant, errand)

    def give_back(self, sequences: int, prompt_tokens: int, tenant: str) -> None:
        """Some of what was taken has ended."""
        if not sequences:
            return
        self.in_flight -= sequences
        had, tokens = self._tenants.pop(tenant)
        if had > sequences:
            self._tenants[tenant] = had - sequences, tokens - prompt_tokens


class Router:
    """The served models by name, and the choice among each one's replicas."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._by_name = {model.name: model for model in models}
        self._posts = {model: _posts(model) for model in models}
        """Also of models that were replaced, until their last call has ended."""
        self._errands = {model: Errands(model.handovers.prefillers) for model in models}

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
        self._errands[model] = Errands(model.handovers.prefillers)
        self._by_name[model.name] = model
        return old

    async def settled(self, old: ServedModel) -> None:
        """Wait until a replaced model's last call has ended, then forget it."""
        assert not self.is_current(old), "calls that come would never let it end"
        while self.in_flight(old):  # noqa: ASYNC110 - once a reload; not worth an event a call
            await asyncio.sleep(SETTLED_POLL_S)
        del self._posts[old], self._errands[old]

    def choose(self, model: ServedModel) -> Replica:
        """The least loaded ready replica. Raises as ``ServedModel.unready`` if there is none."""
        return self._least_loaded(model).replica

    def reserve(
        self,
        model: ServedModel,
        limits: QueueLimits,
        *,
        sequences: int,
        prompt_tokens: int,
        tenant: str = "",
        prompts: Sequence[int] = (),
    ) -> Lease:
        """Choose a replica and take places on it for one call, in one step.

        ``tenant`` is the API key's name; ``prompts`` are the lengths of those that another replica
        could compute.

        Raises ``OverloadedError`` (with Retry-After) if the least loaded replica's queue has no
        room, or none for more of this tenant's, and as ``ServedModel.unready`` if no replica is
        ready.
        """
        post = self._least_loaded(model)
        refusal = admit(
            post.load(tenant),
            limits,
            sequences=sequences,
            prompt_tokens=prompt_tokens,
            has_tenant=bool(tenant),
        )
        if refusal is not None:
            raise OverloadedError(refusal.reason, retry_after_s=refusal.retry_after_s)
        errand = self._errand(model, post.replica, prompts)
        return post.take(sequences, prompt_tokens, tenant, errand)

    def _errand(
        self, model: ServedModel, replica: Replica, prompts: Sequence[int]
    ) -> Errand | None:
        handovers = model.handovers
        long = sum(tokens for tokens in prompts if tokens > handovers.min_prompt_tokens)
        if not long or replica.replica_id not in handovers.takers:
            return None
        return self._errands[model].send(long)

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
