"""What is broken in one sequence stays in it: NaN and infinities reach no neighbour in the batch."""

from __future__ import annotations

import copy

import pytest
import torch
from driver import Blocks, Driver
from reference import saved
from test_native import KERNELS, VOCAB, model_of, needs_native, reference_of, runner

from tokenpath.engine.kernels.native_module import VARIABLE
from tokenpath.models.local import LocalModel
from tokenpath.policy.sequence import Sequence

pytestmark = needs_native

POISONS = (torch.nan, torch.inf, -torch.inf)
LENGTHS = (3, 16, 40, 70, 17)
"""Prompts of the batch; the third is the one that breaks."""
BROKEN = "2"


@pytest.fixture(params=["llama", "gemma3-32"], scope="module")
def model(request, tmp_path_factory) -> LocalModel:
    return model_of(request.param, tmp_path_factory)


def batch(driver: Driver) -> list[Sequence]:
    generator = torch.Generator().manual_seed(5)
    return [
        driver.sequence(
            str(index),
            # Only the one that breaks has token 255.
            [255] * (str(index) == BROKEN)
            + torch.randint(VOCAB - 1, (length,), generator=generator).tolist(),
        )
        for index, length in enumerate(LENGTHS)
    ]


def decoded(driver: Driver, sequences: list[Sequence], poison) -> dict[str, torch.Tensor]:
    """Logits of two steps after the prompts, with ``poison`` let loose between."""
    driver.generate(sequences, new_tokens=1, chunk=512)
    poison(driver)
    return driver.generate(sequences, new_tokens=2, chunk=512)


def check(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert not torch.equal(found[BROKEN], expected[BROKEN]), "the poison has had its effect"
    healthy = {name: logits for name, logits in found.items() if name != BROKEN}
    assert_equal_and_finite(healthy, expected)


def assert_equal_and_finite(found: dict[str, torch.Tensor], expected) -> None:
    for name, logits in found.items():
        assert torch.equal(logits, expected[name])
        assert logits.isfinite().all()


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kernels", KERNELS)
def test_broken_keys_and_values_of_one_sequence(model, kernels, bits, poison, monkeypatch):
    monkeypatch.setenv(VARIABLE, kernels)
    driver = Driver(runner(model, bits))
    expected = decoded(driver, batch(driver), lambda _: None)
    driver = Driver(runner(model, bits))
    sequences = batch(driver)

    def break_blocks(driver: Driver) -> None:
        blocks = next(s.blocks for s in sequences if s.request_id == BROKEN)
        with torch.inference_mode():
            for layer in driver.runner._cache.layers:
                layer.keys[blocks] = poison
                layer.values[blocks] = poison

    check(decoded(driver, sequences, break_blocks), expected)


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_what_is_left_in_free_blocks_does_not_matter(model, kernels, poison, monkeypatch):
    """Blocks are not wiped between sequences, nor is the room behind a sequence's last token."""
    monkeypatch.setenv(VARIABLE, kernels)
    clean = Driver(runner(model, 8))
    expected = clean.generate(batch(clean), new_tokens=3, chunk=7)
    dirty = Driver(runner(model, 8))
    with torch.inference_mode():
        for layer in dirty.runner._cache.layers:
            layer.keys.fill_(poison)
            layer.values.fill_(poison)
    found = dirty.generate(batch(dirty), new_tokens=3, chunk=7)
    assert_equal_and_finite(found, expected)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kernels", KERNELS)
def test_broken_activations_of_one_row(kernels, bits, monkeypatch, tmp_path):
    """A NaN in the embedding of token 255, which one prompt has, makes all its activations so."""
    monkeypatch.setenv(VARIABLE, kernels)
    reference = copy.deepcopy(reference_of("llama"))
    with torch.no_grad():
        reference.get_input_embeddings().weight[255, 7] = torch.nan
    driver = Driver(runner(saved(reference, tmp_path), bits))
    without = [s for s in batch(driver) if s.request_id != BROKEN]
    # One token each: a neighbour that writes token 255 itself would be rightly broken then.
    expected = driver.generate(without, new_tokens=1, chunk=16)
    driver.blocks = Blocks(driver.runner.num_blocks)
    found = driver.generate(batch(driver), new_tokens=1, chunk=16)
    assert found.pop(BROKEN).isnan().all()
    assert_equal_and_finite(found, expected)
