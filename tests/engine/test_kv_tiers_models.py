"""Blocks of real pools, in every KV type and kernel, go out and come back bit by bit."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from reference import SMALL_MODELS, VOCAB, saved, small_reference
from tier_helpers import settle

from tokenpath import Engine, SamplingParams
from tokenpath.config.spec import EngineSettings, KvTierSettings
from tokenpath.engine.build import build_engine
from tokenpath.engine.kernels.native_module import native_module
from tokenpath.engine.kv_tiers.build import fingerprint_of, make_tiers
from tokenpath.engine.kv_tiers.tiers import KvTiers
from tokenpath.engine.runner import ModelRunner
from tokenpath.models.local import open_model
from tokenpath.policy.scheduler import Scheduler, SchedulerConfig
from tokenpath.policy.tiers import Costs
from tokenpath.protocol.errors import SpecError

BLOCK = 16
BLOCKS = 12
NEW_TOKENS = 6
needs_native = pytest.mark.skipif(native_module() is None, reason="no C++ compiler when installed")
KINDS = [
    pytest.param({"dtype": torch.float32}, id="torch, float32"),
    pytest.param({"dtype": torch.float32, "kv_dtype": "int8"}, id="torch, int8 KV"),
    pytest.param({"dtype": torch.bfloat16, "bits": 8}, id="native int8", marks=needs_native),
    pytest.param(
        {"dtype": torch.bfloat16, "bits": 8, "kv_dtype": "int8"},
        id="native int8, int8 KV",
        marks=needs_native,
    ),
    pytest.param({"dtype": torch.bfloat16, "bits": 4}, id="native int4", marks=needs_native),
]


@pytest.fixture(params=["llama", "gemma3"], scope="module")
def model(request, tmp_path_factory):
    name = f"tiers-{request.param}"
    if name not in SMALL_MODELS:
        base = SMALL_MODELS[request.param]()
        config = base.config
        config.head_dim = 32  # what the kernels take
        SMALL_MODELS[name] = lambda: type(base)(config)
    return saved(small_reference(name), tmp_path_factory.mktemp(request.param))


def runner_of(model, *, num_blocks=BLOCKS, **kind) -> ModelRunner:
    return ModelRunner(model, device="cpu", num_blocks=num_blocks, block_tokens=BLOCK, **kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_goes_out_and_comes_back_bit_by_bit(model, kind):
    runner = runner_of(model, **kind)
    copier = runner.copier()
    assert copier.block_bytes == BLOCK * runner.kv_bytes_per_token
    tensors = [
        tensor
        for layer in runner._cache.layers
        for tensor in (layer.keys, layer.values, layer.key_scales, layer.value_scales)
        if tensor is not None
    ]
    for tensor in tensors:
        tensor.view(torch.uint8).random_(0, 255)
    before = [tensor.clone() for tensor in tensors]
    rows = torch.zeros(2, copier.block_bytes, dtype=torch.uint8).numpy()
    copier.read(3, rows[0])
    copier.write(7, rows[0])
    copier.read(7, rows[1])
    assert (rows[0] == rows[1]).all()
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor[7].view(torch.uint8), old[3].view(torch.uint8))
        others = [block for block in range(BLOCKS) if block != 7]
        assert torch.equal(tensor[others].view(torch.uint8), old[others].view(torch.uint8))


def workload(seed: int) -> list[tuple[list[int], str, int]]:
    """Prompts with shared beginnings, their salts, and the steps until the next comes."""
    rng = random.Random(seed)
    beginnings = [
        [rng.randrange(VOCAB) for _ in range(BLOCK * rng.randrange(2, 6))] for _ in range(5)
    ]
    return [
        (
            beginnings[number % 5] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))],
            rng.choice(["", "", "tenant"]),
            rng.randrange(6),
        )
        for number in range(30)
    ]


def outputs(runner: ModelRunner, tiers: KvTiers | None, work) -> list[list[int]]:
    """Greedy tokens of every prompt."""
    scheduler = Scheduler(
        SchedulerConfig(
            max_step_tokens=40,
            max_running=4,
            block_tokens=BLOCK,
            num_blocks=BLOCKS,
            max_context_tokens=512,
        ),
        tiers=tiers,
    )
    arriving = list(enumerate(work))
    found: dict[str, list[int]] = {}
    while arriving or scheduler.running or scheduler.waiting:
        if arriving:
            number, (prompt, salt, steps) = arriving.pop(0)
            scheduler.add(str(number), prompt, max_tokens=NEW_TOKENS, cache_key=(salt, ""))
        else:
            steps = 1
        for _ in range(steps):
            plan = scheduler.plan()
            if tiers is not None:
                settle(tiers)  # these models compute faster than any disk
            if not plan.chunks:
                continue
            rows = runner.run(plan)
            sampling = [chunk.sequence for chunk in plan.chunks if chunk.samples]
            drawn = zip(sampling, rows, strict=True)
            scheduler.commit(plan, {s.request_id: [int(row.argmax())] for s, row in drawn})
            scheduler.check_integrity()
            for sequence in sampling:
                if sequence.output_tokens == NEW_TOKENS:
                    found[sequence.request_id] = sequence.token_ids[sequence.prompt_tokens :]
                    scheduler.finish(sequence.request_id)
    if tiers is not None:
        tiers.check_integrity()
    return [found[str(number)] for number in range(len(work))]


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_those_without_tiers(model, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(KvTiers, "costs", lambda self: Costs(None))
    work = workload(1)
    runner = runner_of(model, **kind)
    plain = outputs(runner, None, work)
    copier = runner.copier()
    for host, disk_bytes in ((60, 0), (8, 1 << 26)):
        settings = KvTierSettings(
            host_bytes=copier.block_bytes * host,
            disk_bytes=disk_bytes,
            disk_path=str(tmp_path),
            step_bytes=3 * copier.block_bytes,
        )
        tiers = make_tiers(settings, copier, model=model, name="m", dtype="x", block_tokens=BLOCK)
        assert outputs(runner, tiers, work) == plain
        assert tiers._counts.restored > 10
        assert tiers._counts.corrupt == 0
        assert (tiers._counts.disk_hits > 10) == bool(disk_bytes)
        tiers.close()


def test_fingerprints_tell_everything_apart_that_changes_a_block(model, tmp_path_factory):
    seen = set()
    kinds = [kind.values[0] for kind in KINDS if native_module() or "bits" not in kind.values[0]]
    for kind in kinds:
        copier = runner_of(model, **kind).copier()
        for dtype in ("int8", "int4"):
            seen.add(fingerprint_of(model, copier, dtype=dtype))
    assert len(seen) == 2 * (4 if native_module() else 2), (
        "int4 and int8 weights have one KV layout"
    )
    copier = runner_of(model, dtype=torch.float32).copier()
    assert fingerprint_of(model, copier, dtype="x") == fingerprint_of(model, copier, dtype="x")
    torch.manual_seed(1)
    reference = small_reference.__wrapped__("llama")
    with torch.no_grad():
        next(reference.parameters()).add_(0.5)
    changed = saved(reference, tmp_path_factory.mktemp("changed"))
    assert fingerprint_of(changed, copier, dtype="x") != fingerprint_of(model, copier, dtype="x")


def test_budgets_that_hold_no_block_are_refused(model):
    copier = runner_of(model, dtype=torch.float32).copier()
    for key in ("host_bytes", "disk_bytes"):
        sizes = {"host_bytes": 1 << 30, "disk_bytes": 1 << 30, key: copier.block_bytes - 1}
        with pytest.raises(SpecError, match=f"kv_tiers.{key} is .* one block of 16 tokens takes"):
            make_tiers(
                KvTierSettings(**sizes),
                copier,
                model=model,
                name="m",
                dtype="x",
                block_tokens=BLOCK,
            )


def test_a_disk_that_cannot_be_used_is_said_and_done_without(model, tmp_path, caplog):
    file = tmp_path / "file"
    file.write_text("in the way")
    settings = KvTierSettings(host_bytes=1 << 22, disk_bytes=1 << 22, disk_path=str(file))
    copier = runner_of(model, dtype=torch.float32).copier()
    tiers = make_tiers(settings, copier, model=model, name="m", dtype="x", block_tokens=BLOCK)
    assert tiers._io is None
    (warning,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "KV blocks are not kept on the disk" in warning.getMessage()


@pytest.mark.real_model
def test_gemma_is_restarted_and_remembers(gemma_path, tmp_path, monkeypatch):
    monkeypatch.setattr(KvTiers, "costs", lambda self: Costs(None))
    text = "A long beginning, that two starts of an engine have in common. " * 12
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    tiers = {"host_bytes": 1 << 26, "disk_bytes": 1 << 28, "disk_path": str(tmp_path)}
    options = {"kv_cache_tokens": 512, "progress": False, "threads": 1}
    found = []
    for survive in (True, True, False):
        kept = tiers | {"survive_restarts": survive}
        with Engine(gemma_path, kv_tiers=kept, **options) as engine:
            found += engine.generate(text, params, progress=False)
            if len(found) == 2:
                assert engine.stats().kv_disk_hits_total > 5
    assert len({tuple(completion.token_ids) for completion in found}) == 1
    cached = [completion.usage.cached_prompt_tokens for completion in found]
    assert cached[0] == cached[2] == 0
    assert cached[1] > 100


@pytest.mark.real_model
def test_tiers_without_a_prefix_cache_are_refused(gemma_path):
    settings = EngineSettings(
        prefix_cache=False,
        threads=1,
        kv_cache_tokens=64,
        kv_tiers=KvTierSettings(host_bytes=1 << 26),
    )
    with pytest.raises(SpecError, match="kv_tiers keep prefixes, but prefix_cache is off"):
        build_engine(open_model(gemma_path), settings, name="gemma")


def test_memory_for_the_host_counts(model):
    settings = EngineSettings(kv_tiers=KvTierSettings(host_bytes=8 << 30), dtype="float32")
    with pytest.raises(Exception, match=r"kv_tiers\.host_bytes"):
        build_engine(model, settings, name="m", available_bytes=lambda: 4 << 30)


def test_a_disk_without_a_host_is_refused():
    with pytest.raises(ValueError, match="disk_bytes needs host_bytes"):
        KvTierSettings(disk_bytes=1)
