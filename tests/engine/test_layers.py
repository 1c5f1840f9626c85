"""The parts by themselves, against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from tokenpath.engine.batch import build_batch
from tokenpath.engine.kernels.balance import key_balance
from tokenpath.engine.kernels.base import AttentionSpec
from tokenpath.engine.kernels.torch_backend import TorchBackend
from tokenpath.engine.kernels.torch_kv import read_pool
from tokenpath.engine.kv_cache import KvLayer, allocate_kv_cache, kv_blocks_for
from tokenpath.engine.precision import settle_dtype, settle_kv_dtype
from tokenpath.engine.rotary import rotaries
from tokenpath.models.architecture import ModelConfig, RopeScaling
from tokenpath.policy.sequence import Chunk, Sequence, StepPlan
from tokenpath.protocol.errors import SpecError

BACKEND = TorchBackend(torch.float32, "cpu")
BLOCK = 4


def config(**changes) -> ModelConfig:
    fields = {
        "family": "llama",
        "architecture": "LlamaForCausalLM",
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "max_context_tokens": 64,
        "rms_eps": 1e-6,
        "rope_theta": 10_000.0,
    }
    return ModelConfig(**{**fields, **changes})


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_norm_over_one_and_over_two_dimensions():
    x = torch.randn(5, 3, 8)
    for weight in (torch.randn(8), torch.randn(3, 8)):
        expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight
        torch.testing.assert_close(BACKEND.norm(x, weight, 1e-3), expected)


def test_norm_of_bfloat16_is_rounded_once():
    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(64)
    expected = BACKEND.norm(x.float(), weight, 1e-6).bfloat16()
    assert torch.equal(TorchBackend(torch.bfloat16, "cpu").norm(x, weight, 1e-6), expected)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_activation(activation):
    gate, up = torch.randn(2, 7, 10)
    if activation == "silu":
        active = gate / (1 + (-gate).exp())
    else:
        cubic = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        active = 0.5 * gate * (1 + cubic.tanh())
    gate_up = torch.cat((gate, up), dim=-1)
    torch.testing.assert_close(BACKEND.gated_input(gate_up, activation), active * up)


def test_rotation_turns_each_plane_by_its_angle():
    rotary = rotaries(config(), "cpu")["full"]
    x = torch.randn(3, 2, 8)
    positions = torch.tensor([0, 1, 50])
    turned = BACKEND.rotate(x, rotary.angles(positions))
    planes = torch.complex(x[..., :4], x[..., 4:])
    angle = positions[:, None, None] * 10_000.0 ** (-torch.arange(4) / 4)
    expected = planes * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(turned, torch.cat((expected.real, expected.imag), dim=-1))


def test_rotated_products_depend_on_distance_only():
    rotary = rotaries(config(head_dim=16), "cpu")["full"]
    query, key = torch.randn(2, 1, 1, 16)

    def product(q: int, k: int) -> float:
        return float(
            (
                BACKEND.rotate(query, rotary.angles(torch.tensor([q])))
                * BACKEND.rotate(key, rotary.angles(torch.tensor([k])))
            ).sum()
        )

    assert product(9, 4) == pytest.approx(product(105, 100), abs=1e-5)
    assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-3)


def test_sliding_layers_share_the_scaling_unless_they_have_a_base_of_their_own():
    scaling = RopeScaling(kind="linear", factor=4.0)
    shared = rotaries(config(rope_scaling=scaling), "cpu")
    assert shared["full"] is shared["sliding"]
    own = rotaries(config(rope_scaling=scaling, rope_theta_local=100.0), "cpu")
    assert own["full"].inverse_frequencies[0] == 0.25
    assert own["sliding"].inverse_frequencies.tolist() == pytest.approx(
        [100.0 ** (-i / 4) for i in range(4)]
    )


def test_yarn_magnitude_is_the_models_own_if_it_names_one():
    def magnitude(**changes) -> float:
        scaling = RopeScaling(kind="yarn", factor=4.0, original_context_tokens=64, **changes)
        return rotaries(config(rope_scaling=scaling), "cpu")["full"].magnitude

    assert magnitude() == pytest.approx(0.1 * math.log(4) + 1)
    assert magnitude(attention_factor=0.7) == 0.7


SPECS = {
    "plain": AttentionSpec(heads=4, kv_heads=2, head_dim=8, scale=0.4),
    "window": AttentionSpec(heads=4, kv_heads=2, head_dim=8, scale=0.4, window=5),
    "softcap": AttentionSpec(heads=4, kv_heads=1, head_dim=8, scale=0.9, softcap=1.5),
    "both": AttentionSpec(heads=4, kv_heads=4, head_dim=8, scale=0.9, window=3, softcap=1.5),
}


def ragged_plan(chunks: list[tuple[int, int]]) -> StepPlan:
    """Chunks of (start, length), each of a sequence of its own with scattered blocks."""
    planned = []
    free = torch.randperm(200).tolist()
    for start, length in chunks:
        count = -(-(start + length) // BLOCK)
        sequence = Sequence("", [0] * (start + length), 1, max_tokens=1)
        sequence.blocks = [free.pop() for _ in range(count)]
        planned.append(Chunk(sequence, start, length))
    return StepPlan(tuple(planned))


def attend_slowly(spec: AttentionSpec, query, keys, values, position: int) -> torch.Tensor:
    """One row: [heads, head_dim] over [context, kv_heads, head_dim], straight from the formula."""
    first = 0 if spec.window is None else max(0, position - spec.window + 1)
    rows = []
    for head in range(spec.heads):
        kv = head // (spec.heads // spec.kv_heads)
        products = keys[first : position + 1, kv] @ query[head] * spec.scale
        if spec.softcap is not None:
            products = spec.softcap * (products / spec.softcap).tanh()
        rows.append(products.softmax(0) @ values[first : position + 1, kv])
    return torch.cat(rows)


@pytest.mark.parametrize("name", sorted(SPECS))
def test_ragged_paged_attention(name):
    """Decodes of very different lengths, prefill from the start and from the middle, together."""
    spec = SPECS[name]
    plan = ragged_plan([(0, 9), (40, 1), (3, 1), (0, 1), (11, 6), (38, 1), (2, 2), (150, 1)])
    batch = build_batch(plan, BLOCK)
    shape = (200, BLOCK, spec.kv_heads, spec.head_dim)
    # What no sequence has written is NaN: reading any of it, even masked, would show.
    kv = KvLayer(torch.full(shape, torch.nan), torch.full(shape, torch.nan))
    whole = {}
    for chunk in plan.chunks:
        context = chunk.start + chunk.length
        keys, values = torch.randn(2, context, spec.kv_heads, spec.head_dim)
        blocks = torch.tensor(chunk.sequence.blocks).repeat_interleave(BLOCK)[:context]
        slots = blocks * BLOCK + torch.arange(context) % BLOCK
        BACKEND.write_kv(kv, keys, values, slots)
        for position, at in enumerate(slots.tolist()):
            whole[at] = (keys, values, position)
    queries = torch.randn(plan.tokens, spec.heads, spec.head_dim)
    attended = BACKEND.plan_attention(batch, {spec})[spec](queries, kv)
    for row, at in enumerate(batch.slots.tolist()):
        torch.testing.assert_close(attended[row], attend_slowly(spec, queries[row], *whole[at]))


def test_blocks_by_bytes_and_by_tokens():
    small = config()
    per_token = 2 * 2 * 2 * 8 * 4
    blocks = kv_blocks_for(small, "float32", block_tokens=16, kv_cache_bytes=per_token * 16 * 7 + 5)
    assert blocks == 7
    by_tokens = kv_blocks_for(
        small, "float32", block_tokens=16, kv_cache_bytes=1, kv_cache_tokens=33
    )
    assert by_tokens == 3
    with pytest.raises(SpecError, match="one block of 16 tokens takes 4096 bytes"):
        kv_blocks_for(small, "float32", block_tokens=16, kv_cache_bytes=4095)
    with pytest.raises(SpecError, match="max_context_tokens is 100, but the KV cache holds 96"):
        kv_blocks_for(
            small,
            "float32",
            block_tokens=16,
            kv_cache_bytes=1,
            kv_cache_tokens=90,
            max_context_tokens=100,
        )
    # In int8 a head of 8 dimensions has a scale of 4 bytes beside its 8 codes.
    assert kv_blocks_for(small, "int8", block_tokens=16, kv_cache_bytes=2 * 2 * 2 * 12 * 16) == 1
    with pytest.raises(SpecError, match="one block of 16 tokens takes 1536 bytes"):
        kv_blocks_for(small, "int8", block_tokens=16, kv_cache_bytes=1535)


def test_what_auto_means_for_kv():
    assert settle_kv_dtype("auto", "float32") == "float32"
    assert settle_kv_dtype("auto", "int8") == "bfloat16"
    assert settle_kv_dtype("int8", "float32") == "int8"
    with pytest.raises(SpecError, match="for dtype 'float32' use 'auto' or 'int8'"):
        settle_kv_dtype("bfloat16", "float32")


def test_kv_in_int8_is_rounded_to_nearest_for_each_token_and_head():
    cache = allocate_kv_cache(config(), num_blocks=3, block_tokens=4, dtype="int8", device="cpu")
    kv = cache.layers[0]
    heads = torch.randn(5, 2, 8) * torch.tensor([1.0, 100.0])[:, None]
    slots = torch.tensor([11, 0, 7, 3, 4])
    BACKEND.write_kv(kv, heads, -heads, slots)
    for pool, scales, expected in (
        (kv.keys, kv.key_scales, heads),
        (kv.values, kv.value_scales, -heads),
    ):
        found = read_pool(pool, scales, slots, torch.float32)
        half_a_step = expected.abs().amax(-1, keepdim=True) / 254
        assert ((found - expected).abs() <= 1.01 * half_a_step).all()


@pytest.mark.parametrize("by", ["bias", "norm"])
def test_balance_keeps_products_and_evens_out_keys(by):
    """A channel that is always large does not coarsen the others."""
    spec = AttentionSpec(heads=4, kv_heads=2, head_dim=8, scale=1.0)
    large = torch.ones(4 + 2 * 2, 8)
    large[4, 3] = 300.0
    given = {"bias": None, "norm": None}
    given[by] = large.flatten() if by == "bias" else large[:6]
    factors = key_balance(spec, **given)
    assert factors.shape == (6, 8)
    torch.testing.assert_close(factors[:4], 1 / factors[4:].repeat_interleave(2, dim=0))
    keys = large[4:6] * factors[4:]
    assert keys.amax() < 3 * keys.amax(-1).amin()
    assert key_balance(spec, bias=None, norm=None) is None


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx512_bf16": True, "amx_bf16": False}, "bfloat16"),
        ({"avx512_bf16": False, "amx_bf16": True}, "bfloat16"),
        ({"avx512_bf16": False, "amx_bf16": False}, "float32"),
        ({}, "float32"),
    ],
)
def test_auto_dtype_asks_the_processor(monkeypatch, capabilities, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert settle_dtype("auto", native=False) == expected
    assert settle_dtype("auto", native=True) == "int8"
    assert settle_dtype("auto", "meta", native=True) == "float32"
    for name in ("float32", "bfloat16", "int8", "int4"):
        assert settle_dtype(name, native=True) == name
