"""`models quantize` without its command: what is written is what was rounded, whole or not at all."""

from __future__ import annotations

import errno
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_checkpoints import change_config, write
from reference import VOCAB, reference_logits, saved, small_reference
from safetensors import safe_open
from test_quantized_formats import FORMATS, TOKENS, expected_logits, logits_of

from tokenpath.engine.calibration import channel_activity
from tokenpath.models import disk
from tokenpath.models.local import open_model
from tokenpath.models.quantized import folder as folders
from tokenpath.models.quantized.feedback import round_with_feedback
from tokenpath.models.quantized.folder import write_folder
from tokenpath.models.quantized.recipe import entries, recipe_for, tensors
from tokenpath.models.quantized.rounding import SHRINKS, round_groups
from tokenpath.models.quantized.safetensors_writer import write_safetensors
from tokenpath.models.weights import iter_tensors, read_tensor
from tokenpath.protocol.errors import ModelError, ModelFileError

KINDS = [("int8", True), ("int4", True), ("int4", False)]


def quantized(model, out, target="int4", *, symmetric=False, importance=None):
    recipe = recipe_for(model, target, symmetric=symmetric)
    write_folder(
        model, recipe, importance or {}, out, cache=out.parent, progress=lambda _fraction: None
    )
    return open_model(out)


def drawn(seed, rows, columns):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator)


@pytest.mark.parametrize(("target", "symmetric"), KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen2-tied", "gemma3"])
def test_logits_are_those_of_the_rounded_weights(family, target, symmetric, tmp_path):
    reference = small_reference(family)
    model = saved(reference, tmp_path / "source")
    written = quantized(model, tmp_path / "out", target, symmetric=symmetric)
    assert written.tensors.keys() == model.tensors.keys()
    meant = small_reference.__wrapped__(family)
    with torch.no_grad():
        for name, tensor in iter_tensors(written):
            kept = meant.state_dict()[name]
            assert (tensor - kept).abs().max() < 0.2 * kept.abs().max()
            kept.copy_(tensor)
    torch.testing.assert_close(
        logits_of(tmp_path / "out"), expected_logits(meant), atol=1e-4, rtol=1e-5
    )


def test_it_is_read_by_the_safetensors_library(tmp_path):
    model = saved(small_reference("llama"), tmp_path / "source")
    recipe = recipe_for(model, "int4", symmetric=False)
    planned = entries(model, recipe)
    made = list(tensors(model, recipe, {}, lambda _fraction: None))
    write_safetensors(tmp_path, planned, iter(made), shard_bytes=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert index["metadata"]["total_size"] == sum(entry.bytes for entry in planned)
    for entry, tensor in zip(planned, made, strict=True):
        with safe_open(tmp_path / index["weight_map"][entry.name], "pt") as file:
            assert torch.equal(file.get_tensor(entry.name), tensor)


def test_a_quantized_source_is_quantized_again(tmp_path):
    """From GPTQ with its old side file to compressed-tensors, with nothing of GPTQ left."""
    write(small_reference("llama"), tmp_path / "source", FORMATS["gptq-8bit"])
    (tmp_path / "source/quantize_config.json").write_text("{}")
    (tmp_path / "source/chat_template.jinja").write_text("{{ messages }}")
    written = quantized(open_model(tmp_path / "source"), tmp_path / "out")
    assert sorted(path.name for path in written.path.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
    ]
    config = json.loads((written.path / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert config["dtype"] == "bfloat16"
    assert written.tensors["model.layers.0.mlp.up_proj.weight"].dtype == "packed 4-bit"


def test_half_precision_stays(tmp_path):
    reference = small_reference("llama")
    small = type(reference)(reference.config).half()
    model = saved(small, tmp_path / "source")
    written = quantized(model, tmp_path / "out")
    assert written.tensors["model.embed_tokens.weight"].dtype == "F16"
    assert json.loads((written.path / "config.json").read_text())["dtype"] == "float16"


def test_rows_of_no_whole_groups_keep_their_numbers(tmp_path):
    """SmolLM's hidden size of 48 is one and a half groups."""
    model = saved(small_reference("smollm-tied"), tmp_path / "source")
    written = quantized(model, tmp_path / "out")
    kinds = {name: info.dtype for name, info in written.tensors.items()}
    assert kinds["model.layers.0.mlp.up_proj.weight"] == "BF16"
    assert kinds["model.layers.0.mlp.down_proj.weight"] == "packed 4-bit"
    ignored = json.loads((written.path / "config.json").read_text())["quantization_config"][
        "ignore"
    ]
    assert "model.layers.0.mlp.up_proj" in ignored
    logits_of(tmp_path / "out")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.ENOSPC, "full")])
def test_nothing_is_left_of_what_was_not_finished(error, tmp_path, monkeypatch):
    model = saved(small_reference("llama"), tmp_path / "source")

    def failing(folder, planned, made):
        (folder / "model.safetensors").write_bytes(b"half")
        next(iter(made))
        raise error

    monkeypatch.setattr(folders, "write_safetensors", failing)
    with pytest.raises(ModelError if isinstance(error, OSError) else KeyboardInterrupt):
        quantized(model, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_disk_that_is_too_full_is_told_before_anything_is_written(tmp_path, monkeypatch):
    model = saved(small_reference("llama"), tmp_path / "source")
    usage = disk.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _folder: usage)
    with pytest.raises(ModelError, match=r"too full for .*out: .* are needed and 1\.0 kB are free"):
        quantized(model, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_what_is_there_is_not_overwritten(tmp_path):
    model = saved(small_reference("llama"), tmp_path / "source")
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match="exists already"):
        quantized(model, tmp_path / "out")
    with pytest.raises(ModelError, match=r"there is no folder .*nowhere"):
        quantized(model, tmp_path / "nowhere/out")


def test_weights_that_are_no_numbers_are_named(tmp_path):
    reference = small_reference.__wrapped__("llama")
    with torch.no_grad():
        reference.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
    model = saved(reference, tmp_path / "source")
    with pytest.raises(ModelFileError, match=r"layers\.1\.mlp\.up_proj\.weight.*not finite"):
        quantized(model, tmp_path / "out")


def test_a_multimodal_source_is_written_as_its_language_model(tmp_path):
    model = saved(small_reference("gemma3"), tmp_path / "source")
    inner = json.loads((tmp_path / "source/config.json").read_text())
    outer = {"model_type": "gemma3", "text_config": inner, "architectures": ["Gemma3"]}
    (tmp_path / "source/config.json").write_text(json.dumps(outer))
    written = quantized(open_model(tmp_path / "source"), tmp_path / "out", "int8")
    assert json.loads((written.path / "config.json").read_text())["model_type"] == "gemma3_text"
    assert written.config.layer_kinds == model.config.layer_kinds


def squared_error(codes, weight, importance):
    return float(((codes.dequantize() - weight).square() * importance).sum())


@given(
    st.integers(0, 2**32),
    st.integers(1, 6),
    st.sampled_from([4, 8]),
    st.booleans(),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
@settings(max_examples=40)
def test_searched_scales_are_never_worse_than_the_range(seed, rows, bits, symmetric, dtype):
    weight = drawn(seed, rows, 96) * torch.logspace(-6, 1, rows)[:, None]
    importance = drawn(seed + 1, 1, 96)[0].square()
    found = round_groups(
        weight,
        bits=bits,
        group=32,
        symmetric=symmetric,
        scale_dtype=dtype,
        importance=importance,
    )
    assert found.scale.dtype == dtype
    assert int(found.codes.max()) < 1 << bits
    counted = importance.clamp(min=float(importance.mean()) * 1e-3 + 1e-30)
    counted = counted * (weight.square().mean(1, keepdim=True).sqrt() + weight.abs())
    low, high = (f(weight.view(rows, 3, 32), -1) for f in (torch.amin, torch.amax))
    low, high = low.clamp(max=0), high.clamp(min=0)
    top, middle = (1 << bits) - 1, float(1 << (bits - 1))
    wide = torch.maximum(-low, high) / (top - middle) if symmetric else (high - low) / top
    wide = wide.clamp(min=torch.finfo(dtype).tiny).to(dtype).float()[:, :, None]
    zero = torch.full_like(wide, middle) if symmetric else (-low[:, :, None] / wide).round()
    zero = zero.clamp(0, top)
    lowest = 1 if symmetric and bits == 8 else 0
    groups = weight.view(rows, 3, 32)
    plain = ((groups / wide + zero).round().clamp(lowest, top) - zero) * wide
    worst = float(((plain.flatten(1) - weight).square() * counted).sum())
    assert squared_error(found, weight, counted) <= worst * (1 + 1e-4) + 1e-30


def test_channels_that_matter_are_kept_better():
    weight = drawn(1, 64, 128)
    importance = torch.ones(128)
    importance[::32] = 1000.0
    options = {"bits": 4, "group": 32, "symmetric": False, "scale_dtype": torch.bfloat16}
    plain = round_groups(weight, **options)
    weighted = round_groups(weight, importance=importance, **options)
    errors = [(c.dequantize() - weight).square()[:, ::32].sum() for c in (plain, weighted)]
    assert errors[1] < 0.5 * errors[0]
    assert SHRINKS[0] == 1.0


@pytest.mark.parametrize("symmetric", [True, False])
def test_feedback_lowers_the_error_of_the_product(symmetric):
    """With inputs that go together, as activations do, errors can be made up for."""
    weight = drawn(1, 48, 96)
    inputs = drawn(2, 400, 24) @ drawn(3, 24, 96) + 0.1 * drawn(4, 400, 96)
    products = inputs.t() @ inputs / len(inputs)
    options = {
        "bits": 4,
        "group": 32,
        "symmetric": symmetric,
        "scale_dtype": torch.bfloat16,
    }
    plain = round_groups(weight, importance=products.diagonal(), **options)
    mended = round_with_feedback(weight, products, **options)
    assert mended.codes.shape == weight.shape
    assert int(mended.codes.max()) <= 15
    errors = [
        float(((found.dequantize() - weight) @ inputs.t()).square().sum())
        for found in (plain, mended)
    ]
    assert errors[1] < 0.5 * errors[0]


def test_feedback_needs_products_that_are_numbers():
    products = torch.eye(32)
    products[3, 3] = torch.nan
    with pytest.raises(ValueError, match="no finite products"):
        round_with_feedback(
            drawn(1, 4, 32),
            products,
            bits=4,
            group=32,
            symmetric=False,
            scale_dtype=torch.bfloat16,
        )


def test_zeros_and_single_values_come_back():
    weight = torch.zeros(4, 64)
    weight[1] = 0.75
    weight[2, 5] = -3.0
    found = round_groups(
        weight, bits=4, group=32, symmetric=False, scale_dtype=torch.bfloat16
    ).dequantize()
    torch.testing.assert_close(found, weight, rtol=0.01, atol=0)


def test_strengths_are_the_mean_squares_of_what_layers_are_given(tmp_path):
    """Against hooks on transformers' own modules."""
    reference = small_reference("gemma3")
    model = saved(reference, tmp_path)
    windows = [TOKENS[:40], TOKENS[40:90]]
    found = channel_activity(model, windows, dtype=torch.float32, widest=64)
    seen = {}

    def note(name):
        def hook(_module, inputs):
            seen.setdefault(name, []).append(inputs[0][0].float())

        return hook

    linears = {
        name: module
        for name, module in reference.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    hooks = [m.register_forward_pre_hook(note(name)) for name, m in linears.items()]
    for window in windows:
        reference_logits(reference, window)
    for hook in hooks:
        hook.remove()
    assert found.keys() == linears.keys()
    for name, activity in found.items():
        inputs = torch.cat(seen[name])
        expected = inputs.square().mean(0)
        if activity.dim() == 2:
            expected = inputs.t() @ inputs / len(inputs)
        torch.testing.assert_close(activity, expected, rtol=1e-3, atol=1e-4)
    assert {activity.dim() for activity in found.values()} == {1, 2}


def test_a_calibrated_model_answers_more_like_its_source(tmp_path):
    """On a text like the one it was calibrated with, by the divergence of its predictions."""
    reference = small_reference("llama")
    model = saved(reference, tmp_path / "source")
    generator = torch.Generator().manual_seed(2)
    texts = torch.randint(VOCAB, (6, 200), generator=generator).tolist()
    strengths, products = (
        channel_activity(model, texts[:4], dtype=torch.float32, widest=widest)
        for widest in (0, 4096)
    )
    quantized(model, tmp_path / "plain")
    quantized(model, tmp_path / "weighted", importance=strengths)
    quantized(model, tmp_path / "feedback", importance=products)

    def distance(folder):
        meant = small_reference.__wrapped__("llama")
        written = open_model(folder)
        with torch.no_grad():
            for name in written.tensors:
                meant.state_dict()[name].copy_(read_tensor(written, name))
        total = 0.0
        for text in texts[4:]:
            wanted = reference_logits(reference, text).log_softmax(-1)
            found = reference_logits(meant, text).log_softmax(-1)
            total += float((wanted.exp() * (wanted - found)).sum())
        return total

    plain, weighted, feedback = (
        distance(tmp_path / name) for name in ("plain", "weighted", "feedback")
    )
    assert feedback < weighted < plain


def test_a_config_of_another_quantization_does_not_survive(tmp_path):
    model = saved(small_reference("llama"), tmp_path / "source")
    change_config(tmp_path / "source", compression_config=None)
    written = quantized(model, tmp_path / "out")
    assert "compression_config" not in json.loads((written.path / "config.json").read_text())
