"""Assembling an engine: what is refused, and how the machine's limits are read."""

from __future__ import annotations

import os

import pytest
import torch

from tokenpath.config.spec import EngineSettings
from tokenpath.engine.build import build_engine
from tokenpath.engine.cpus import usable_cpus
from tokenpath.models import memory
from tokenpath.models.local import open_model
from tokenpath.protocol.errors import ModelError, SpecError


@pytest.fixture(scope="module")
def model(gemma_path):
    return open_model(gemma_path)


def refuse(model, available: int, **settings) -> str:
    with pytest.raises((ModelError, SpecError)) as caught:
        build_engine(
            model,
            EngineSettings(dtype="float32", threads=1, **settings),
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
def test_too_large_a_pool_is_refused_with_the_largest_that_fits(model):
    available = 3_000_000_000
    message = refuse(model, available, kv_cache_bytes=1 << 40)
    fits = int(message.rsplit(" ", 1)[1])
    assert 0 <= available - memory.needed_bytes(model, "float32", fits) < 1_000_000


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


def group(tmp_path, files: dict[str, str]):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/a/b\n", {"a/cpu.max": "150000 100000\n", "a/b/cpu.max": "max 100000\n"}, 2),
        ("0::/a/b\n", {"a/b/cpu.max": "10000 100000\n"}, 1),
        ("0::/somewhere/of/the/host\n", {"cpu.max": "300000 100000\n"}, 3),
        ("0::/\n", {}, 99),
        (
            "3:cpu,cpuacct:/x\n",
            {"cpu/x/cpu.cfs_quota_us": "200000", "cpu/x/cpu.cfs_period_us": "100000"},
            2,
        ),
        (
            "3:cpu,cpuacct:/x\n",
            {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"},
            99,
        ),
    ],
)
def test_cpus_are_those_that_quota_and_affinity_leave(
    tmp_path, monkeypatch, membership, files, limit
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    group(tmp_path, files)
    own = tmp_path / "self_cgroup"
    own.write_text(membership)
    assert usable_cpus(own_cgroups=own, cgroup_root=tmp_path) == min(limit, 8)


def test_cpus_without_control_groups(tmp_path):
    missing = tmp_path / "none"
    assert usable_cpus(own_cgroups=missing, cgroup_root=missing) == len(os.sched_getaffinity(0))
