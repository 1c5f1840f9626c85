"""Deadlines that cannot be made, sessions that last too long, and the bound on gaps, in the core."""

from __future__ import annotations

import pytest
import torch
from engine_fakes import Clock, Collector, FakeRunner, make_core, request, run_all

from tokenpath.policy.fairness import Fairness
from tokenpath.protocol.events import FinishReason


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


class Slow:
    """Takes 10 ms a step and 1 ms a token, on the test's clock."""

    def __init__(self, runner: FakeRunner, clock: Clock) -> None:
        self.runner, self.clock = runner, clock

    def run(self, plan):
        self.clock.now += 0.010 + 0.001 * plan.tokens
        return self.runner.run(plan)


def slow_core(**changes):
    clock = Clock()
    core = make_core(
        **{
            "clock": clock,
            "wrap": lambda runner: Slow(runner, clock),
            "num_blocks": 1000,
            "max_step_tokens": 100,
            "max_context_tokens": 4000,
            **changes,
        }
    )
    return core, clock


def measured(core):
    """Let the core see some steps."""
    core.submit(request("first", [3] * 400, max_tokens=1))
    run_all(core)


def test_a_prompt_that_cannot_be_computed_in_time_is_given_up_at_once():
    core, clock = slow_core()
    measured(core)
    core.submit(request("hopeless", range(1, 26), max_tokens=5, timeout_s=60.0))
    core.submit(request("too long", [1, 2] * 1000, timeout_s=1.5))
    core.submit(request("fits", [2, 1] * 500, max_tokens=2, timeout_s=1.5))
    began = clock.now
    collector = Collector()
    collector.take(core.step())
    failed = collector.results["too long"].failed
    assert clock.now - began < 0.2
    assert failed.error.code == "deadline_exceeded"
    assert (
        "cannot have its first token within its 1.5 seconds: 1.5 are left" in failed.error.message
    )
    assert failed.usage.completion_tokens == 0
    results = run_all(core, collector)
    assert results["fits"].finish.reason is FinishReason.LENGTH
    assert results["hopeless"].finish.reason is FinishReason.LENGTH
    assert core.stats().deadlines_missed_total == 1


def test_a_running_prompt_that_falls_behind_is_given_up_before_its_deadline():
    core, clock = slow_core(max_step_tokens=40, prefix_cache=False)
    measured(core)
    core.submit(request("other", [5, 6] * 1000, max_tokens=1))
    collector = Collector()
    collector.take(core.step())
    began = clock.now
    core.submit(request("late", [7, 8] * 300, max_tokens=1, timeout_s=1.0))
    while "late" not in collector.results:
        collector.take(core.step())
    assert collector.results["late"].failed.error.code == "deadline_exceeded"
    assert clock.now - began < 0.95
    assert run_all(core, collector)["other"].finish


def test_what_is_cached_is_not_counted_against_a_deadline():
    core, _ = slow_core()
    core.submit(request("first", [1, 2] * 1000, max_tokens=1))
    run_all(core)
    core.submit(request("again", [1, 2] * 1000, max_tokens=1, timeout_s=0.5))
    assert run_all(core)["again"].finish.reason is FinishReason.LENGTH


def test_a_stream_that_has_begun_goes_on_to_its_deadline():
    core, clock = slow_core()
    measured(core)
    core.submit(request("stream", [1, 2], max_tokens=3000, timeout_s=1.0))
    began = clock.now
    results = run_all(core)
    assert "ran past its 1 seconds" in results["stream"].failed.error.message
    assert 1.0 <= clock.now - began < 1.1
    assert len(results["stream"].token_ids) > 50


def test_no_session_lasts_longer_than_the_spec_says():
    core, clock = slow_core(max_session_s=0.5)
    core.submit(request("no timeout", [1, 2], max_tokens=3000))
    core.submit(request("longer", [1, 3], max_tokens=3000, timeout_s=9.0))
    core.submit(request("shorter", [1, 4], max_tokens=3000, timeout_s=0.25))
    began = clock.now
    collector = Collector()
    while "shorter" not in collector.results or not collector.results["shorter"].ended:
        collector.take(core.step())
    assert 0.25 <= clock.now - began < 0.3
    results = run_all(core, collector)
    assert 0.5 <= clock.now - began < 0.6
    for name, seconds in (("no timeout", "0.5"), ("longer", "0.5"), ("shorter", "0.25")):
        assert f"ran past its {seconds} seconds" in results[name].failed.error.message
    assert core.stats().deadlines_missed_total == 3


@pytest.mark.parametrize(("target_s", "longest"), [(None, 0.105), (0.05, 0.055)])
def test_the_gaps_of_streams_while_a_long_prompt_is_computed(target_s, longest):
    core, clock = slow_core(target_s=target_s)
    for index in range(4):
        core.submit(request(f"s{index}", [1 + index] * 8, max_tokens=400))
    collector = Collector()
    for _ in range(5):
        collector.take(core.step())
    core.submit(request("huge", [9, 8] * 1000, max_tokens=1))
    gaps, last = [], clock.now
    while "huge" not in collector.results:
        events = core.step()
        collector.take(events)
        gaps.append(clock.now - last)
        last = clock.now
    assert longest * 0.8 < max(gaps) <= longest + 0.006
    assert (core.stats().prefill_limited_steps_total > 0) == (target_s is not None)
    for index in range(4):
        core.abort(f"s{index}")


def test_tenants_are_told_apart_and_counted():
    core, _ = slow_core(max_running=1, fairness=Fairness(by_tokens=True))
    for index in range(3):
        core.submit(request(f"a{index}", [1, 2, index], max_tokens=2, tenant="a"))
    core.submit(request("b", [1, 2, 9], max_tokens=2, tenant="b"))
    assert core.stats().tenants == 2
    assert list(run_all(core)) == ["a0", "b", "a1", "a2"]
    assert core.stats().tenants == 0
