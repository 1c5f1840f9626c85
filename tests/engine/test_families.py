"""Each family computes what transformers computes, on small random models and on the real Gemma."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from driver import Driver
from reference import (
    SMALL_MODELS,
    VOCAB,
    reference_logits,
    saved,
    small_reference,
    small_runner,
)

from tokenpath.engine.families.registry import family_names, find_family
from tokenpath.engine.runner import ModelRunner
from tokenpath.protocol.errors import ModelFileError, ModelUnsupportedError


@pytest.mark.parametrize("name", sorted(SMALL_MODELS))
def test_a_long_prompt_and_its_beginnings(name, tmp_path):
    """Beginnings of one text, all in one step; the window ends many tokens before most do."""
    runner, reference = small_runner(name, tmp_path), small_reference(name)
    ids = torch.randint(VOCAB, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = reference_logits(reference, ids)
    driver = Driver(runner)
    starts = [driver.sequence(str(n), ids[:n]) for n in range(1, len(ids) + 1, 13)]
    logits = driver.generate(starts, new_tokens=1, chunk=512)
    for sequence in starts:
        row = expected[sequence.prompt_tokens - 1]
        assert row.abs().max() > 1, "the reference's logits are too flat to tell anything"
        torch.testing.assert_close(logits[sequence.request_id][0], row, atol=1e-4, rtol=0)


def test_every_family_has_a_reference():
    tested = {name.split("-")[0] for name in SMALL_MODELS}
    assert {"gemma3", "llama", "qwen2", "qwen3"} <= set(family_names()) <= tested


def test_an_unknown_family_is_named_with_those_there_are(tmp_path):
    config = saved(small_reference("llama"), tmp_path).config
    unknown = dataclasses.replace(config, family="mamba", architecture="MambaForCausalLM")
    with pytest.raises(ModelUnsupportedError, match=r"'mamba'.*MambaForCausalLM.*gemma3, llama"):
        find_family(unknown)
    with pytest.raises(ModelUnsupportedError):
        find_family(dataclasses.replace(config, family="registry"))


def load(model, **changes):
    return ModelRunner(
        dataclasses.replace(model, **changes),
        dtype=torch.float32,
        device="cpu",
        num_blocks=1,
        block_tokens=16,
    )


def test_a_missing_tensor_is_named_with_its_shape(tmp_path):
    model = saved(small_reference("qwen3"), tmp_path)
    tensors = dict(model.tensors)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(ModelFileError, match=r"layers\.1\.self_attn\.k_proj.*\[80, 64\]"):
        load(model, tensors=tensors)


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path):
    model = saved(small_reference("llama"), tmp_path)
    with pytest.raises(ModelFileError, match=r"gate_proj.*\[96, 64\].*\[90, 64\]"):
        load(model, config=dataclasses.replace(model.config, intermediate_size=90))


def test_a_leftover_tensor_is_named(tmp_path):
    model = saved(small_reference("qwen2-sliding"), tmp_path)
    with pytest.raises(ModelFileError, match=r"does not use.*lm_head\.weight"):
        load(model, config=dataclasses.replace(model.config, tie_embeddings=True))


def test_books_of_weights(tmp_path):
    seen: list[float] = []
    reference = small_reference("smollm-tied")
    runner = ModelRunner(
        saved(reference, tmp_path),
        dtype=torch.bfloat16,
        device="cpu",
        num_blocks=4,
        block_tokens=8,
        progress=lambda _what, fraction: seen.append(fraction),
    )
    parameters = sum(p.numel() for p in reference.parameters())
    norms = sum(p.numel() for p in reference.parameters() if p.dim() == 1)
    assert runner.parameters == parameters
    assert runner.weight_bytes == 2 * parameters + 2 * norms  # norms stay in float32
    assert runner.kv_bytes_per_token == 2 * 3 * 1 * 16 * 2
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_bfloat16_stays_near_the_reference(name, tmp_path):
    model = saved(small_reference(name), tmp_path)
    runner = ModelRunner(model, dtype=torch.bfloat16, device="cpu", num_blocks=64, block_tokens=16)
    ids = list(range(100))
    driver = Driver(runner)
    logits = driver.generate([driver.sequence("a", ids)], new_tokens=1, chunk=33)["a"][0]
    expected = reference_logits(small_reference(name), ids)[-1]
    assert logits.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(logits, expected, dim=0) > 0.995
