"""Properties of the pooling engine's queue: nothing lost, nothing twice, nobody waits for ever."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenpath.policy.pooling import PoolingQueue

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=30)
calls = st.lists(st.tuples(lengths, st.integers(0, 1)), min_size=1, max_size=6)
budgets = st.tuples(st.integers(1, 60), st.integers(1, 12))


def filled(requests, budget):
    queue = PoolingQueue(max_step_tokens=budget[0], max_step_inputs=budget[1])
    for number, (sizes, priority) in enumerate(requests):
        queue.add(str(number), sizes, priority=priority)
    return queue


def steps(queue):
    while taken := queue.take():
        yield taken


@given(calls, budgets)
def test_every_input_is_taken_once_within_the_budget(requests, budget):
    queue, seen = filled(requests, budget), []
    for taken in steps(queue):
        tokens = sum(each.tokens for each in taken)
        assert tokens <= budget[0] or len(taken) == 1
        assert len(taken) <= budget[1]
        for each in taken:
            assert each.tokens == requests[int(each.request_id)][0][each.place]
            seen.append((each.request_id, each.place))
    everything = [
        (str(n), place) for n, (sizes, _) in enumerate(requests) for place in range(len(sizes))
    ]
    assert sorted(seen) == sorted(everything)
    assert queue.jobs == queue.waiting_tokens == queue.waiting_jobs == 0


@given(calls, budgets)
def test_a_step_is_full_or_nothing_fits(requests, budget):
    queue = filled(requests, budget)
    for taken in steps(queue):
        room = budget[0] - sum(each.tokens for each in taken)
        if len(taken) < budget[1]:
            left = [tokens for job in queue._jobs.values() for tokens, _ in job.waiting]
            assert all(tokens > room for tokens in left)


@given(calls, budgets)
def test_urgent_requests_begin_first(requests, budget):
    queue = filled(requests, budget)
    for taken in steps(queue):
        urgent = {str(n) for n, (_, priority) in enumerate(requests) if priority == 0}
        if urgent & (queue._jobs.keys() | {each.request_id for each in taken}):
            assert taken[0].request_id in urgent


@given(st.integers(1, 40), st.integers(40, 100))
def test_a_small_request_waits_for_one_step_at_most(tokens, budget):
    queue = PoolingQueue(max_step_tokens=budget, max_step_inputs=64)
    queue.add("huge", [budget] * 1000)
    queue.take()
    queue.add("small", [tokens])
    served = [{each.request_id for each in queue.take()} for _ in range(2)]
    assert "small" in served[0] | served[1]


@given(st.lists(st.integers(1, 20), min_size=100, max_size=100))
def test_a_huge_request_is_not_starved_by_a_stream_of_small_ones(sizes):
    queue = PoolingQueue(max_step_tokens=20, max_step_inputs=8)
    queue.add("huge", [20] * 30)
    for number, size in enumerate(sizes):
        queue.add(str(number), [size])
        queue.take()
    assert queue.waiting_of("huge") < 30


def test_removed_requests_are_gone():
    queue = PoolingQueue(max_step_tokens=10, max_step_inputs=10)
    queue.add("a", [3, 3])
    queue.add("b", [4])
    queue.remove("a")
    queue.remove("unknown")
    assert [each.request_id for each in queue.take()] == ["b"]
    assert queue.take() == []


@pytest.mark.parametrize("budget", [1, 5])
def test_an_input_beyond_the_budget_goes_alone(budget):
    queue = PoolingQueue(max_step_tokens=budget, max_step_inputs=4)
    queue.add("a", [9, 2])
    assert [each.tokens for each in queue.take()] == [9]
