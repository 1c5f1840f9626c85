"""Admission: what waits is bounded, an idle replica takes any call, and more load never helps."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tokenpath.policy.admission import Load, QueueLimits, admit, waiting_after

LIMITS = QueueLimits(requests=2, tokens=100)
counts = st.integers(0, 50)
loads = st.builds(
    Load,
    slots=st.integers(1, 8),
    running=counts,
    waiting=counts,
    waiting_tokens=counts,
    in_flight=counts,
    unreported=counts,
    unreported_tokens=counts,
)


def refused(load: Load, sequences: int = 1, tokens: int = 1) -> bool:
    return admit(load, LIMITS, sequences=sequences, prompt_tokens=tokens) is not None


def test_free_slots_are_not_a_queue():
    assert waiting_after(Load(slots=4), 4) == 0
    assert waiting_after(Load(slots=4, running=3), 1) == 0
    assert waiting_after(Load(slots=4, running=4), 1) == 1


def test_a_burst_is_seen_before_any_report():
    admitted = 0
    while not refused(Load(slots=4, in_flight=admitted, unreported=admitted)):
        admitted += 1
    assert admitted == 4 + LIMITS.requests


def test_waiting_with_free_slots_means_memory_is_short():
    assert waiting_after(Load(slots=64, running=2, waiting=1), 1) == 2
    assert refused(Load(slots=64, running=2, waiting=2), 1)


def test_others_requests_count_by_the_report():
    assert refused(Load(slots=4, running=4, waiting=2))
    assert not refused(Load(slots=4, running=4, waiting=1))


def test_tokens_bound_only_what_waits():
    assert not refused(Load(slots=4, running=1), tokens=1_000)
    assert refused(Load(slots=1, running=1), tokens=101)
    assert not refused(Load(slots=1, running=1), tokens=100)
    assert refused(Load(slots=1, running=1, waiting=1, waiting_tokens=100))


def test_an_idle_replica_takes_a_call_beyond_the_limits():
    assert not refused(Load(slots=1), sequences=50, tokens=10_000)


def test_refusals_say_why_and_when_to_come_back():
    refusal = admit(Load(slots=1, in_flight=3), LIMITS, sequences=1, prompt_tokens=1)
    assert refusal is not None
    assert "3 requests would wait, and 2 may" in refusal.reason
    assert refusal.retry_after_s > 0


def test_one_tenant_cannot_fill_the_queue_and_others_are_not_refused():
    limits = QueueLimits(requests=10, tokens=1_000, tenant_share=0.5)

    def judged(load: Load, tokens: int = 1):
        return admit(load, limits, sequences=1, prompt_tokens=tokens, has_tenant=True)

    greedy = Load(slots=4, running=4, waiting=5, in_flight=9, tenant_in_flight=9)
    refusal = judged(greedy)
    assert refusal is not None
    assert "This API key's part" in refusal.reason
    assert "up to 6 of its requests would wait, and 5 may" in refusal.reason
    assert admit(greedy, limits, sequences=1, prompt_tokens=1) is None, "without keys: no bound"
    other = Load(slots=4, running=4, waiting=5, in_flight=9, tenant_in_flight=2)
    assert judged(other) is None
    long = Load(
        slots=4, running=4, waiting=1, waiting_tokens=450, in_flight=5, tenant_in_flight=5,
        tenant_tokens=460,
    )  # fmt: skip
    assert judged(long, 50) is None
    assert "prompt tokens" in judged(long, 51).reason
    newcomer = Load(slots=4, running=4, waiting=1, waiting_tokens=450, in_flight=5)
    assert judged(newcomer, 540) is None, "a first call may be as long as the queue allows"


@given(loads, st.integers(1, 20), st.integers(1, 200), st.floats(0.01, 1), st.integers(0, 50))
def test_a_tenants_share_only_ever_refuses_more(load, sequences, tokens, share, its):
    load = replace(load, tenant_in_flight=its, tenant_tokens=its)
    limits = QueueLimits(requests=2, tokens=100, tenant_share=share)
    call = {"sequences": sequences, "prompt_tokens": tokens}
    if admit(load, limits, **call) is not None:
        assert admit(load, limits, **call, has_tenant=True) is not None
    elif waiting_after(load, sequences) == 0:
        assert admit(load, limits, **call, has_tenant=True) is None


@given(loads, st.integers(1, 20), st.integers(1, 200))
def test_admitted_calls_never_push_the_queue_over_its_limits(load, sequences, tokens):
    if load.sequences and not refused(load, sequences, tokens):
        waiting = waiting_after(load, sequences)
        assert waiting <= LIMITS.requests
        if waiting:
            total = load.waiting_tokens + load.unreported_tokens + tokens
            assert total <= LIMITS.tokens


@given(loads, st.integers(1, 20), st.integers(1, 20))
def test_more_sequences_wait_longer(load, sequences, more):
    assert waiting_after(load, sequences) <= waiting_after(load, sequences + more)
    assert (
        waiting_after(load, sequences)
        <= load.waiting + load.unreported + load.in_flight + sequences
    )
