"""Hugging Face folders: what transformers saves is what we read; lies and gaps are named."""

import json
import struct

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from tokenpath.models.architecture import RopeScaling
from tokenpath.models.hf_config import hf_config
from tokenpath.models.local import open_model
from tokenpath.models.safetensors_file import read_safetensors
from tokenpath.models.weights import iter_tensors, read_tensor
from tokenpath.protocol.errors import ModelError, ModelFileError, ModelUnsupportedError

torch.set_num_threads(1)

SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 700.0,
}
VARIANTS = {
    "llama": {},
    "llama-biased": {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    "mistral": {"sliding_window": 20},
    "mistral-full": {"sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2-sliding": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "qwen3": {},
    "qwen3-biased": {"attention_bias": True},
    "gemma3_text": {"sliding_window": 20, "query_pre_attn_scalar": 24},
}


def saved(folder, variant, dtype=torch.float32, **save):
    """A random model saved by transformers, and its state."""
    model_type = variant.partition("-")[0]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **(SMALL | VARIANTS[variant]))
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    model.save_pretrained(folder, **save)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
def test_tensors_and_configuration(tmp_path, variant):
    model = saved(tmp_path, variant)
    local = open_model(tmp_path)
    read = dict(iter_tensors(local))
    state = model.state_dict()
    tied = model.config.tie_word_embeddings
    assert read.keys() == state.keys() - ({"lm_head.weight"} if tied else set())
    for name, tensor in read.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, state[name]), name
    found, wanted = local.config, model.config
    assert found.tie_embeddings == tied
    assert found.heads == wanted.num_attention_heads
    assert found.kv_heads == wanted.num_key_value_heads
    assert found.head_dim == wanted.head_dim
    assert found.rms_eps == wanted.rms_norm_eps
    assert found.eos_ids == (2,)
    kinds = getattr(wanted, "layer_types", None)
    if variant == "mistral":
        kinds = ["sliding_attention"] * 3
    assert [found.kind(layer) + "_attention" for layer in range(3)] == (
        kinds or ["full_attention"] * 3
    )
    if "sliding" in found.layer_kinds:
        assert found.sliding_window == wanted.sliding_window
    rope = wanted.rope_parameters
    if variant == "gemma3_text":
        assert found.rope_theta == rope["full_attention"]["rope_theta"]
        assert found.rope_theta_local == rope["sliding_attention"]["rope_theta"]
        assert found.query_scale == 24**-0.5
    else:
        assert found.rope_theta == rope["rope_theta"]


def test_llama_3_scaling(tmp_path):
    saved(tmp_path, "llama-biased")
    assert open_model(tmp_path).config.rope_scaling == RopeScaling(
        kind="llama3", factor=8.0, original_context_tokens=64
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_stored_dtype_and_shards(tmp_path, dtype):
    model = saved(tmp_path, "qwen2", dtype, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    local = open_model(tmp_path)
    assert local.format == "safetensors"
    for name, tensor in iter_tensors(local):
        assert tensor.dtype == dtype
        assert torch.equal(tensor, model.state_dict()[name])
    # Without the index the files themselves say enough.
    (tmp_path / "model.safetensors.index.json").unlink()
    assert open_model(tmp_path).tensors == local.tensors


def test_missing_shard_and_lying_index(tmp_path):
    saved(tmp_path, "qwen2", max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    name, shard = next(iter(listed["weight_map"].items()))
    listed["weight_map"]["model.more.weight"] = shard
    index.write_text(json.dumps(listed))
    with pytest.raises(ModelFileError, match=r"lacks the tensor 'model\.more\.weight'"):
        open_model(tmp_path)
    listed["weight_map"] = {name: "../" + shard}
    index.write_text(json.dumps(listed))
    with pytest.raises(ModelFileError, match="not a file name in the same folder"):
        open_model(tmp_path)
    listed["weight_map"] = {name: shard}
    index.write_text(json.dumps(listed))
    (tmp_path / shard).unlink()
    with pytest.raises(ModelFileError, match=f"lacks the shard '{shard}'"):
        open_model(tmp_path)


OLD_GEMMA = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}
"""The configuration of Gemma 3 4B as published in March 2025, but for its vision part."""


def test_gemma_4b_as_first_published(tmp_path):
    config = hf_config(OLD_GEMMA, tmp_path / "config.json")
    assert config.family == "gemma3"
    assert (config.heads, config.kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.max_context_tokens) == (262208, 131072)
    assert config.rope_scaling == RopeScaling(kind="linear", factor=8.0)
    assert (config.rope_theta, config.rope_theta_local) == (1_000_000.0, 10_000.0)
    assert config.layer_kinds[:7] == (*["sliding"] * 5, "full", "sliding")
    assert (config.sliding_window, config.query_scale) == (1024, 1 / 16)
    assert config.tie_embeddings
    assert config.eos_ids == (1, 106)


def test_old_and_new_keys_agree_with_transformers(tmp_path):
    """The same model in both spellings, judged by transformers' own standardization."""
    old = SMALL | {
        "model_type": "llama",
        "rope_theta": 700.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "torch_dtype": "bfloat16",
    }
    new = SMALL | {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 700.0},
        "dtype": "bfloat16",
    }
    found = hf_config(old, tmp_path)
    assert found == hf_config(new, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(old))
    reference = transformers.AutoConfig.from_pretrained(tmp_path)
    assert found.rope_theta == reference.rope_parameters["rope_theta"]
    assert found.rope_scaling == RopeScaling(kind="linear", factor=2.0)


def test_defaults_are_those_of_transformers(tmp_path):
    """Published configurations leave out what equals their class's default."""
    for model_type in ("llama", "mistral", "qwen2", "qwen3", "gemma3_text"):
        found = hf_config({"model_type": model_type}, tmp_path)
        wanted = transformers.AutoConfig.for_model(model_type)
        assert found.vocab_size == wanted.vocab_size
        assert found.hidden_size == wanted.hidden_size
        assert found.intermediate_size == wanted.intermediate_size
        assert found.layers == wanted.num_hidden_layers
        assert found.heads == wanted.num_attention_heads
        assert found.kv_heads == wanted.num_key_value_heads
        assert found.max_context_tokens == wanted.max_position_embeddings
        assert found.tie_embeddings == wanted.tie_word_embeddings
        assert found.bos_id == wanted.bos_token_id
        assert found.eos_ids == (() if wanted.eos_token_id is None else (wanted.eos_token_id,))
        rope = wanted.rope_parameters
        assert found.rope_theta == rope.get("full_attention", rope)["rope_theta"]
        if model_type != "qwen2":
            assert found.head_dim == wanted.head_dim


def test_qwen_slides_only_when_told_to(tmp_path):
    stated = SMALL | {"model_type": "qwen2", "sliding_window": 20, "max_window_layers": 0}
    assert hf_config(stated, tmp_path).sliding_window is None
    assert hf_config(stated, tmp_path).layer_kinds == ()
    sliding = hf_config(stated | {"use_sliding_window": True}, tmp_path)
    assert (sliding.sliding_window, sliding.layer_kinds) == (20, ("sliding",) * 3)
    none_below = hf_config(stated | {"use_sliding_window": True, "max_window_layers": 3}, tmp_path)
    assert (none_below.sliding_window, none_below.layer_kinds) == (None, ())


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model_type": "mamba"}, ModelUnsupportedError, "gemma3, gemma3_text, llama"),
        ({"model_type": None}, ModelUnsupportedError, "supported"),
        ({"hidden_size": "32"}, ModelFileError, "'hidden_size' is '32'"),
        ({"hidden_size": True}, ModelFileError, "'hidden_size' is True"),
        ({"num_attention_heads": 0}, ModelFileError, "positive"),
        ({"num_key_value_heads": 3}, ModelFileError, "evenly"),
        ({"rms_norm_eps": None}, ModelFileError, "'rms_norm_eps'"),
        ({"hidden_act": "relu"}, ModelUnsupportedError, "silu"),
        ({"eos_token_id": "x"}, ModelFileError, "'x'"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2}},
            ModelUnsupportedError,
            "linear, llama3",
        ),
        ({"rope_scaling": {"type": "linear"}}, ModelFileError, "'factor'"),
        ({"rope_scaling": "linear"}, ModelFileError, "JSON object"),
        ({"partial_rotary_factor": 0.5}, ModelUnsupportedError, "0.5"),
        ({"quantization_config": {"quant_method": "hqq"}}, ModelUnsupportedError, "'hqq'"),
        ({"vocab_size": 101}, ModelFileError, "[101, 32]"),
        ({"num_hidden_layers": 4}, ModelFileError, "model.layers.3."),
        ({"num_hidden_layers": 2}, ModelUnsupportedError, "model.layers.2."),
        ({"attention_bias": True}, ModelFileError, "q_proj.bias"),
        ({"num_hidden_layers": 10**30}, ModelFileError, "must be from 1 to 10000"),
        (
            {"model_type": "mistral", "num_hidden_layers": 10**30},
            ModelFileError,
            "must be from 1 to 10000",
        ),
        ({"rms_norm_eps": 10**400}, ModelFileError, "a number of usual size"),
        (
            {
                "model_type": "gemma3_text",
                "hidden_activation": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": 0,
            },
            ModelFileError,
            "must be positive",
        ),
    ],
)
def test_bad_configurations(tmp_path_factory, changes, error, words, llama_folder):
    folder = tmp_path_factory.mktemp("bad")
    config = json.loads((llama_folder / "config.json").read_text())
    if "rope_scaling" in changes:
        del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config | changes))
    (folder / "model.safetensors").symlink_to(llama_folder / "model.safetensors")
    with pytest.raises(error) as caught:
        open_model(folder)
    assert words in caught.value.message
    assert str(folder) in caught.value.message


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    saved(folder, "llama")
    return folder


def test_files_that_are_not_json_or_missing(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelFileError, match="not valid JSON"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelFileError, match="JSON object"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"model_type": "llama"}))
    with pytest.raises(ModelFileError, match=r"no \*\.safetensors"):
        open_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("generation_config.json", "[" * 100_000),
        ("tokenizer_config.json", '{"a":' * 100_000),
    ],
)
def test_json_that_is_nested_too_deeply(tmp_path, llama_folder, name, text):
    for file in llama_folder.iterdir():
        if file.name != name:
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelFileError, match="too deeply"):
        open_model(tmp_path)


def test_side_files_of_odd_shapes(tmp_path, llama_folder):
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).symlink_to(llama_folder / file)
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": 5}')
    assert open_model(tmp_path).chat_template() is None
    template = '{"chat_template": [{"name": ["default"], "template": "x"}]}'
    (tmp_path / "tokenizer_config.json").write_text(template)
    assert open_model(tmp_path).chat_template() is None


def safetensors(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"{nonsense", "not JSON"),
        ([], "not a JSON object"),
        ({"a": entry(offsets=(0, 12))}, "needs 8 bytes, but its offsets span 12"),
        ({"a": entry(shape=(3,), offsets=(0, 12))}, "truncated"),
        ({"a": entry(offsets=(8, 0))}, "two data_offsets"),
        ({"a": entry(offsets=(0,))}, "two data_offsets"),
        ({"a": entry(dtype="Q4")}, "known dtype"),
        ({"a": entry(dtype=["F32"])}, "known dtype"),
        ({"a": entry(shape=(-2,))}, "a shape"),
        ({"a": 3}, "known dtype"),
        ({"a": entry(), "b": entry("U8", (4,), (4, 8))}, "'a' and 'b' overlap"),
    ],
)
def test_lying_headers(tmp_path, header, words):
    with pytest.raises(ModelFileError) as caught:
        read_safetensors(safetensors(tmp_path / "m.safetensors", header, bytes(8)))
    assert words in caught.value.message


def test_header_length_beyond_the_file(tmp_path):
    path = tmp_path / "m.safetensors"
    for data in (b"", b"abc", struct.pack("<Q", 1 << 40), struct.pack("<Q", 100) + b"{}"):
        path.write_bytes(data)
        with pytest.raises(ModelFileError, match="truncated"):
            read_safetensors(path)


@given(st.binary(max_size=200))
def test_any_header_is_read_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    try:
        assert isinstance(read_safetensors(safetensors(path, data, bytes(64))), dict)
    except ModelError as error:
        assert str(path) in error.message


def test_multi_modal_names_and_unreadable_types(tmp_path, llama_folder):
    """A gemma3 checkpoint with a vision tower: only the language model is read."""
    text_folder, folder = tmp_path / "text", tmp_path / "whole"
    folder.mkdir()
    model = saved(text_folder, "gemma3_text")
    config = json.loads((text_folder / "config.json").read_text())
    whole = {"model_type": "gemma3", "text_config": config, "eos_token_id": [2, 5]}
    (folder / "config.json").write_text(json.dumps(whole))
    state = {
        name: tensor.numpy()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    from safetensors.numpy import save_file

    for prefix in ("language_model.model.", "model.language_model."):
        named = {name.replace("model.", prefix, 1): value for name, value in state.items()}
        vision = {"vision_tower.x.weight": np.zeros(3, np.float32)}
        save_file(named | vision, folder / "model.safetensors")
        local = open_model(folder)
        assert local.tensors.keys() == state.keys()
        assert local.config.eos_ids == (2, 5)
        name = "model.layers.0.self_attn.q_norm.weight"
        assert torch.equal(read_tensor(local, name), model.state_dict()[name])
    save_file(state | {"model.norm.weight": np.zeros(32, np.int32)}, folder / "model.safetensors")
    with pytest.raises(ModelUnsupportedError, match="stored as I32"):
        open_model(folder)


def test_end_tokens_from_everywhere(tmp_path):
    saved(tmp_path, "qwen2")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert open_model(tmp_path).config.eos_ids == (7, 2)
    decoder = {
        "50": {"content": "<|im_end|>", "special": True},
        "51": {"content": "<|endoftext|>", "special": True},
        "52": {"content": "<end_of_turn>", "special": False},
        "fifty": {"content": "<|eot_id|>", "special": True},
        "53": "<|eot_id|>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    assert open_model(tmp_path).config.eos_ids == (7, 2, 51)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert open_model(tmp_path).config.eos_ids == (7, 2, 51, 50)
    # Without them there, tokenizer.json has the same. The vocabulary ends before 100.
    (tmp_path / "tokenizer_config.json").unlink()
    added = [
        {"id": 60, "content": "<|eot_id|>", "special": True},
        {"id": 100, "content": "<|im_end|>", "special": True},
        "nonsense",
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert open_model(tmp_path).config.eos_ids == (7, 2, 60)


def test_old_buffers_and_tied_copies_are_ignored(tmp_path, llama_folder):
    from safetensors.numpy import load_file, save_file

    state = load_file(llama_folder / "model.safetensors")
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    save_file(state, tmp_path / "model.safetensors")
    config = json.loads((llama_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = open_model(tmp_path).tensors
    assert "lm_head.weight" not in tensors
    assert not any("inv_freq" in name for name in tensors)
