"""The ledger: stages never overlap, and with what nobody measured they sum to the wall time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenpath.observe.ledger import Ledger, LedgerError
from tokenpath.protocol.events import EngineStages
from tokenpath.protocol.stages import ENGINE_STAGES, Stage


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


durations = st.floats(0, 1_000)
own_stages = st.sampled_from([stage for stage in Stage if stage not in ENGINE_STAGES])


@given(st.lists(st.tuples(own_stages, durations, durations)), durations, durations, durations)
def test_stages_and_the_rest_sum_to_the_wall_time(steps, queue, prefill, decode):
    clock = Clock()
    ledger = Ledger(clock)
    expected = dict.fromkeys(Stage, 0.0)
    for stage, inside, between in steps:
        with ledger.stage(stage):
            clock.now += inside
        expected[stage] += inside
        clock.now += between
    clock.now += queue + prefill + decode
    ledger.merge(EngineStages(queue_s=queue, prefill_s=prefill, decode_s=decode))
    times = ledger.close()
    assert sum(times.stages.values()) + times.unattributed_s == pytest.approx(times.wall_s)
    assert times.wall_s == pytest.approx(clock.now - 100)
    assert times.unattributed_s == pytest.approx(sum(gap for _, _, gap in steps), abs=1e-6)
    for stage, seconds in times.stages.items():
        if stage not in ENGINE_STAGES:
            assert seconds == pytest.approx(expected[stage], abs=1e-6)


def test_overlap_is_an_error():
    ledger = Ledger(Clock())
    with (
        ledger.stage(Stage.RECEIVE),
        pytest.raises(LedgerError, match="policy begins while receive"),
    ):
        ledger.begin(Stage.POLICY)
    with pytest.raises(LedgerError, match="without having begun"):
        ledger.end(Stage.FLUSH)


def test_a_stage_ends_with_its_exception():
    clock = Clock()
    ledger = Ledger(clock)
    with pytest.raises(ValueError), ledger.stage(Stage.TOKENIZE):
        clock.now += 2
        raise ValueError
    with ledger.stage(Stage.ROUTE):
        clock.now += 1
    assert ledger.close().stages == {Stage.TOKENIZE: 2, Stage.ROUTE: 1}


def test_closing_ends_the_open_stage_and_the_ledger():
    clock = Clock()
    ledger = Ledger(clock)
    ledger.begin(Stage.FLUSH)
    clock.now += 3
    times = ledger.close()
    clock.now += 3
    assert ledger.close() is times
    assert (times.stages, times.wall_s) == ({Stage.FLUSH: 3}, 3)
    with pytest.raises(LedgerError, match="after the ledger was closed"):
        ledger.begin(Stage.FLUSH)
