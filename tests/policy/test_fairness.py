"""Shares, turns and ageing: who is served when there is more to do than can be done."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenpath.policy.fairness import MAX_REMEMBERED, Fairness, Shares
from tokenpath.policy.scheduler import Scheduler, SchedulerConfig
from tokenpath.policy.sequence import Sequence
from tokenpath.policy.waiting import WaitingQueue
from tokenpath.protocol.errors import OverloadedError

TOKENS = Fairness(by_tokens=True)


def scheduler(fairness: Fairness = TOKENS, **changes) -> Scheduler:
    settings = {
        "max_step_tokens": 64,
        "max_running": 4,
        "block_tokens": 4,
        "num_blocks": 256,
        "max_context_tokens": 512,
        "prefix_cache": False,
        "fairness": fairness,
    }
    return Scheduler(SchedulerConfig(**(settings | changes)))


def step(s: Scheduler, now: float = 0.0) -> dict[str, int]:
    plan = s.plan(now)
    s.commit(plan, {c.sequence.request_id: [7] for c in plan.chunks if c.samples})
    s.check_integrity()
    for chunk in plan.chunks:
        if chunk.sequence.output_tokens == chunk.sequence.max_tokens:
            s.finish(chunk.sequence.request_id)
    return {c.sequence.request_id: c.length for c in plan.chunks}


def order_of_ends(s: Scheduler) -> list[str]:
    ended: list[str] = []
    while s.running or s.waiting:
        ended += [name for name in step(s) if s.get(name) is None]
    return ended


def test_a_tenant_with_ten_times_the_load_waits_for_itself_only():
    s = scheduler(max_running=1)
    for index in range(20):
        s.add(f"a{index}", range(8), max_tokens=4, tenant="a")
    for index in range(2):
        s.add(f"b{index}", range(8), max_tokens=4, tenant="b")
    assert order_of_ends(s)[:5] == ["a0", "b0", "a1", "b1", "a2"]
    unfair = scheduler(Fairness(), max_running=1)
    for index in range(20):
        unfair.add(f"a{index}", range(8), max_tokens=4, tenant="a")
    unfair.add("b0", range(8), max_tokens=4, tenant="b")
    assert order_of_ends(unfair)[-1] == "b0"


def test_free_slots_are_divided_within_one_step():
    s = scheduler(max_running=4)
    for index in range(9):
        s.add(f"a{index}", range(8), max_tokens=4, tenant="a")
    for index in range(9):
        s.add(f"b{index}", range(8), max_tokens=4, tenant="b")
    assert sorted(step(s)) == ["a0", "a1", "b0", "b1"]


@given(
    weight=st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    prompts=st.lists(st.integers(1, 60), min_size=2, max_size=2),
    outputs=st.lists(st.integers(1, 20), min_size=2, max_size=2),
    slots=st.integers(1, 4),
)
def test_two_tenants_with_full_queues_get_tokens_by_their_weights(weight, prompts, outputs, slots):
    s = scheduler(Fairness(by_tokens=True, weights={"a": weight}), max_running=slots)
    served = {"a": 0.0, "b": 0.0}
    sizes = dict(zip("ab", zip(prompts, outputs, strict=True), strict=True))
    numbers = 0
    for _ in range(100):
        waiting = [q.tenant for q in s._waiting]
        for tenant, (prompt, output) in sizes.items():
            for _ in range(5 - waiting.count(tenant)):
                numbers += 1
                s.add(f"{tenant}{numbers}", range(prompt), max_tokens=output, tenant=tenant)
        for name, length in step(s).items():
            served[name[0]] += length + 1
    # Whole sequences are admitted, so the shares differ by no more than those that run.
    largest = max(p + 2 * o for p, o in sizes.values())
    bound = 2 * (slots + 1) * largest
    assert abs(served["a"] / weight - served["b"]) <= bound / min(weight, 1) + 150


def test_a_newcomer_starts_where_the_others_are_and_absence_is_no_credit():
    shares = Shares()
    for tenant in "ab":
        shares.join(tenant)
        shares.queued(tenant)
    shares.charge("a", 100)
    shares.charge("b", 40)
    shares.admitted("b")
    shares.join("new")
    shares.queued("new")
    assert shares.of("new") == 40
    shares.leave("a")
    shares.join("a")
    shares.queued("a")
    assert shares.of("a") == 100, "staying away for a moment does not make up for being ahead"
    shares.leave("b")
    assert shares.remembered == 2


def test_what_was_charged_and_not_computed_is_given_back():
    s = scheduler(max_step_tokens=10)
    s.add("a0", range(100), max_tokens=1, tenant="a")
    s.add("b0", range(4), max_tokens=9, tenant="b")
    step(s)
    assert s._shares.of("a") == 100
    s.finish("a0")
    s.add("a1", range(4), max_tokens=1, tenant="a")
    assert s._shares.of("a") == 10


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("jlcq"), st.integers(0, 50))))
def test_shares_never_fall_but_by_giving_back_and_are_forgotten(actions):
    shares = Shares({"t1": 2.0})
    live: dict[str, int] = {}
    for number, action, tokens in actions:
        tenant = f"t{number}"
        before = shares.of(tenant)
        if action == "l" and live.get(tenant):
            shares.leave(tenant)
            live[tenant] -= 1
            live = {name: count for name, count in live.items() if count}
        elif action == "j":
            shares.join(tenant)
            live[tenant] = live.get(tenant, 0) + 1
            shares.queued(tenant)
            assert shares.of(tenant) >= before
        elif action == "c" and live.get(tenant):
            shares.charge(tenant, tokens)
            assert shares.of(tenant) >= before
        elif action == "q" and live:
            shares.admitted(min(live, key=shares.of))
        shares.check_integrity(live)
    for tenant, count in live.items():
        for _ in range(count):
            shares.leave(tenant)
    assert shares.remembered == 0


def test_idle_tenants_that_are_ahead_are_remembered_only_so_many():
    shares = Shares()
    shares.join("stays")
    for number in range(MAX_REMEMBERED + 50):
        shares.join(f"t{number}")
        shares.charge(f"t{number}", number + 1)
        shares.leave(f"t{number}")
    assert shares.remembered <= MAX_REMEMBERED + 1
    assert shares.of(f"t{MAX_REMEMBERED + 49}") == MAX_REMEMBERED + 50


def test_waiting_makes_a_request_urgent_but_no_more_urgent_than_others():
    fairness = Fairness(by_tokens=True, priority_ageing_s=10.0)
    s = scheduler(fairness, max_running=1)
    s.add("low", range(4), max_tokens=1, priority=3, tenant="a", now=0.0)
    for index in range(3):
        s.add(f"n{index}", range(4), max_tokens=1, priority=0, tenant="b", now=15.0)
    assert list(step(s, now=20.0)) == ["n0"], "two steps gained are not enough"
    assert list(step(s, now=30.0)) == ["low"], "three are"
    assert s.get("low") is None
    # Old requests of one priority do not get ahead of another tenant's new ones by their age.
    for index in range(5):
        s.add(f"a{index}", range(400), max_tokens=1, tenant="a", now=30.0)
    s.finish("n1"), s.finish("n2")
    while s.running or s.get("a0") is not None:
        step(s, now=1000.0)
    s.add("fresh", range(4), max_tokens=1, tenant="c", now=1000.0)
    assert "fresh" in step(s, now=1000.0)


def test_no_stream_of_urgent_requests_keeps_a_low_one_waiting_for_ever():
    s = scheduler(Fairness(priority_ageing_s=5.0), max_running=1)
    s.add("low", range(4), max_tokens=1, priority=9, now=0.0)
    now, number = 0.0, 0
    while s.get("low") is not None:
        while s.waiting < 3:
            number += 1
            s.add(f"u{number}", range(4), max_tokens=1, priority=0, now=now)
        step(s, now)
        now += 1.0
        assert now < 60
    assert now >= 45


def test_own_priorities_order_only_within_a_tenant():
    s = scheduler(Fairness(by_tokens=True, priorities="own"), max_running=1)
    for index in range(3):
        s.add(f"pushy{index}", range(8), max_tokens=1, priority=-100, tenant="a")
    s.add("late", range(8), max_tokens=1, priority=5, tenant="b")
    s.add("soon", range(8), max_tokens=1, priority=1, tenant="b")
    assert order_of_ends(s) == ["pushy0", "soon", "pushy1", "late", "pushy2"]


def test_a_full_queue_refuses():
    s = scheduler(max_waiting=2)
    s.add("a", [1], max_tokens=1)
    s.add("b", [1], max_tokens=1)
    with pytest.raises(OverloadedError, match="queue is full: 2"):
        s.add("c", [1], max_tokens=1)
    step(s)
    s.add("c", [1], max_tokens=1)


@given(
    entries=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(-2, 2), st.integers(0, 40)), min_size=1
    ),
    now=st.integers(40, 90),
    own=st.booleans(),
    charges=st.lists(st.integers(0, 30), max_size=8),
)
def test_the_queue_gives_out_the_least_first_while_tenants_are_charged(entries, now, own, charges):
    """Against a plain sort of everything that is left, each time."""
    fairness = Fairness(
        by_tokens=True, priorities="own" if own else "shared", priority_ageing_s=10.0
    )
    shares = Shares()
    queue = WaitingQueue(fairness, shares)
    left = []
    for arrival, (tenant, priority, at) in enumerate(sorted(entries, key=lambda e: e[2])):
        sequence = Sequence(
            f"r{arrival}", [1] * 5, 5, 1, priority=priority, arrival=arrival, tenant=tenant,
            queued_at=float(at),
        )  # fmt: skip
        queue.add(sequence)
        left.append(sequence)
    queue.check_integrity()
    floors = {
        s.tenant: min(o.priority for o in left if not own or o.tenant == s.tenant) for s in left
    }

    def key(s):
        urgency = max(floors[s.tenant], s.priority - int((now - s.queued_at) / 10))
        share = shares.of(s.tenant)
        return (share, urgency, s.arrival) if own else (urgency, share, s.arrival)

    charges = iter(charges)
    for sequence in queue.in_order(float(now)):
        assert sequence is min(left, key=key)
        left.remove(sequence)
        queue.remove(sequence)
        shares.charge(sequence.tenant, next(charges, 0))
        queue.check_integrity()
    assert not left
    assert queue.tokens == len(queue) == 0
    with pytest.raises(ValueError, match="does not wait"):
        queue.remove(Sequence("x", [1], 1, 1))


def test_a_short_prompt_does_not_wait_for_a_long_one():
    s = scheduler(max_step_tokens=16)
    s.add("huge", range(400), max_tokens=1)
    step(s)
    s.add("also huge", range(400), max_tokens=1)
    s.add("short", range(12), max_tokens=1)
    assert step(s) == {"short": 8, "huge": 8}
    assert step(s) == {"short": 4, "huge": 12}
    assert s.get("short") is None
    assert step(s) == {"huge": 16}, "prompts of one length are computed one after the other"


def test_the_places_of_a_long_prompt_that_was_passed_over_are_kept():
    s = scheduler(max_step_tokens=16, max_running=2)
    s.add("huge", range(100), max_tokens=1)
    step(s)
    s.add("also huge", range(100), max_tokens=1)
    s.add("short", range(12), max_tokens=1)
    assert step(s) == {"huge": 16}, "the second place is not the short one's"


def test_a_tenant_runs_no_more_than_its_cap_and_others_take_the_rest():
    s = scheduler(Fairness(tenant_max_running=1))
    for index in range(3):
        s.add(f"a{index}", range(8), max_tokens=6, tenant="a")
    s.add("b0", range(8), max_tokens=6, tenant="b")
    assert sorted(step(s)) == ["a0", "b0"]
    assert len(order_of_ends(s)) == 4


def test_a_tenant_that_outgrows_its_blocks_gives_up_its_own_last_sequence():
    s = scheduler(Fairness(tenant_max_blocks=6))
    s.add("a0", range(8), max_tokens=20, tenant="a")
    s.add("a1", range(8), max_tokens=20, tenant="a")
    s.add("b0", range(8), max_tokens=20, tenant="b")
    ends = order_of_ends(s)
    assert s.preemptions_total >= 1
    assert ends == ["a0", "b0", "a1"], "only the tenant itself is late"


@pytest.mark.parametrize(
    "wrong",
    [
        {"weights": {"a": 0}},
        {"weights": {"a": math.inf}},
        {"priority_ageing_s": 0},
        {"tenant_max_running": 0},
        {"tenant_max_blocks": 0},
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        Fairness(**wrong)
