"""The scheduler's promises, one readable case each."""

import subprocess
import sys
from pathlib import Path

import pytest

import tokenpath.policy
from tokenpath.policy.prefix import block_hash, chain_root
from tokenpath.policy.scheduler import Scheduler, SchedulerConfig
from tokenpath.protocol.errors import ContextLengthError, InvalidRequestError


def make(**changes):
    settings = {
        "max_step_tokens": 16,
        "max_running": 8,
        "block_tokens": 4,
        "num_blocks": 32,
        "max_context_tokens": 128,
    }
    return Scheduler(SchedulerConfig(**(settings | changes)))


def step(scheduler, token=7):
    plan = scheduler.plan()
    sampled = {c.sequence.request_id: [token] for c in plan.chunks if c.samples}
    scheduler.commit(plan, sampled)
    scheduler.check_integrity()
    return {c.sequence.request_id: c.length for c in plan.chunks}


def test_a_long_prompt_is_computed_in_chunks_and_sampled_once_complete():
    s = make()
    sequence = s.add("a", range(40), max_tokens=2)
    assert [step(s), step(s)] == [{"a": 16}, {"a": 16}]
    assert sequence.output_tokens == 0
    assert step(s) == {"a": 8}
    assert sequence.token_ids[40:] == [7]
    assert step(s) == {"a": 1}


def test_decoding_sequences_go_first_so_a_long_prompt_freezes_nobody():
    s = make()
    s.add("early", range(100, 150), max_tokens=1)
    step(s)
    s.add("short", [1, 2], max_tokens=5, priority=-1)
    while s.get("early").uncomputed > 1:
        step(s)
    s.add("long", range(60), max_tokens=1, priority=-1)
    assert step(s) == {"early": 1, "short": 1, "long": 14}


def test_queue_order_is_priority_then_arrival():
    s = make(max_running=1)
    s.add("first", [1], max_tokens=1)
    s.add("second", [2], max_tokens=1)
    s.add("urgent", [3], max_tokens=1, priority=-1)
    order = []
    while s.waiting or s.running:
        (name,) = step(s)
        order.append(name)
        s.finish(name)
    assert order == ["urgent", "first", "second"]


def test_an_equal_prefix_is_reused_and_counted_once():
    s = make()
    s.add("a", range(13), max_tokens=1)
    step(s)
    s.finish("a")
    assert s.blocks_used == 0
    assert s.blocks_cached == 3
    again = s.add("b", [*range(12), 99], max_tokens=1)
    assert step(s) == {"b": 1}
    assert again.cached_prompt_tokens == 12
    assert s.prompt_tokens_total == 26
    assert s.cached_prompt_tokens_total == 12


def test_a_wholly_cached_prompt_still_computes_its_last_block():
    s = make()
    s.add("a", range(8), max_tokens=1)
    step(s)
    s.finish("a")
    assert s.add("b", range(8), max_tokens=1)
    assert step(s) == {"b": 4}


@pytest.mark.parametrize("key", [("tenant", ""), ("", "adapter")])
def test_other_salts_and_adapters_share_nothing(key):
    s = make()
    s.add("a", range(13), max_tokens=1)
    step(s)
    s.add("b", range(13), max_tokens=1, cache_key=key)
    assert step(s) == {"a": 1, "b": 13}


def test_salt_and_adapter_are_not_confused_with_each_other():
    assert chain_root(("ab", "c")) != chain_root(("a", "bc"))


def test_requests_that_arrive_together_compute_their_common_prompt_once():
    s = make(max_step_tokens=64)
    for index in range(4):
        s.add(f"choice{index}", range(21), max_tokens=3)
    assert step(s) == {"choice0": 21}
    assert step(s) == {"choice0": 1, "choice1": 1, "choice2": 1, "choice3": 1}


def test_when_blocks_run_out_the_least_urgent_is_computed_again():
    s = make(num_blocks=6, prefix_cache=False)
    s.add("old", range(8), max_tokens=12)
    s.add("new", range(50, 58), max_tokens=12)
    preempted = []
    outputs = {}
    while s.waiting or s.running:
        plan = s.plan()
        preempted += [q.request_id for q in plan.preempted]
        s.commit(plan, {c.sequence.request_id: [7] for c in plan.chunks if c.samples})
        s.check_integrity()
        for name in ("old", "new"):
            sequence = s.get(name)
            if sequence and sequence.output_tokens == 12:
                outputs[name] = sequence.token_ids[8:]
                s.finish(name)
    assert preempted == ["new"]
    assert s.preemptions_total == 1
    assert outputs == {"old": [7] * 12, "new": [7] * 12}
    assert s.prompt_tokens_total == 16


def test_least_recently_used_prefixes_are_evicted_tail_first():
    s = make(num_blocks=8)
    for name, first in (("a", 0), ("b", 100)):
        s.add(name, range(first, first + 13), max_tokens=1)
        step(s)
        s.finish(name)
    s.add("c", range(200, 211), max_tokens=1)
    step(s)
    s.finish("c")
    assert s.add("b2", range(100, 113), max_tokens=1).cached_prompt_tokens is None
    step(s)
    assert s.get("b2").cached_prompt_tokens == 12
    s.add("a2", range(13), max_tokens=1)
    step(s)
    assert s.get("a2").cached_prompt_tokens == 8


def test_a_hash_collision_never_hands_out_anothers_blocks():
    config = make().config
    s = Scheduler(config, hasher=lambda _parent, _tokens: 1)
    s.add("a", range(9), max_tokens=1)
    step(s)
    s.add("b", range(50, 59), max_tokens=1)
    assert step(s)["b"] == 9
    assert s.get("b").cached_prompt_tokens == 0


def test_what_can_never_fit_is_refused_on_entry():
    s = make(num_blocks=4)
    with pytest.raises(
        ContextLengthError, match="10 prompt tokens and 7 output tokens exceed the 16"
    ):
        s.add("a", range(10), max_tokens=7)
    with pytest.raises(InvalidRequestError, match="empty"):
        s.add("a", [], max_tokens=7)
    with pytest.raises(InvalidRequestError, match="max_tokens is 0"):
        s.add("a", [1], max_tokens=0)
    s.add("a", [1], max_tokens=1)
    with pytest.raises(InvalidRequestError, match="already"):
        s.add("a", [1], max_tokens=1)


def test_block_hashes_are_stable_across_processes_and_versions():
    assert block_hash(chain_root(("", "")), (1, 2, 3)) == 9230787249000859329


POLICIES = sorted(
    f"tokenpath.policy.{path.stem}" for path in Path(tokenpath.policy.__file__).parent.glob("*.py")
)


@pytest.mark.parametrize("module", POLICIES)
def test_importing_a_policy_drags_in_nothing_heavy(module):
    code = f"import {module.removesuffix('.__init__')}, sys; print([m for m in ('torch', 'ray', 'grpc', 'starlette', 'asyncio') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
