"""From ready models to the replicas that serve them: who is started, and who prefills for whom."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenpath.cli.deployment import ReadyModel
from tokenpath.config.launch import HandoverLaunch
from tokenpath.config.replicas import Disaggregation, HandoverTls, ReplicaSettings
from tokenpath.fleet.local import LocalReplica, ReplicaPlan
from tokenpath.policy.cpu_shares import Share
from tokenpath.policy.handover import gives, takes_requests
from tokenpath.protocol.errors import SpecError
from tokenpath.protocol.handover import PrefillPeer
from tokenpath.router.served import Handovers, Prefiller, RemotePrefiller, ServedModel


@dataclass(frozen=True, slots=True)
class Place:
    """One replica of the spec."""

    replica_id: str
    model: ReadyModel
    settings: ReplicaSettings


def places(models: Sequence[ReadyModel]) -> list[Place]:
    """Every replica of the models; of each model's, those that take requests first."""
    return [
        Place(f"{model.name}-{number}", model, settings)
        for model in models
        for number, settings in enumerate(
            sorted(model.spec.replicas, key=lambda each: not takes_requests(each.role))
        )
    ]


def only_place(model: ReadyModel, replica_id: str) -> Place:
    """That of a model with one replica, under an id that may not be the first's."""
    (settings,) = model.spec.replicas
    return Place(replica_id, model, settings)


def replica_plan(place: Place, share: Share) -> ReplicaPlan:
    """What the fleet is to start. Raises ``SpecError`` for a secret that cannot be read."""
    model, role = place.model, place.settings.role
    handover, secret = None, None
    if model.spec.hands_over:
        settings = _absolute(model.spec.disaggregation)
        listens = settings.listen if gives(role) else None
        handover = HandoverLaunch(
            role=role, listen=[] if listens is None else [listens], settings=settings
        )
        # Before an engine is started that would say the same later, and in its own process.
        handover.server_tls()
        handover.client_tls()
        secret = _secret(settings) if listens is not None else None
    return ReplicaPlan(
        replica_id=place.replica_id,
        name=model.name,
        model=model.local.path,
        engine=model.spec.engine.model_copy(update={"threads": share.threads, **_rest(place)}),
        cpus=share.cpus,
        handover=handover,
        handover_secret=secret,
    )


def _rest(place: Place) -> dict[str, object]:
    """One that takes orders of others does not fall asleep by itself: orders are no requests."""
    waits_for_orders = place.model.spec.hands_over and gives(place.settings.role)
    return {"sleep_after_s": None} if waits_for_orders else {}


def served(
    models: Sequence[ReadyModel], its_replicas: Mapping[str, LocalReplica]
) -> list[ServedModel]:
    """Each model with its replicas, which are named by ``places``. Raises ``SpecError``."""
    return [
        served_by(model, [(p, its_replicas[p.replica_id]) for p in places([model])])
        for model in models
    ]


def served_by(model: ReadyModel, replicas: Sequence[tuple[Place, LocalReplica]]) -> ServedModel:
    """One model with its replicas, as the router knows them. Raises ``SpecError``."""
    handover = model.spec.disaggregation
    prefillers: list[Prefiller] = [
        replica for place, replica in replicas if place.settings.role == "prefill"
    ]
    if not prefillers:
        prefillers = [replica for place, replica in replicas if place.settings.role == "both"]
    prefillers += [RemotePrefiller(PrefillPeer(peer, _secret(handover))) for peer in handover.peers]
    return ServedModel(
        name=model.name,
        created=int(time.time()),
        tokenizer=model.tokenizer,
        template=model.template,
        dialect=model.dialect,
        replicas=[r for place, r in replicas if takes_requests(place.settings.role)],
        helpers=[r for place, r in replicas if not takes_requests(place.settings.role)],
        handovers=Handovers(
            takers=frozenset(
                place.replica_id for place, _ in replicas if place.settings.role == "decode"
            ),
            prefillers=prefillers,
            min_prompt_tokens=handover.min_prompt_tokens,
        ),
        max_running=model.spec.engine.max_running,
        task=model.task,
        inputs=model.inputs,
        wakes=model.spec.engine.when_asleep == "wake",
    )


def _absolute(settings: Disaggregation) -> Disaggregation:
    """With its files named so that every process finds them."""
    if settings.tls is None:
        return settings
    tls = HandoverTls(
        **{name: str(_path(text)) for name, text in settings.tls.model_dump().items()}
    )
    return settings.model_copy(update={"tls": tls})


def _secret(settings: Disaggregation) -> str:
    assert settings.secret_file is not None, "the spec asks for it where it is needed"
    try:
        secret = _path(settings.secret_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise SpecError(
            f"disaggregation.secret_file '{settings.secret_file}' cannot be read: {why}"
        ) from error
    if not secret:
        raise SpecError(
            f"disaggregation.secret_file '{settings.secret_file}' is empty; write one line into "
            "it, such as `openssl rand -hex 32` prints"
        )
    return secret


def _path(text: str) -> Path:
    return Path(text).expanduser().absolute()
