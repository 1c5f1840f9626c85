"""An engine with tiers: the same answers, whatever is evicted, read, damaged or withdrawn."""

from __future__ import annotations

import random
import time

import pytest
from engine_fakes import (
    VOCAB,
    Collector,
    FakeCopier,
    assert_idle,
    continuation,
    make_core,
    request,
    run_all,
)
from tier_helpers import FINGERPRINT, files, settle

from tokenpath.engine.kv_tiers.folder import open_folder
from tokenpath.engine.kv_tiers.tiers import KvTiers
from tokenpath.policy.tiers import Costs
from tokenpath.protocol.events import FinishReason

BLOCK = 4


@pytest.fixture(autouse=True)
def everything_is_worth_restoring(monkeypatch):
    """The fake computes faster than anything can be copied."""
    monkeypatch.setattr(KvTiers, "costs", lambda self: Costs(None))


def tiers_of(root=None, *, host=12, disk=200, survive=False, step=2):
    def make(copier: FakeCopier) -> KvTiers:
        folder = None
        if root is not None:
            folder = open_folder(root, model="fake", fingerprint=FINGERPRINT)
        return KvTiers(
            copier,
            block_tokens=BLOCK,
            host_bytes=host * copier.block_bytes,
            step_bytes=step * copier.block_bytes,
            disk_bytes=disk * (copier.block_bytes + 200),
            folder=folder,
            fingerprint=FINGERPRINT,
            survive_restarts=survive,
        )

    return make


def prompts(seed: int, count: int = 60) -> list[list[int]]:
    """Some beginnings, each continued in several ways, in any order."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 40))] for _ in range(6)]
    return [
        rng.choice(beginnings) + [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 6))]
        for _ in range(count)
    ]


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("seed", range(4))
def test_outputs_are_those_without_tiers(place, seed, tmp_path):
    root = tmp_path if place == "disk" else None
    host = 40 if place == "host" else 6
    core = make_core(num_blocks=16, make_tiers=tiers_of(root, host=host), max_step_tokens=24)
    collector = Collector()
    asked = prompts(seed)
    for number, prompt in enumerate(asked):
        core.submit(request(f"r{number}", prompt, max_tokens=6))
        for _ in range(number % 4):
            collector.take(core.step())
            core.check_integrity()
        settle(core._tiers)
        if number % 5 == 0:
            run_all(core, collector)
    run_all(core, collector)
    cached = 0
    for number, prompt in enumerate(asked):
        result = collector.results[f"r{number}"]
        assert result.token_ids == continuation(prompt, 6)
        cached += result.finish.usage.cached_prompt_tokens
    stats = core.stats()
    assert stats.cached_prompt_tokens_total == cached
    assert stats.kv_restored_blocks_total > 10
    assert stats.kv_restored_tokens_total == BLOCK * stats.kv_restored_blocks_total
    assert stats.kv_corrupt_blocks_total == 0
    assert (stats.kv_disk_hits_total > 5) == (place == "disk")
    core.close()


def on_disk(tmp_path):
    """A core whose pool and host have forgotten ``LONG``, which is on the disk."""
    core = make_core(num_blocks=16, make_tiers=tiers_of(tmp_path, host=4), max_step_tokens=8)
    for number, prompt in enumerate((LONG, *([n] * 30 for n in range(1, 9)))):
        core.submit(request(f"before {number}", prompt, max_tokens=1))
        while core.has_work():
            core.step()
            settle(core._tiers)
    return core


LONG = [1 + n % 7 for n in range(30)]


def test_usage_counts_what_came_from_the_disk(tmp_path):
    core = on_disk(tmp_path)
    before = core.stats()
    core.submit(request("again", LONG))
    result = run_all(core)["again"]
    assert result.token_ids == continuation(LONG, 8)
    # As much as the host's four slots let through.
    assert result.finish.usage.cached_prompt_tokens == 16
    assert core.stats().kv_disk_hits_total - before.kv_disk_hits_total == 4
    core.close()


def test_withdrawn_while_its_blocks_are_read(tmp_path, monkeypatch):
    core = on_disk(tmp_path)
    load = core._tiers._io._load

    def slowly(job):
        time.sleep(0.05)
        return load(job)

    monkeypatch.setattr(core._tiers._io, "_load", slowly)
    core.submit(request("again", LONG))
    assert core.step() == []
    assert core.stats().requests_waiting == 1
    finish = core.abort("again")
    assert finish is not None
    assert finish.reason is FinishReason.ABORT
    assert_idle(core)
    core.submit(request("later", LONG))
    assert run_all(core)["later"].token_ids == continuation(LONG, 8)
    core.close()


def test_withdrawn_halfway_through_being_restored():
    core = make_core(num_blocks=16, make_tiers=tiers_of(host=40, step=1))
    for name, prompt in (("a", LONG), ("b", [9] * 50)):
        core.submit(request(name, prompt, max_tokens=1))
        run_all(core)
    core.submit(request("again", LONG))
    core.step()
    core.step()
    assert core.abort("again").usage.cached_prompt_tokens > 0
    assert_idle(core)
    core.submit(request("later", LONG))
    assert run_all(core)["later"].token_ids == continuation(LONG, 8)


def test_others_go_on_while_one_waits_for_the_disk(tmp_path, monkeypatch):
    core = on_disk(tmp_path)
    monkeypatch.setattr(core._tiers._io, "read", lambda job: None)  # never ends
    core.submit(request("again", LONG))
    core.submit(request("other", [5, 6, 7]))
    collector = Collector()
    for _ in range(12):
        collector.take(core.step())
    assert collector.results["other"].finish is not None
    assert "again" not in collector.results
    core.abort("again")


def test_the_next_engine_continues_where_the_last_one_ended(tmp_path):
    make = tiers_of(tmp_path, survive=True, host=50)
    core = make_core(num_blocks=16, make_tiers=make)
    core.submit(request("first", LONG))
    run_all(core)
    core.close()
    assert files(tmp_path)
    core = make_core(num_blocks=16, make_tiers=make)
    core.submit(request("again", LONG))
    result = run_all(core)["again"]
    assert result.token_ids == continuation(LONG, 8)
    assert result.finish.usage.cached_prompt_tokens == 28
    core.close()


def test_what_is_in_doubt_is_not_kept(tmp_path):
    make = tiers_of(tmp_path, survive=True, host=50)
    core = make_core(num_blocks=16, make_tiers=make)
    core.submit(request("first", LONG))
    run_all(core)
    core.close(trusted=False)
    assert not files(tmp_path)
