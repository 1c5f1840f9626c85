"""The router: names, the choice of a replica, and an own count that always returns to zero."""

from __future__ import annotations

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
from tokenpath.protocol.replica import RESTING, ReplicaState, ReplicaStats
from tokenpath.router.router import Router
from tokenpath.router.served import ServedModel

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

    @rule(sequences=st.integers(1, 4))
    def reserve(self, sequences):
        try:
            lease = self.router.reserve(
                self.model, LIMITS, sequences=sequences, prompt_tokens=sequences
            )
        except OverloadedError:
            return
        self.leases.append([lease, sequences])

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
        assert self.router.in_flight(self.model) == sum(held for _, held in self.leases)


TestCount = CountMachine.TestCase
