"""The layout of a step: what each row is, against the slow and obvious way of saying it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokenpath.engine.batch import build_batch
from tokenpath.policy.sequence import Chunk, Sequence, StepPlan


@st.composite
def plans(draw) -> tuple[StepPlan, int]:
    block_tokens = draw(st.sampled_from([1, 2, 3, 16]))
    free = np.random.default_rng(draw(st.integers(0, 99))).permutation(400).tolist()
    chunks = []
    for name in range(draw(st.integers(1, 8))):
        ids = draw(st.lists(st.integers(0, 999), min_size=1, max_size=40))
        start = draw(st.integers(0, len(ids) - 1))
        length = draw(st.integers(1, len(ids) - start) | st.just(1))
        sequence = Sequence(str(name), ids, prompt_tokens=len(ids), max_tokens=1)
        drafted = ()
        if start + length == len(ids):
            drafted = tuple(draw(st.lists(st.integers(0, 999), max_size=5)))
            length += len(drafted)
        # Sometimes more blocks than the chunk needs: a scheduler may allocate ahead.
        count = -(-(start + length) // block_tokens) + draw(st.integers(0, 1))
        sequence.blocks, free = list(free[:count]), free[count:]
        chunks.append(Chunk(sequence, start, length, drafted))
    return StepPlan(tuple(chunks)), block_tokens


def slot(chunk: Chunk, position: int, block_tokens: int) -> int:
    block = chunk.sequence.blocks[position // block_tokens]
    return block * block_tokens + position % block_tokens


@given(plans())
def test_rows_are_the_plans_tokens(case):
    plan, block_tokens = case
    batch = build_batch(plan, block_tokens)
    expected = {
        (slot(c, p, block_tokens), token, p)
        for c in plan.chunks
        for p, token in enumerate(
            [*c.sequence.token_ids, *c.drafted][c.start : c.start + c.length], c.start
        )
    }
    rows = zip(
        batch.slots.tolist(), batch.token_ids.tolist(), batch.positions.tolist(), strict=True
    )
    assert set(rows) == expected
    assert len(batch.slots) == plan.tokens == len(expected)


@given(plans())
def test_single_tokens_come_first_by_falling_context(case):
    plan, block_tokens = case
    batch = build_batch(plan, block_tokens)
    lengths = np.diff(batch.row_starts)
    singles = batch.single_token_chunks
    assert (lengths[:singles] == 1).all()
    assert (lengths[singles:] > 1).all()
    assert (np.diff(batch.context_tokens[:singles]) <= 0).all()
    assert (batch.positions[batch.row_starts[1:] - 1] == batch.context_tokens - 1).all()


@given(plans())
def test_sampled_rows_follow_the_plans_order(case):
    plan, block_tokens = case
    batch = build_batch(plan, block_tokens)
    sampled = [
        slot(c, len(c.sequence.token_ids) - 1 + ahead, block_tokens)
        for c in plan.chunks
        if c.samples
        for ahead in range(1 + len(c.drafted))
    ]
    assert batch.slots[batch.sampled_rows].tolist() == sampled


@given(plans())
def test_slots_of_the_whole_context_and_nothing_else(case):
    plan, block_tokens = case
    batch = build_batch(plan, block_tokens)
    by_last_slot = {slot(c, c.start + c.length - 1, block_tokens): c for c in plan.chunks}
    for index, stop in enumerate(batch.context_tokens.tolist()):
        chunk = by_last_slot[int(batch.slots[batch.row_starts[index + 1] - 1])]
        found = batch.slots_at(np.array(index), np.arange(stop)).tolist()
        assert found == [slot(chunk, p, block_tokens) for p in range(stop)]
        # Padding of the table must not lead into a neighbour's blocks.
        assert set(batch.block_tables[index].tolist()) <= set(chunk.sequence.blocks)
