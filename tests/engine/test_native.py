"""The native kernels compute what plain torch computes, and the same bits in any company."""

from __future__ import annotations

import pytest
import torch
from driver import Driver
from reference import SMALL_MODELS, saved, small_reference

from tokenpath import Engine, SamplingParams
from tokenpath.engine.kernels.native_module import VARIABLE, chosen_kernels, native_module
from tokenpath.engine.kernels.native_program import obstacle
from tokenpath.engine.kernels.quantize import BLOCK, RUN, quantize_rows, to_int4, to_int8
from tokenpath.engine.runner import ModelRunner
from tokenpath.models.local import LocalModel, open_model
from tokenpath.protocol.errors import SpecError

VOCAB = 256
PROMPTS = (1, 2, 15, 16, 17, 40, 63, 64, 65, 130, 300)
"""Tokens; the last one's keys are attended to in two parts, which threads may share."""
OF_ROUNDING = {8: 1.0, 4: 0.3}
"""How far the kernels may be from torch, as a part of what rounding the weights has changed. They
keep keys, values and attention's weights in bfloat16, and a last bit there moves the 8-bit rounding
of activations."""

needs_native = pytest.mark.skipif(native_module() is None, reason="no C++ compiler when installed")
KERNELS = () if native_module() is None else native_module().usable()
FAMILIES = ("llama", "llama-bias", "mistral-sliding", "qwen2-tied", "qwen3-32", "gemma3-32")


NUMBERS = [(8, "bfloat16"), (4, "bfloat16"), (8, "int8")]
"""Bits of weights, and the type of keys and values."""


def model_of(family: str, tmp_path_factory) -> LocalModel:
    return saved(reference_of(family), tmp_path_factory.mktemp(family))


def reference_of(family: str):
    """The small models, with heads of 32 dimensions, which is the least that the kernels take."""
    name = f"native-{family}"
    if name not in SMALL_MODELS:
        base = SMALL_MODELS[family.removesuffix("-32")]()
        config = base.config
        config.head_dim = 32
        config.final_logit_softcapping = getattr(config, "final_logit_softcapping", None)
        SMALL_MODELS[name] = lambda: type(base)(config)
    return small_reference(name)


@pytest.fixture(params=FAMILIES, scope="module")
def model(request, tmp_path_factory) -> LocalModel:
    return model_of(request.param, tmp_path_factory)


def runner(
    model: LocalModel, bits: int | None, *, dtype=torch.bfloat16, kv_dtype=None, threads=2
) -> ModelRunner:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return ModelRunner(
            model,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device="cpu",
            num_blocks=160,
            block_tokens=16,
            bits=bits,
        )
    finally:
        torch.set_num_threads(before)


def prompts(driver: Driver) -> list:
    generator = torch.Generator().manual_seed(3)
    return [
        driver.sequence(str(n), torch.randint(VOCAB, (n,), generator=generator).tolist())
        for n in PROMPTS
    ]


@needs_native
@pytest.mark.parametrize(("bits", "kv_dtype"), NUMBERS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_logits_agree_with_torch(model, kernels, bits, kv_dtype, monkeypatch):
    monkeypatch.setenv(VARIABLE, kernels)
    native = Driver(runner(model, bits, kv_dtype=kv_dtype))
    in_torch = None if kv_dtype == "bfloat16" else kv_dtype
    plain = Driver(runner(model, bits, dtype=torch.float32, kv_dtype=in_torch))
    exact = Driver(runner(model, None, dtype=torch.float32))
    apart, rounded = [], []
    for prompt in prompts(native):
        logits = {}
        for name, driver in (("native", native), ("plain", plain), ("exact", exact)):
            sequence = driver.sequence(name, prompt.token_ids)
            logits |= driver.generate([sequence], new_tokens=1, chunk=512)
        apart.append((logits["native"] - logits["plain"]).square().mean())
        rounded.append((logits["plain"] - logits["exact"]).square().mean())
    assert sum(apart) < OF_ROUNDING[bits] ** 2 * sum(rounded)


@needs_native
@pytest.mark.parametrize(("bits", "kv_dtype"), NUMBERS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_the_same_bits_in_any_company(model, kernels, bits, kv_dtype, monkeypatch):
    monkeypatch.setenv(VARIABLE, kernels)
    together = Driver(runner(model, bits, kv_dtype=kv_dtype))
    batched = together.generate(prompts(together), new_tokens=5, chunk=512, stagger=1)
    for chunk, threads in ((1, 1), (7, 2), (512, 3)):
        alone = Driver(runner(model, bits, kv_dtype=kv_dtype, threads=threads))
        for sequence in prompts(alone)[-3:]:
            found = alone.generate([sequence], new_tokens=5, chunk=chunk)
            assert torch.equal(found[sequence.request_id], batched[sequence.request_id])
            alone.blocks.free.extend(sequence.blocks)


def test_torch_is_chosen_by_name(model, monkeypatch):
    monkeypatch.setenv(VARIABLE, "torch")
    assert chosen_kernels() is None


def test_unknown_kernels_are_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "mmx")
    with pytest.raises(SpecError, match="'mmx', but this machine offers: auto, torch"):
        chosen_kernels()


def test_a_model_that_does_not_fit_the_kernels_says_why(model, tmp_path_factory):
    assert obstacle(model.config, 16) is None
    assert "block_tokens is 8" in obstacle(model.config, 8)
    odd = saved(small_reference("qwen3"), tmp_path_factory.mktemp("odd"))
    assert "head size 40 is no multiple of 32" in obstacle(odd.config, 16)


def test_int8_is_nearest():
    weight = torch.randn(70, 96)
    rounded = to_int8(weight)
    error = (rounded.dequantize() - weight).abs()
    assert (error <= rounded.scale[:, None] * 0.501).all()


def test_a_row_with_nan_is_nan():
    rows = torch.randn(3, 32)
    rows[1, 7] = torch.nan
    _, scale = quantize_rows(rows)
    assert scale.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("columns", [32, 96, 256, 640])
@pytest.mark.parametrize("size", [1e-4, 1.0, 100.0])
def test_int4_is_within_half_a_step(columns, size):
    """A step is a 15th of a group's reach, zero included, and what rounding up its scale and its
    minimum to 255ths of the block's largest adds."""
    fading = torch.logspace(-1, 0, columns // 32).repeat_interleave(32)
    weight = torch.randn(70, columns) * size * fading
    groups = weight.view(70, -1, 32)
    reach = groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)
    step = (reach + 4 * weight.abs().amax() / 255) / 15 + 2**-23
    error = (to_int4(weight).dequantize() - weight).abs().view_as(groups).amax(-1)
    assert (error <= 0.51 * step).all()


@needs_native
def test_python_and_the_module_cut_weights_alike():
    native = native_module()
    assert (native.RUN, native.BLOCK) == (RUN, BLOCK)


@needs_native
@pytest.mark.real_model
def test_gemma_in_int8_writes_the_same_alone_and_in_a_batch(gemma_path):
    texts = [
        "The capital of France is",
        "def fibonacci(n):\n",
        "Once upon a time",
        "1, 1, 2, 3, 5,",
    ]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    settings = {"kv_cache_tokens": 2048, "prefix_cache": False}
    with Engine(gemma_path, dtype="int8", progress=False, **settings) as engine:
        assert engine.card.dtype == "int8"
        together = [c.token_ids for c in engine.generate(texts, params, progress=False)]
        for text, expected in zip(texts, together, strict=True):
            (alone,) = engine.generate(text, params, progress=False)
            assert alone.token_ids == expected
    assert open_model(gemma_path).tokenizer().decode(together[0]).startswith(" ")
