"""The router: names, the choice of a replica, and an own count that always returns to zero."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tokenpath.policy.admission import QueueLimits
from tokenpath.protocol.errors import (
    AsleepError,
    DrainingError,
    ModelNotFoundError,
    NotReadyError,
    OverloadedError,
    UnavailableError,
)
from tokenpath.protocol.handover import PrefillPeer
from tokenpath.protocol.replica import RESTING, ReplicaState, ReplicaStats
from tokenpath.router.router import Router
from tokenpath.router.served import Handovers, ServedModel

LIMITS = QueueLimits(requests=2, tokens=1_000)


class StillReplica:
    def __init__(self, replica_id: str = "r", state: ReplicaState = ReplicaState.READY) -> None:
        self.replica_id = replica_id
        self.state = state
        self.card = None
        self.last_stats = ReplicaStats()


def model_of(
    *replicas: StillReplica, name: str = "m", slots: int = 2, wakes: bool = True
) -> ServedModel:
    return ServedModel(
        name=name,
        created=0,
        tokenizer=None,
        template=None,
        replicas=replicas,
        max_running=slots,
        wakes=wakes,
    )


def test_an_unknown_model_is_told_what_is_served():
    router = Router([model_of(StillReplica(), name="a"), model_of(StillReplica(), name="b")])
    assert router.model("b").name == "b"
    with pytest.raises(ModelNotFoundError, match="'c' is not served here; served: 'a', 'b'"):
        router.model("c")


def test_the_least_loaded_ready_replica_is_chosen():
    loading = StillReplica("loading", ReplicaState.LOADING)
    busy, free = StillReplica("busy"), StillReplica("free")
    busy.last_stats = ReplicaStats(requests_running=1)
    model = model_of(loading, busy, free)
    router = Router([model])
    assert router.choose(model) is free
    router.reserve(model, LIMITS, sequences=2, prompt_tokens=1)
    assert router.choose(model) is busy


@pytest.mark.parametrize(
    ("states", "error"),
    [
        ([ReplicaState.PENDING], NotReadyError),
        ([ReplicaState.FAILED, ReplicaState.LOADING], NotReadyError),
        ([ReplicaState.DRAINING, ReplicaState.STOPPED], DrainingError),
        ([ReplicaState.FAILED], UnavailableError),
        ([ReplicaState.ASLEEP, ReplicaState.DRAINING], AsleepError),
    ],
)
def test_without_a_ready_replica_the_error_says_why(states, error):
    model = model_of(*(StillReplica(state=state) for state in states), wakes=False)
    with pytest.raises(error) as caught:
        Router([model]).choose(model)
    assert type(caught.value) is error
    assert caught.value.retry_after_s
    with pytest.raises(error):
        _ = model.card


@pytest.mark.parametrize("resting", sorted(RESTING))
def test_a_sleeping_replica_is_woken_only_where_none_is_awake(resting):
    asleep, awake = StillReplica("asleep", resting), StillReplica("awake")
    model = model_of(asleep, awake)
    router = Router([model])
    for _ in range(2):
        router.reserve(model, LIMITS, sequences=1, prompt_tokens=1)
    assert router.choose(model) is awake, "although it is busier"
    awake.state = ReplicaState.FAILED
    assert router.choose(model) is asleep
    assert model.ready


def test_a_model_is_in_the_state_of_its_best_replica():
    for state in ReplicaState:
        assert model_of(StillReplica(state=state)).state is state
    best = model_of(StillReplica(state=ReplicaState.FAILED), StillReplica())
    assert best.state is ReplicaState.READY


def test_a_report_restarts_the_count_since_the_report():
    replica = StillReplica()
    model = model_of(replica, slots=100)
    router = Router([model])
    for _ in range(3):
        router.reserve(model, LIMITS, sequences=1, prompt_tokens=400)
    replica.last_stats = ReplicaStats(requests_running=100)
    router.reserve(model, LIMITS, sequences=1, prompt_tokens=400)
    router.reserve(model, LIMITS, sequences=1, prompt_tokens=400)
    with pytest.raises(OverloadedError) as caught:
        router.reserve(model, LIMITS, sequences=1, prompt_tokens=400)
    assert caught.value.retry_after_s


class CountMachine(RuleBasedStateMachine):
    """Leases come and go, sequence by sequence; the count is always the sum of what is held."""

    def __init__(self) -> None:
        super().__init__()
        self.replicas = [StillReplica("0"), StillReplica("1")]
        self.model = model_of(*self.replicas)
        self.router = Router([self.model])
        self.leases: list[list] = []

    @rule(sequences=st.integers(1, 4), tenant=st.sampled_from(["", "a", "b"]))
    def reserve(self, sequences, tenant):
        try:
            lease = self.router.reserve(
                self.model, LIMITS, sequences=sequences, prompt_tokens=sequences, tenant=tenant
            )
        except OverloadedError:
            return
        self.leases.append([lease, sequences, tenant, sequences])

    @rule(data=st.data())
    def end_one(self, data):
        if self.leases:
            held = data.draw(st.sampled_from(self.leases))
            held[0].ended()
            held[1] = max(0, held[1] - 1)

    @rule(data=st.data())
    def release(self, data):
        if self.leases:
            held = data.draw(st.sampled_from(self.leases))
            held[0].release()
            held[0].release()
            self.leases.remove(held)

    @rule(replica=st.integers(0, 1), running=st.integers(0, 3), waiting=st.integers(0, 3))
    def report(self, replica, running, waiting):
        self.replicas[replica].last_stats = ReplicaStats(
            requests_running=running, requests_waiting=waiting
        )

    @invariant()
    def counted(self):
        assert self.router.in_flight(self.model) == sum(lease[1] for lease in self.leases)
        posts = self.router._posts[self.model]
        for tenant in ("", "a", "b"):
            live = [lease for lease in self.leases if lease[2] == tenant and lease[1]]
            loads = [post.load(tenant) for post in posts]
            assert sum(load.tenant_in_flight for load in loads) == sum(held[1] for held in live)
            assert sum(load.tenant_tokens for load in loads) == sum(held[3] for held in live)


TestCount = CountMachine.TestCase


class Prefills:
    def __init__(self, address: str | None) -> None:
        self.prefills_at = None if address is None else PrefillPeer(address, "s")


def test_long_prompts_of_replicas_that_decode_go_to_the_prefiller_with_the_fewest_tokens():
    handovers = Handovers(
        takers=frozenset({"r"}),
        prefillers=[Prefills("one"), Prefills(None), Prefills("two")],
        min_prompt_tokens=10,
    )
    model = dataclasses.replace(model_of(StillReplica(), slots=9), handovers=handovers)
    router = Router([model])

    def reserve(*prompts):
        return router.reserve(
            model, LIMITS, sequences=1, prompt_tokens=sum(prompts), prompts=prompts
        )

    first, second, third = reserve(50), reserve(20), reserve(30)
    assert [lease.prefill_at.address for lease in (first, second, third)] == ["one", "two", "two"]
    assert reserve(10).prefill_at is None
    first.prefilled()
    assert reserve(11).prefill_at.address == "one"
    for lease in (first, second, third):
        lease.release()
        lease.prefilled()
    assert router._errands[model].tokens == [11, 0, 0]


def test_other_replicas_compute_their_prompts_themselves():
    handovers = Handovers(takers=frozenset({"other"}), prefillers=[Prefills("one")])
    model = dataclasses.replace(model_of(StillReplica()), handovers=handovers)
    lease = Router([model]).reserve(model, LIMITS, sequences=1, prompt_tokens=99, prompts=[99])
    assert lease.prefill_at is None


def test_a_server_that_only_prefills_says_so():
    model = dataclasses.replace(model_of(), helpers=[StillReplica()])
    assert model.ready
    with pytest.raises(UnavailableError, match="only prefills for other servers"):
        Router([model]).reserve(model, LIMITS, sequences=1, prompt_tokens=1)
