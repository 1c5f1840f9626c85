"""Admission: what waits is bounded, an idle replica takes any call, and more load never helps."""

from __future__ import annotations

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
