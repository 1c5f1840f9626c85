"""Assembling an engine: what is refused, and how the machine's limits are read."""

from __future__ import annotations

import pytest
import torch

from tokenpath.config.spec import EngineSettings
from tokenpath.engine.build import build_engine
from tokenpath.models import memory
from tokenpath.models.local import open_model
from tokenpath.protocol.errors import ModelError, SpecError


@pytest.fixture(scope="module")
def model(gemma_path):
    return open_model(gemma_path)


def refuse(model, available: int, *, dtype: str = "float32", **settings) -> str:
    with pytest.raises((ModelError, SpecError)) as caught:
        build_engine(
            model,
            EngineSettings(dtype=dtype, threads=1, **settings),
            name="gemma",
            available_bytes=lambda: available,
        )
    return str(caught.value)


@pytest.mark.real_model
def test_weights_that_do_not_fit_are_refused_with_the_numbers(model):
    message = refuse(model, 500_000_000)
    assert "500.0 MB of memory are available" in message
    assert "weights take 1.1 GB in float32" in message
    assert "bfloat16 takes half" in message


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("dtype", "weights", "hint"),
    [("int8", "270.8 MB in int8", "; int4 takes less"), ("int4", "227.9 MB in int4", "")],
)
def test_packed_weights_that_do_not_fit_are_refused_too(model, dtype, weights, hint):
    message = refuse(model, 1_200_000_000, dtype=dtype)
    assert "1.2 GB of memory are available" in message
    assert f"weights take {weights}" in message
    assert message.endswith(f"more{hint}")


@pytest.mark.real_model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("unit", ["bytes", "tokens"])
def test_too_large_a_pool_is_refused_with_the_largest_that_fits(model, dtype, unit):
    available = 3_000_000_000
    key = f"kv_cache_{unit}"
    message = refuse(model, available, dtype=dtype, **{key: 1 << 40})
    assert f"the largest {key} that fits is " in message
    fits = int(message.rsplit(" ", 1)[1])
    token = model.config.kv_bytes_per_token("float32" if dtype == "float32" else "bfloat16")
    pool = fits * (1 if unit == "bytes" else token)
    # It leaves a 64th of memory, so that it still fits a moment later; a block more does not.
    left = available - memory.needed_bytes(model, dtype, pool)
    assert 0 <= left - available // 64 < 16 * token


@pytest.mark.real_model
def test_a_context_that_the_pool_cannot_hold_is_refused(model):
    message = refuse(model, 1 << 40, kv_cache_tokens=100, max_context_tokens=1000)
    assert "max_context_tokens is 1000" in message


@pytest.mark.real_model
def test_a_device_that_is_not_there_is_refused(model):
    for device in ("cuda:99", "abacus"):
        assert f"device '{device}' cannot be used" in refuse(model, 1 << 40, device=device)
    assert "computes nothing" in refuse(model, 1 << 40, device="meta")


@pytest.mark.real_model
def test_card_tells_what_was_built(model):
    threads = torch.get_num_threads()
    told = []
    try:
        core = build_engine(
            model,
            EngineSettings(dtype="bfloat16", threads=1, kv_cache_tokens=100, max_step_tokens=32),
            name="gemma",
            progress=lambda what, fraction: told.append((what, fraction)),
        )
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    card = core.card
    assert (card.name, card.architecture, card.dtype) == ("gemma", "gemma3", "bfloat16")
    assert card.parameters == memory.parameters(model)
    assert card.kv_blocks_total * card.block_tokens == card.max_context_tokens == 112
    assert all(0 <= fraction <= 1 for _, fraction in told)
    assert told[-1][1] == 1
    assert core.stats().resident_bytes > 100_000_000
