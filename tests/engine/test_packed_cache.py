"""Packed weights are kept for the next start, and whatever became of the file, the model is right."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from driver import Driver
from test_native import model_of

from tokenpath.engine import native_loading
from tokenpath.engine.kernels.native_module import native_module
from tokenpath.engine.packed_cache import MOST_FILES, PackedCache
from tokenpath.engine.runner import ModelRunner
from tokenpath.models.local import LocalModel

pytestmark = pytest.mark.skipif(native_module() is None, reason="no C++ compiler when installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> LocalModel:
    return model_of("llama-bias", tmp_path_factory)


@pytest.fixture
def cache(tmp_path) -> PackedCache:
    folder = tmp_path / "packed"
    return PackedCache(folder)


def logits(model: LocalModel, cache: PackedCache | None, bits: int = 8) -> torch.Tensor:
    runner = ModelRunner(
        model,
        dtype=torch.bfloat16,
        device="cpu",
        num_blocks=8,
        block_tokens=16,
        bits=bits,
        packed_cache=cache,
    )
    driver = Driver(runner)
    found = driver.generate([driver.sequence("a", [5, 6, 7, 8])], new_tokens=3, chunk=512)
    return found["a"]


def kept(cache: PackedCache) -> list[Path]:
    return sorted(cache.folder.glob("*.packed"))


@pytest.mark.parametrize("bits", [8, 4])
def test_a_second_start_packs_nothing(model, cache, bits, monkeypatch):
    first = logits(model, cache, bits)
    assert len(kept(cache)) == 1
    monkeypatch.delattr(native_loading, "Packer")
    assert torch.equal(logits(model, cache, bits), first)


def test_without_a_cache_it_is_the_same(model, cache):
    assert torch.equal(logits(model, None), logits(model, cache))


@pytest.mark.parametrize("place", [0, 9, 30, 5000, 0.5, 0.9, -1])
def test_a_flipped_byte_is_found_and_the_file_made_anew(model, cache, place, caplog):
    expected = logits(model, cache)
    (file,) = kept(cache)
    data = bytearray(file.read_bytes())
    data[int(place * len(data)) if isinstance(place, float) else place] ^= 0x41
    file.unlink()
    file.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(logits(model, cache), expected)
    assert caplog.messages, "a sentence says that the file was damaged"
    caplog.clear()
    assert torch.equal(logits(model, cache), expected)
    assert not caplog.messages


@pytest.mark.parametrize("size", [0, 100, 4096, 0.7])
def test_a_cut_file_is_made_anew(model, cache, size, caplog):
    expected = logits(model, cache)
    (file,) = kept(cache)
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data[: int(size * len(data)) if isinstance(size, float) else size])
    assert torch.equal(logits(model, cache), expected)
    assert caplog.messages


def test_a_folder_that_cannot_be_used_only_costs_time(model, tmp_path, caplog):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    assert torch.equal(logits(model, PackedCache(blocked)), logits(model, None))
    assert caplog.messages


def test_files_are_bounded(model, cache):
    logits(model, cache)
    (file,) = kept(cache)
    for number in range(MOST_FILES + 3):
        (cache.folder / f"int8-{number:032x}.packed").write_bytes(file.read_bytes())
    logits(model, cache, 4)
    assert len(kept(cache)) <= MOST_FILES
