"""Quantized checkpoints: our logits are transformers' with the weights that the format means."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from driver import Driver
from quantized_checkpoints import (
    Format,
    awq,
    change_config,
    compressed,
    float8,
    gptq,
    int8,
    packed,
    write,
)
from reference import VOCAB, reference_logits, saved, small_reference
from safetensors.torch import load_file, save_file
from test_native import needs_native, reference_of

from tokenpath.engine.kernels.quantize import take_int4
from tokenpath.engine.packed_cache import identity_of
from tokenpath.engine.runner import ModelRunner
from tokenpath.models.local import open_model
from tokenpath.models.show import describe
from tokenpath.models.weights import iter_tensors, open_matrix, read_tensor
from tokenpath.protocol.errors import ModelFileError, ModelUnsupportedError

TOKENS = torch.randint(VOCAB, (90,), generator=torch.Generator().manual_seed(5)).tolist()


def gptq_format(bits, group, *, symmetric=True, ordered=False, version=1, **config):
    return Format(
        {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group,
            "sym": symmetric,
            "desc_act": ordered,
            **({"checkpoint_format": "gptq_v2"} if version == 2 else {}),
            **config,
        },
        gptq(bits, group, symmetric=symmetric, ordered=ordered, version=version),
        skipped=("lm_head",),
    )


def awq_format(group, *, zero_point=True, **config):
    names = {"bits": 4, "group_size": group, "zero_point": zero_point, "version": "gemm"}
    quantize = awq(group, zero_point=zero_point)
    return Format({"quant_method": "awq", **(config or names)}, quantize, skipped=("lm_head",))


def packed_format(bits, group, *, symmetric=True, ordered=False, plain_zeros=False, **more):
    return compressed(
        packed(bits, group, symmetric=symmetric, ordered=ordered, plain_zeros=plain_zeros),
        form="pack-quantized",
        weights={
            "num_bits": bits,
            "symmetric": symmetric,
            "strategy": "channel" if group is None else "group",
            "group_size": group,
            **({"actorder": "group"} if ordered else {}),
        },
        **more,
    )


def fp8_format(block, *, suffix="weight_scale_inv", dtype=torch.float32):
    return Format(
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            **({"weight_block_size": list(block)} if block and block[1] else {}),
        },
        float8(block, suffix=suffix, dtype=dtype),
        skipped=("lm_head",),
    )


def ct_fp8_format(block, strategy, **weights):
    return compressed(
        float8(block, suffix="weight_scale", dtype=torch.bfloat16),
        form="float-quantized",
        weights={"type": "float", "strategy": strategy, **weights},
    )


FORMATS = {
    **{f"gptq-{b}bit": gptq_format(b, 32) for b in (2, 3, 4, 8)},
    **{f"gptq-{b}bit-asym": gptq_format(b, 32, symmetric=False) for b in (2, 3, 4, 8)},
    "gptq-desc-act": gptq_format(4, 32, symmetric=False, ordered=True),
    "gptq-3bit-desc-act": gptq_format(3, 32, ordered=True),
    "gptq-one-group": gptq_format(4, -1, symmetric=False),
    "gptq-uneven-groups": gptq_format(4, 40),
    "gptq-v2": gptq_format(4, 32, symmetric=False, version=2),
    "gptq-v2-3bit": gptq_format(3, 32, symmetric=False, version=2),
    "awq": awq_format(32),
    "awq-one-group": awq_format(-1),
    "awq-old-names": awq_format(32, w_bit=4, q_group_size=32, version="GEMM"),
    "awq-no-zeros": awq_format(32, zero_point=False),
    "ct-w8a8": compressed(int8(), form="int-quantized", weights={"strategy": "channel"}),
    "ct-w8a8-asym": compressed(
        int8(symmetric=False),
        form="int-quantized",
        weights={"strategy": "channel", "symmetric": False},
    ),
    "ct-int8-groups": compressed(
        int8(32), form="naive-quantized", weights={"strategy": "group", "group_size": 32}
    ),
    "ct-w4a16": packed_format(4, 32),
    "ct-w4a16-asym": packed_format(4, 32, symmetric=False),
    "ct-w4a16-plain-zeros": packed_format(4, 32, symmetric=False, plain_zeros=True),
    "ct-w4a16-actorder": packed_format(4, 32, symmetric=False, ordered=True),
    "ct-w4a16-channel": packed_format(4, None),
    **{f"ct-w{b}a16-asym": packed_format(b, 32, symmetric=False) for b in (2, 3, 5, 6, 7, 8)},
    "ct-ignored": packed_format(4, 32, ignore=["lm_head", "re:.*down_proj"]),
    "ct-fp8-channel": ct_fp8_format((1, 0), "channel"),
    "ct-fp8-tensor": ct_fp8_format(None, "tensor"),
    "ct-fp8-block": ct_fp8_format((32, 32), "block", block_structure=[32, 32]),
    "ct-fp8-old-block": ct_fp8_format((48, 40), "block", block_structure="48x40"),
    "fp8-block": fp8_format((32, 32)),
    "fp8-uneven-block": fp8_format((40, 48), dtype=torch.bfloat16),
    "fp8-channel": fp8_format((1, 0), suffix="weight_scale"),
    "fp8-tensor": fp8_format(None, suffix="weight_scale"),
}


def logits_of(folder, **settings):
    runner = ModelRunner(
        open_model(folder),
        dtype=settings.pop("dtype", torch.float32),
        device="cpu",
        num_blocks=16,
        block_tokens=16,
        **settings,
    )
    driver = Driver(runner)
    starts = [driver.sequence(str(n), TOKENS[:n]) for n in (1, 40, 90)]
    found = driver.generate(starts, new_tokens=1, chunk=64)
    return torch.stack([found[s.request_id][0] for s in starts])


def expected_logits(model):
    return reference_logits(model, TOKENS)[[0, 39, 89]]


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_weights_that_are_meant(name, tmp_path):
    meant = write(small_reference("llama"), tmp_path, FORMATS[name])
    for key, tensor in iter_tensors(open_model(tmp_path)):
        torch.testing.assert_close(tensor, meant.state_dict()[key], rtol=0, atol=1e-7)
    torch.testing.assert_close(logits_of(tmp_path), expected_logits(meant), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("family", ["qwen2-tied", "qwen3", "gemma3"])
@pytest.mark.parametrize("name", ["gptq-4bit", "awq", "ct-w4a16-asym", "fp8-block"])
def test_every_family(family, name, tmp_path):
    meant = write(small_reference(family), tmp_path, FORMATS[name])
    torch.testing.assert_close(logits_of(tmp_path), expected_logits(meant), atol=1e-4, rtol=1e-5)


def test_several_groups_by_name_pattern_and_class(tmp_path):
    """The closest match counts: a name before a pattern before a class."""
    first = "model.layers.0.mlp.down_proj"

    def quantize(module, weight):
        if module == first:
            return int8()(module, weight)
        if "self_attn" in module:
            return packed(3, 32, symmetric=False)(module, weight)
        return packed(4, 32, symmetric=True)(module, weight)

    def group(targets, **weights):
        return {"targets": targets, "weights": {"type": "int", **weights}}

    config = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "ignore": ["lm_head"],
        "config_groups": {
            "a": group(["Linear"], num_bits=4, group_size=32),
            "b": group(
                ["re:.*self_attn.*"], num_bits=3, group_size=32, symmetric=False, strategy="group"
            ),
            "c": group([first], num_bits=8, strategy="channel"),
        },
    }
    form = Format(config, quantize, skipped=("lm_head",))
    meant = write(small_reference("llama"), tmp_path, form)
    torch.testing.assert_close(logits_of(tmp_path), expected_logits(meant), atol=1e-4, rtol=1e-5)


def test_a_scheme_by_its_name_alone(tmp_path):
    form = dataclasses.replace(
        FORMATS["ct-w8a8"],
        config={
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {"W8A8": ["Linear"]},
        },
    )
    meant = write(small_reference("llama"), tmp_path, form)
    torch.testing.assert_close(logits_of(tmp_path), expected_logits(meant), atol=1e-4, rtol=1e-5)


def test_gptq_settings_of_single_modules(tmp_path):
    """GPTQModel's ``dynamic``: the first pattern that matches a module changes its settings."""

    def quantize(module, weight):
        eight = ".mlp." in module
        own = gptq(8 if eight else 4, 32, symmetric=not eight, ordered=False, version=1)
        return own(module, weight)

    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "dynamic": {r"+:.*\.mlp\..*": {"bits": 8, "sym": False}, r"-:.*nothing.*": {}},
    }
    form = Format(config, quantize, skipped=("lm_head",))
    meant = write(small_reference("llama"), tmp_path, form)
    torch.testing.assert_close(logits_of(tmp_path), expected_logits(meant), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("file", "name"), [("quantize_config.json", "gptq-4bit"), ("quant_config.json", "awq")]
)
def test_old_folders_have_a_file_of_their_own(tmp_path, file, name):
    meant = write(small_reference("llama"), tmp_path, FORMATS[name])
    config = json.loads((tmp_path / "config.json").read_text())
    settings = config.pop("quantization_config")
    settings.pop("quant_method")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / file).write_text(json.dumps(settings))
    torch.testing.assert_close(logits_of(tmp_path), expected_logits(meant), atol=1e-4, rtol=1e-5)


def test_zero_biases_of_old_quantizers_are_none(tmp_path):
    write(small_reference("llama"), tmp_path, FORMATS["gptq-4bit"])
    name = "model.layers.1.mlp.up_proj.bias"

    def with_bias(value):
        tensors = load_file(tmp_path / "model.safetensors")
        save_file(tensors | {name: torch.full((96,), value)}, tmp_path / "model.safetensors")

    with_bias(0.0)
    assert name not in open_model(tmp_path).tensors
    with_bias(0.5)
    with pytest.raises(ModelUnsupportedError, match=r"up_proj\.bias"):
        open_model(tmp_path)


def test_it_is_described_by_its_types(tmp_path):
    write(small_reference("llama"), tmp_path, FORMATS["gptq-3bit"])
    found = describe(open_model(tmp_path))
    assert found.parameters == sum(p.numel() for p in small_reference("llama").parameters())
    types = {kind for group in found.groups for kind in group.types}
    assert types == {"GPTQ 3-bit", "F32"}
    file_bytes = (tmp_path / "model.safetensors").stat().st_size
    assert 0 < file_bytes - found.stored_bytes < 20_000


def test_rows_are_read_as_the_whole(tmp_path):
    """However rows are cut, also within a word of AWQ's."""
    for number, name in enumerate(
        ["gptq-3bit-desc-act", "awq", "ct-w3a16-asym", "fp8-uneven-block"]
    ):
        folder = tmp_path / str(number)
        write(small_reference("llama"), folder, FORMATS[name])
        model = open_model(folder)
        key = "model.layers.0.mlp.gate_proj.weight"
        whole = read_tensor(model, key)
        matrix = open_matrix(model, key)
        for begin, end in [(0, 96), (0, 1), (5, 29), (31, 33), (95, 96)]:
            assert torch.equal(torch.from_numpy(matrix.floats(begin, end)), whole[begin:end])


def test_identity_of_packed_weights_has_all_parts_in_it(tmp_path):
    write(small_reference("llama"), tmp_path, FORMATS["gptq-4bit-asym"])
    before = identity_of(open_model(tmp_path), "int8", 1)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    change_config(tmp_path, quantization_config=config | {"checkpoint_format": "gptq_v2"})
    assert identity_of(open_model(tmp_path), "int8", 1) != before


@pytest.mark.parametrize(
    ("name", "bits"),
    [("gptq-4bit-asym", 4), ("awq", 4), ("ct-w4a16", 4), ("ct-w4a16-channel", 4), ("gptq-3bit", 3)],
)
def test_four_bits_are_taken_over_as_they_are(name, bits, tmp_path):
    """Codes stay; scales are rounded to 8 bits. Rounding codes again would cost far more."""
    meant = write(small_reference("llama"), tmp_path, FORMATS[name])
    model = open_model(tmp_path)
    key = "model.layers.1.mlp.up_proj.weight"
    held = open_matrix(model, key).code_rows(0, 96)
    weight = take_int4(held.codes, held.scale, held.zero).dequantize()
    step = held.scale.max()
    error = (weight - meant.state_dict()[key]).abs().max()
    assert error < step * (1 << bits) / 300


@pytest.mark.parametrize("name", ["gptq-desc-act", "gptq-8bit", "ct-w8a8", "fp8-block"])
def test_other_forms_are_rounded(name, tmp_path):
    write(small_reference("llama"), tmp_path, FORMATS[name])
    matrix = open_matrix(open_model(tmp_path), "model.layers.0.self_attn.o_proj.weight")
    assert matrix.code_rows(0, 64) is None


def native_logits(folder, bits):
    return logits_of(folder, dtype=torch.bfloat16, bits=bits)


@needs_native
@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("gptq-4bit-asym", 8),
        ("awq", 8),
        ("ct-w4a16", 8),
        ("ct-w8a8", 8),
        ("ct-w8a8", 4),
        ("fp8-block", 8),
        ("fp8-block", 4),
        ("gptq-desc-act", 4),
    ],
)
def test_the_kernels_have_the_weights_that_are_meant(name, bits, tmp_path):
    """The same bits as from a folder that has these weights in float32."""
    meant = write(reference_of("llama"), tmp_path / "quantized", FORMATS[name])
    saved(meant, tmp_path / "floats")
    quantized, floats = (native_logits(tmp_path / part, bits) for part in ("quantized", "floats"))
    assert torch.equal(quantized, floats)


@needs_native
@pytest.mark.parametrize("name", ["gptq-4bit-asym", "awq", "ct-w4a16", "gptq-3bit"])
def test_codes_that_are_taken_over_cost_less_than_rounding_again(name, tmp_path):
    """Most where the codes do not reach both ends of their range, as symmetric ones do not."""
    meant = write(reference_of("llama"), tmp_path / "quantized", FORMATS[name])
    saved(meant, tmp_path / "floats")
    expected = expected_logits(meant)
    taken, again = (
        torch.nn.functional.cosine_similarity(native_logits(tmp_path / part, 4), expected).min()
        for part in ("quantized", "floats")
    )
    symmetric = name in {"ct-w4a16", "gptq-3bit"}
    assert 1 - taken < (0.5 if symmetric else 1.0) * (1 - again)


@pytest.fixture
def broken(tmp_path):
    """Writes a format with tensors and settings changed, and opens and loads it."""

    def make(name, *, tensors=None, config=None):
        write(small_reference("llama"), tmp_path, FORMATS[name])
        path = tmp_path / "model.safetensors"
        if tensors is not None:
            stored = load_file(path)
            tensors(stored)
            save_file(stored, path)
        if config is not None:
            settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
            change_config(tmp_path, quantization_config=settings | config)
        dict(iter_tensors(open_model(tmp_path)))

    return make


UP = "model.layers.0.mlp.up_proj"


def without(name):
    return lambda tensors: tensors.pop(name)


def changed(name, change):
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("gptq-4bit", without(f"{UP}.scales"), rf"lacks the tensor '{UP}\.scales'"),
        ("gptq-4bit-asym", without(f"{UP}.qzeros"), rf"lacks the tensor '{UP}\.qzeros'"),
        ("gptq-desc-act", without(f"{UP}.g_idx"), rf"lacks the tensor '{UP}\.g_idx'"),
        ("gptq-4bit", without(f"{UP}.qweight"), r"belongs to quantized weights that are not there"),
        (
            "gptq-4bit",
            changed(f"{UP}.qweight", lambda t: t[:, :90]),
            rf"{UP}\.scales' has shape \[2, 96\], but groups of 32 along 64 inputs call for \[2, 90\]",
        ),
        (
            "gptq-4bit",
            changed(f"{UP}.qweight", lambda t: t[:6]),
            rf"{UP}\.g_idx' has shape \[64\].*call for \[48\]",
        ),
        ("gptq-3bit", changed(f"{UP}.qweight", lambda t: t[:5]), "whole codes of 3 bits"),
        ("gptq-4bit", changed(f"{UP}.g_idx", lambda t: t + 1), "not among its 2 groups"),
        ("gptq-4bit", changed(f"{UP}.scales", lambda t: t.long()), "stored as I64, but should be"),
        ("awq", without(f"{UP}.qzeros"), rf"lacks the tensor '{UP}\.qzeros'"),
        ("awq", changed(f"{UP}.scales", lambda t: t[:1]), r"call for \[2, 96\]"),
        ("awq", changed(f"{UP}.qweight", lambda t: t[:32]), r"call for \[1, 96\]"),
        ("ct-w4a16", without(f"{UP}.weight_scale"), rf"lacks the tensor '{UP}\.weight_scale'"),
        (
            "ct-w4a16-asym",
            without(f"{UP}.weight_zero_point"),
            rf"lacks the tensor '{UP}\.weight_zero_point'",
        ),
        (
            "ct-w4a16",
            changed(f"{UP}.weight_shape", lambda t: t * 2),
            r"weight_packed' has shape \[96, 8\], but a matrix of \[192, 128\]",
        ),
        ("ct-w4a16", changed(f"{UP}.weight_shape", lambda t: t * 0), "a shape is positive"),
        ("ct-w8a8", without(f"{UP}.weight_scale"), rf"lacks the tensor '{UP}\.weight_scale'"),
        ("ct-w8a8", changed(f"{UP}.weight", lambda t: t.flatten()), "should be a matrix"),
        ("ct-fp8-block", changed(f"{UP}.weight_scale", lambda t: t[:2]), r"call for \[3, 2\]"),
        ("fp8-block", without(f"{UP}.weight_scale_inv"), rf"lacks the tensor '{UP}\.weight_scale'"),
        ("fp8-block", changed(f"{UP}.weight_scale_inv", lambda t: t[:, :1]), r"call for \[3, 2\]"),
        (
            "awq",
            changed(f"{UP}.qweight", lambda t: t[:, :6]),
            r"scales' has shape \[2, 96\].*call for \[2, 48\]",
        ),
    ],
)
def test_parts_that_do_not_fit_are_named(name, change, sentence, broken):
    with pytest.raises((ModelFileError, ModelUnsupportedError), match=sentence):
        broken(name, tensors=change)


@pytest.mark.parametrize(
    ("name", "config", "kind", "sentence"),
    [
        ("gptq-4bit", {"bits": 5}, ModelFileError, r"quantization_config is wrong.*bits"),
        ("gptq-4bit", {"bits": "4"}, ModelFileError, r"quantization_config is wrong.*bits"),
        ("gptq-4bit", {"group_size": 0}, ModelFileError, "group_size is 0"),
        ("gptq-4bit", {"group_size": 128}, ModelFileError, r"groups of 128 along 96 inputs"),
        ("gptq-4bit", {"checkpoint_format": "marlin"}, ModelUnsupportedError, "'marlin'"),
        ("gptq-4bit", {"is_marlin_format": True}, ModelUnsupportedError, "'marlin'"),
        ("gptq-4bit", {"dynamic": {"+:(": {}}}, ModelFileError, "no regular expression"),
        ("gptq-4bit", {"quant_method": "hqq"}, ModelUnsupportedError, "'hqq'; supported: awq"),
        ("gptq-4bit", {"quant_method": ["x"]}, ModelUnsupportedError, "supported: awq"),
        ("awq", {"version": "gemv"}, ModelUnsupportedError, "'gemv'"),
        ("awq", {"bits": 3}, ModelUnsupportedError, "of 3 bits"),
        ("awq", {"group_size": -2}, ModelFileError, "group_size is -2"),
        ("ct-w4a16", {"format": "marlin-24"}, ModelUnsupportedError, "'marlin-24'"),
        ("ct-w4a16", {"format": "nvfp4-pack-quantized"}, ModelUnsupportedError, "'nvfp4"),
        (
            "ct-w4a16",
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            ModelUnsupportedError,
            "sparse weights",
        ),
        (
            "ct-w4a16",
            {"transform_config": {"config_groups": {"R1": {}}}},
            ModelUnsupportedError,
            "rotated",
        ),
        ("ct-w4a16", {"config_groups": {}}, ModelFileError, "no group of 'config_groups'"),
        ("ct-w4a16", {"ignore": ["Linear"]}, ModelFileError, "no group of 'config_groups'"),
        ("ct-w4a16", {"ignore": ["re:("]}, ModelFileError, "no regular expression"),
        ("ct-w4a16", {"config_groups": {"W1A1": ["Linear"]}}, ModelUnsupportedError, "'W1A1'"),
        (
            "ct-w4a16",
            {"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 9}}}},
            ModelUnsupportedError,
            "9 bits",
        ),
        (
            "ct-w4a16",
            {
                "config_groups": {
                    "a": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group"}}
                }
            },
            ModelFileError,
            "group_size of",
        ),
        (
            "ct-fp8-block",
            {
                "config_groups": {
                    "a": {
                        "targets": ["Linear"],
                        "weights": {"type": "float", "strategy": "block", "block_structure": [1]},
                    }
                }
            },
            ModelFileError,
            "block_structure of",
        ),
        (
            "ct-fp8-channel",
            {"config_groups": {"a": {"targets": ["Linear"], "weights": {"strategy": "channel"}}}},
            ModelFileError,
            "stored as F8_E4M3, but its config group says int of 8 bits",
        ),
        ("fp8-block", {"weight_block_size": [128]}, ModelFileError, "two positive numbers"),
        ("fp8-block", {"weight_block_size": [64, 0]}, ModelFileError, "two positive numbers"),
        ("fp8-block", {"weight_block_size": "128x128"}, ModelFileError, "weight_block_size"),
    ],
)
def test_settings_that_do_not_fit_are_named(name, config, kind, sentence, broken):
    with pytest.raises(kind, match=sentence):
        broken(name, config=config)
