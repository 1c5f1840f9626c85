"""Faults that other engines are known for, and that this one must be shown not to have.

``docs/explanation/known-faults.md`` names a test for each; those that stand nowhere else are here.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from driver import Driver
from engine_fakes import (
    Collector,
    assert_idle,
    continuation,
    make_core,
    request,
    run_all,
)
from grammar_cases import byte_vocabulary
from reference import VOCAB, reference_logits, small_reference, small_runner

from tokenpath.engine.grammar.compiler import GrammarCompiler
from tokenpath.policy.prefix import block_hash
from tokenpath.policy.scheduler import Scheduler, SchedulerConfig
from tokenpath.protocol.errors import InvalidRequestError
from tokenpath.protocol.events import FinishReason
from tokenpath.protocol.grammar import Grammar

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/explanation/known-faults.md"


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def test_every_test_that_the_page_names_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)(?:::(\w+))?`", PAGE.read_text())
    assert len(named) >= 16
    for path, name, method in named:
        tree = ast.parse((ROOT / path).read_text())
        found = (
            {
                node.name
                for node in ast.walk(tree)
                if isinstance(node, ast.FunctionDef | ast.ClassDef)
            }
            | {
                target.id
                for node in tree.body
                if isinstance(node, ast.Assign)
                for target in node.targets
                if isinstance(target, ast.Name)
            }
            | {node.name for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)}
        )
        assert {name, method or name} <= found, f"{path} has no {name}"


def test_when_keys_and_values_overflow_nobody_dies():
    """Eight sequences that fit one by one, and together need four times the pool."""
    core = make_core(num_blocks=16, max_running=8, prefix_cache=False)
    prompts = {f"r{index}": [1 + index] * 12 for index in range(8)}
    for name, prompt in prompts.items():
        core.submit(request(name, prompt, max_tokens=50))
    results = run_all(core)
    assert core.stats().preemptions_total > 0
    for name, prompt in prompts.items():
        assert results[name].failed is None
        assert results[name].token_ids == continuation(prompt, 50)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_cancelled_request_disturbs_no_neighbour_at_any_step(prefix_cache):
    """Its blocks are given to others at once, and its prefix is others' too."""
    shared = [7] * 9
    for at in range(12):
        core = make_core(num_blocks=24, max_step_tokens=12, prefix_cache=prefix_cache)
        collector = Collector()
        prompts = {f"r{index}": [*shared, index] for index in range(4)}
        for name, prompt in prompts.items():
            core.submit(request(name, prompt, max_tokens=12))
        for _ in range(at):
            collector.take(core.step())
        core.abort("r1")
        core.submit(request("late", [*shared, 5, 6], max_tokens=12))
        results = run_all(core, collector)
        prompts["late"] = [*shared, 5, 6]
        for name, prompt in prompts.items():
            if name != "r1":
                assert results[name].token_ids == continuation(prompt, 12)


@pytest.mark.parametrize("family", ["gemma3", "mistral-sliding"])
def test_a_sliding_window_is_rolled_back_past_its_window(family, tmp_path):
    """Tokens are taken back by several windows, and others put in their place.

    An engine that keeps only a window's keys has overwritten those that are needed again.
    """
    runner = small_runner(family, tmp_path)
    driver = Driver(runner)
    generator = torch.Generator().manual_seed(5)
    prompt = torch.randint(VOCAB, (150,), generator=generator).tolist()
    sequence = driver.sequence("a", prompt)
    driver.generate([sequence], new_tokens=2, chunk=64)
    for kept in (130, 64, 33, 5):
        sequence.token_ids = [*prompt[:kept], (prompt[kept] + 1) % VOCAB]
        sequence.prompt_tokens = kept + 1
        sequence.computed = kept
        logits = driver.generate([sequence], new_tokens=4, chunk=64)["a"]
        expected = reference_logits(small_reference(family), sequence.token_ids[:-1])[kept:]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_a_prefix_hit_is_counted_once_whatever_happens_to_its_sequence():
    """Preempted twice and admitted three times, the sequence has found its prefix once."""
    s = Scheduler(
        SchedulerConfig(
            max_step_tokens=64, max_running=4, block_tokens=4, num_blocks=12, max_context_tokens=48
        )
    )

    def step():
        plan = s.plan()
        s.commit(plan, {c.sequence.request_id: [7] for c in plan.chunks if c.samples})
        for chunk in plan.chunks:
            if chunk.sequence.output_tokens == chunk.sequence.max_tokens:
                s.finish(chunk.sequence.request_id)

    s.add("seed", range(9), max_tokens=1)
    step()
    found = [s.add(f"r{index}", [*range(8), 50 + index], max_tokens=30) for index in range(3)]
    for _ in range(400):
        if not s.running and not s.waiting:
            break
        step()
    assert s.preemptions_total >= 2
    assert [sequence.cached_prompt_tokens for sequence in found] == [8, 8, 8]
    assert s.prompt_tokens_total == 4 * 9
    assert s.cached_prompt_tokens_total == 3 * 8


@pytest.mark.parametrize("bits", [64, 0])
def test_no_salt_or_adapter_finds_anothers_blocks_even_if_all_hashes_collide(bits):
    config = SchedulerConfig(
        max_step_tokens=64, max_running=8, block_tokens=4, num_blocks=64, max_context_tokens=64
    )
    s = Scheduler(config, hasher=lambda parent, tokens: block_hash(parent, tokens) % (1 << bits))
    keys = [("", ""), ("salt", ""), ("", "salt"), ("salt", "adapter"), ("salta", "dapter")]
    for index, key in enumerate(keys):
        sequence = s.add(f"r{index}", range(13), max_tokens=1, cache_key=key)
        plan = s.plan()
        s.commit(plan, {c.sequence.request_id: [7] for c in plan.chunks if c.samples})
        assert sequence.cached_prompt_tokens == 0
        s.finish(f"r{index}")
        s.check_integrity()


def test_a_bad_grammar_ends_its_own_request_and_the_engine_goes_on():
    core = make_core()
    core.grammars = GrammarCompiler(byte_vocabulary, limit_s=20.0, cache_entries=4)
    core.submit(request("good", [1, 2], max_tokens=6))
    collector = Collector()
    collector.take(core.step())
    for text in ("(", "[z-a]", "a{5,2}"):
        with pytest.raises(InvalidRequestError):
            core.submit(request("bad", [1, 3], ignore_eos=False, grammar=Grammar.regex(text)))
        core.check_integrity()
    result = run_all(core, collector)["good"]
    assert result.finish.reason is FinishReason.LENGTH
    assert result.token_ids == continuation([1, 2], 6)
    assert_idle(core)
