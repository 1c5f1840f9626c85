"""Steps against a machine whose costs are known, and which the budget has to find out."""

from __future__ import annotations

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tokenpath.policy.foresight import Foresight
from tokenpath.policy.scheduler import Scheduler, SchedulerConfig
from tokenpath.policy.sequence import Chunk, Sequence, StepPlan
from tokenpath.policy.step_budget import LEAST_TOKENS, StepBudget, is_prefill


class Machine:
    """Takes a time for each step that no linear sum is exactly equal to."""

    def __init__(self, *, step_s=0.01, row_s=0.002, token_s=0.001, pair_s=2e-7, free=8):
        self.costs = step_s, row_s, token_s, pair_s
        self.free = free
        """Rows that ride along for nothing, as the weights are read anyway."""

    def __call__(self, plan: StepPlan) -> float:
        step_s, row_s, token_s, pair_s = self.costs
        rows = sum(c.length for c in plan.chunks if not is_prefill(c))
        prompts = [c for c in plan.chunks if is_prefill(c)]
        tokens = sum(c.length for c in prompts)
        pairs = sum(c.length * (c.start + c.length / 2) for c in prompts)
        return step_s + row_s * rows + token_s * max(0, tokens - self.free) + pair_s * pairs


def serve(machine, target_s, *, streams=8, prompt=4000, step_tokens=512):
    """Steps of streams that decode while a long prompt is computed: (prompt tokens, seconds)."""
    budget = None if target_s is None else StepBudget(target_s)
    scheduler = Scheduler(
        SchedulerConfig(
            max_step_tokens=step_tokens,
            max_running=16,
            block_tokens=16,
            num_blocks=2048,
            max_context_tokens=20_000,
            prefix_cache=False,
        ),
        step_budget=budget,
    )

    def step():
        plan = scheduler.plan()
        seconds = machine(plan)
        if budget is not None:
            budget.observe(plan, seconds)
        scheduler.commit(plan, {c.sequence.request_id: [7] for c in plan.chunks if c.samples})
        return sum(c.length for c in plan.chunks if is_prefill(c)), seconds

    for index in range(streams):
        scheduler.add(f"s{index}", range(40), max_tokens=4000)
    for _ in range(20):
        step()
    huge = scheduler.add("huge", range(prompt), max_tokens=1)
    steps = []
    while not huge.output_tokens:
        steps.append(step())
        assert len(steps) < prompt
    return steps, budget


def test_a_long_prompt_keeps_to_the_target_and_nearly_fills_it():
    machine = Machine()
    unbound, _ = serve(machine, None)
    assert max(seconds for _, seconds in unbound) > 0.5
    steps, budget = serve(machine, 0.15)
    assert max(seconds for _, seconds in steps) <= 0.15
    settled = [seconds for _, seconds in steps[10:-1]]
    assert min(settled) > 0.1, "a budget that is far too careful"
    assert budget.limited_total >= len(steps) - 1


def test_the_budget_shrinks_as_the_context_grows():
    steps, _ = serve(Machine(pair_s=1e-6), 0.15, prompt=8000)
    assert max(seconds for _, seconds in steps) <= 1.1 * 0.15
    tokens = [count for count, _ in steps]
    assert tokens[len(tokens) // 10] > 2 * tokens[-2]


def test_prompts_never_starve_even_where_decoding_alone_takes_longer():
    steps, _ = serve(Machine(row_s=0.1), 0.05, prompt=400)
    assert all(count >= LEAST_TOKENS for count, _ in steps[:-1])


def test_without_streams_a_prompt_has_whole_steps():
    steps, budget = serve(Machine(), 0.02, streams=0)
    assert steps[0][0] == 512
    assert budget.limited_total == 0


@given(
    step_s=st.floats(0.001, 0.05),
    row_s=st.floats(1e-5, 0.004),
    token_s=st.floats(1e-5, 0.004),
    pair_s=st.floats(0, 1e-6),
    streams=st.integers(1, 8),
    factor=st.floats(2, 20),
)
@example(step_s=0.0078125, row_s=0.00390625, token_s=1e-5, pair_s=9.86e-7, streams=1, factor=2.0)
@example(step_s=0.00218, row_s=4.5e-5, token_s=2.2e-5, pair_s=1e-6, streams=1, factor=2.03)
def test_any_machine_is_learnt(step_s, row_s, token_s, pair_s, streams, factor):
    machine = Machine(step_s=step_s, row_s=row_s, token_s=token_s, pair_s=pair_s)
    # A target that decoding and the least of a prompt leave room for.
    target_s = factor * (step_s + row_s * streams + 16 * token_s + 16 * 1500 * pair_s)
    steps, _ = serve(machine, target_s, streams=streams, prompt=1500)
    assert max(seconds for _, seconds in steps) <= 1.3 * target_s


def test_a_machine_that_gets_slower_is_noticed():
    machine = Machine()
    calls = 0

    def slowing(plan):
        nonlocal calls
        calls += 1
        return machine(plan) * (3 if calls > 40 else 1)

    steps, _ = serve(slowing, 0.15, prompt=4000)
    over = [seconds for _, seconds in steps if seconds > 0.155]
    assert len(over) <= 5, "it takes a few steps to notice"


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 600), st.floats(0, 1e4)), min_size=1),
    st.floats(1e-9, 1e4),
)
def test_whatever_is_measured_the_room_is_a_sound_number(steps, target_s):
    budget = StepBudget(target_s)
    decoding = Sequence("d", [1] * 11, 10, 5)
    prompt = Sequence("p", [1] * 5000, 5000, 5)
    for rows, length, seconds in steps:
        chunks = [Chunk(decoding, 10, 1)] * rows + [Chunk(prompt, 100, length)]
        budget.observe(StepPlan(tuple(chunks)), seconds)
        allowance = budget.allowance(rows)
        assume(allowance is not None)
        for start in (0, 5, 4000):
            room = allowance.most(start)
            assert room >= min(LEAST_TOKENS, allowance.floor)
            allowance.take(start, min(room, 100))
            assert allowance.left_s >= 0


def test_a_target_of_nothing_is_refused():
    with pytest.raises(ValueError, match="above 0"):
        StepBudget(0)


def test_foresight_is_the_best_rate_seen_and_says_nothing_at_first():
    foresight = Foresight()
    prompt = Sequence("p", [1] * 5000, 5000, 5)

    def see(length, seconds):
        foresight.observe(StepPlan((Chunk(prompt, 0, length),)), seconds)

    for _ in range(2):
        see(100, 1.0)
        assert foresight.least_s(1000) == 0
    see(100, 4.0)
    assert 7.9 <= foresight.least_s(1000) <= 8.1
    see(10, 0.0)
    assert foresight.least_s(1000) > 7.9, "so few tokens say nothing"
    see(100, 0.5)
    assert foresight.least_s(1000) == pytest.approx(4.0)
