"""A draft model makes the same output sooner, whatever it guesses and however little room it has."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_fakes import (
    VOCAB,
    Clock,
    Collector,
    FakeRunner,
    FreeRows,
    continuation,
    make_core,
    request,
    run_all,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenpath import Engine, SamplingParams
from tokenpath.engine.draft_model import ModelDrafter
from tokenpath.policy.speculator import Speculator
from tokenpath.protocol.errors import SpecError

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
import checkpoints


def drafting(runner, *, num_blocks, step_tokens=64) -> tuple[Speculator, ModelDrafter]:
    drafter = ModelDrafter(
        runner,
        num_blocks=num_blocks,
        block_tokens=4,
        step_tokens=step_tokens,
        vocab=VOCAB,
        clock=Clock(),
    )
    speculator = Speculator([drafter], most_tokens=4)
    speculator.costs = FreeRows()
    return speculator, drafter


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(8, 30),
    draft_blocks=st.sampled_from([1, 6, 20, 100]),
    step_tokens=st.sampled_from([3, 64]),
)
def test_a_model_that_is_the_same_is_always_right(seed, num_blocks, draft_blocks, step_tokens):
    """Also after preemptions, aborts, and in a pool that is too small: a wrong key would show."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    speculator, drafter = drafting(
        FakeRunner(draft_blocks, 4), num_blocks=draft_blocks, step_tokens=step_tokens
    )
    core = make_core(num_blocks=num_blocks, max_step_tokens=16, speculator=speculator)
    collector, expected = Collector(), {}
    for index in range(8):
        prompt = [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 14))]
        count = rng.randrange(1, 17)
        core.submit(request(f"r{index}", prompt, max_tokens=count, priority=rng.randrange(3)))
        expected[f"r{index}"] = continuation(prompt, count)
        if rng.random() < 0.2:
            core.abort(f"r{index}")
            del expected[f"r{index}"]
        collector.take(core.step())
        drafter.check_integrity()
    results = run_all(core, collector)
    assert {name: results[name].token_ids for name in expected} == expected
    assert speculator.drafted_total == speculator.accepted_total
    assert not drafter._shadows
    drafter.check_integrity()


def test_a_model_that_fails_is_left_out():
    class Failing:
        def run(self, plan):
            raise RuntimeError("no memory")

    speculator, _ = drafting(Failing(), num_blocks=9)
    core = make_core(speculator=speculator)
    core.submit(request("a", [5, 6, 7]))
    assert run_all(core)["a"].token_ids == continuation([5, 6, 7], 8)
    assert sum(speculator.drafted_total) == 0


def write_model(
    folder: Path, *, seed: int, noise: float = 0.0, specials=("<|endoftext|>",)
) -> Path:
    vocabulary = checkpoints.byte_level_vocabulary(specials)
    size = len(vocabulary["tokenizer.ggml.tokens"])
    tensors = checkpoints.tensors_of("qwen2", seed=seed)
    rng = np.random.default_rng(seed)
    for name in ("token_embd.weight", "output.weight"):
        tensors[name] = (rng.standard_normal((size, checkpoints.HIDDEN)) / 8).astype(np.float32)
    disturbed = np.random.default_rng(9)
    for name, values in tensors.items():
        change = noise * values.std() * disturbed.standard_normal(values.shape)
        tensors[name] = values + change.astype(np.float32)
    metadata = checkpoints.metadata_of("qwen2") | vocabulary
    metadata |= {"general.architecture": "qwen2", "qwen2.vocab_size": size}
    path = folder / f"{seed}-{noise}-{len(specials)}.gguf"
    return checkpoints.write_gguf(path, "qwen2", metadata, tensors)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def load(path: Path, dtype="float32", threads=1, **speculation) -> Engine:
    return Engine(
        path,
        dtype=dtype,
        threads=threads,
        kv_cache_tokens=2048,
        progress=False,
        speculation={"draft_tokens": 5} | speculation,
    )


PARAMS = [
    SamplingParams(max_tokens=40, temperature=temperature, seed=seed, ignore_eos=True)
    for seed, temperature in enumerate((0.0, 0.0, 0.7, 1.0))
]
PROMPTS = ["The quick brown", "def main(", "tokens and", "Das Wetter"]


@pytest.mark.parametrize(("noise", "right"), [(0.0, True), (0.1, False)])
def test_two_models(folder, noise, right):
    """The model itself as its draft model, and one that is only like it."""
    target = write_model(folder, seed=1)
    draft = target if right else write_model(folder, seed=1, noise=noise)
    with load(target, draft_model=str(draft)) as engine:
        speculator = engine._core.speculator
        speculator.costs = FreeRows()
        params = PARAMS[:1] * 4 if right else PARAMS
        found = engine.generate(PROMPTS, params, progress=False)
        stats = engine.stats()
        speculator.paused = True
        plain = engine.generate(PROMPTS, params, progress=False)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    drafted, accepted = sum(stats.drafted_tokens_total), sum(stats.accepted_tokens_total)
    assert stats.drafted_tokens_total == sorted(stats.drafted_tokens_total, reverse=True)
    assert drafted > 40
    if right:  # the text's own repetitions are looked up as well, and may mislead
        assert accepted > 0.9 * drafted
    else:
        assert 0.02 * drafted < accepted < drafted


def test_it_computes_with_all_threads(folder):
    """Torch is held to one thread beside the native kernels; the draft model is not."""
    target = write_model(folder, seed=1)
    with load(target, dtype="int8", threads=2, draft_model=str(target)) as engine:
        model, drafter = engine._core._runner, engine._core.speculator._drafters[1]
        assert drafter._runner.threads == model.threads == 2
        assert drafter._runner.kernels == model.kernels


def test_what_cannot_be_a_draft_model_is_named(folder):
    target = write_model(folder, seed=1)
    other = write_model(folder, seed=2, specials=("<|im_start|>", "<|im_end|>"))
    with pytest.raises(SpecError, match="has another vocabulary than the model"):
        load(target, draft_model=str(other))
    with pytest.raises(SpecError, match="method 'draft' needs a draft_model"):
        load(target, method="draft")
    with pytest.raises(SpecError, match="draft_model is not used by method 'ngram'"):
        load(target, method="ngram", draft_model=str(target))
    with pytest.raises(SpecError, match="draft_kv_cache_tokens needs a draft_model"):
        load(target, draft_kv_cache_tokens=64)
