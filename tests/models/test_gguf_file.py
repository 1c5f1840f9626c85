"""GGUF: what it says is what we read, and each way to break it is one clear sentence."""

import struct
import subprocess
import sys

import gguf
import numpy as np
import pytest
from checkpoints import HEAD_DIM, HEADS, KV_HEADS, VOCAB, metadata_of, tensors_of, write_gguf
from gguf.constants import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from tokenpath.models.architecture import RopeScaling
from tokenpath.models.gguf_file import read_gguf
from tokenpath.models.local import open_model
from tokenpath.models.weights import iter_tensors, read_tensor
from tokenpath.protocol.errors import ModelError, ModelFileError, ModelUnsupportedError

ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma3"]


def write(path, architecture="qwen2", *, tied=False, drop=(), **changes):
    """A sound GGUF, but for ``changes`` to its metadata and the keys or tensors dropped."""
    metadata = metadata_of(architecture) | {k.replace("__", "."): v for k, v in changes.items()}
    tensors = tensors_of(architecture, tied=tied)
    return write_gguf(
        path,
        architecture,
        {k: v for k, v in metadata.items() if k not in drop},
        {k: v for k, v in tensors.items() if k not in drop},
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_configuration(tmp_path, architecture):
    config = open_model(write(tmp_path / "m.gguf", architecture, tied=True)).config
    assert config.family == config.architecture == architecture
    assert (config.heads, config.kv_heads, config.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert (config.vocab_size, config.max_context_tokens) == (VOCAB, 512)
    assert config.rope_theta == 5000
    assert config.tie_embeddings
    assert config.attention_bias is (architecture == "qwen2")
    if architecture == "gemma3":
        assert config.activation == "gelu_tanh"
        assert config.sliding_window == 16
        assert config.layer_kinds == ("sliding", "sliding")
        assert config.rope_theta_local == 10_000


def test_gemma_layers_alternate_five_to_one_unless_told_otherwise(tmp_path):
    stated = {"gemma3__attention__sliding_window_pattern": 2}
    config = open_model(write(tmp_path / "m.gguf", "gemma3", **stated)).config
    assert config.layer_kinds == ("sliding", "full")
    stated = {"gemma3__attention__sliding_window_pattern": [False, True]}
    config = open_model(write(tmp_path / "n.gguf", "gemma3", **stated)).config
    assert config.layer_kinds == ("full", "sliding")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tensors_are_those_of_transformers(tmp_path, architecture):
    """Names, values and conventions, against the other reader of the same file."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    torch.set_num_threads(1)
    path = write(tmp_path / "m.gguf", architecture)
    config = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    loaded = load_gguf_checkpoint(path, return_tensors=True, model_to_load=skeleton)
    reference = loaded["tensors"]
    assert reference.keys() == skeleton.state_dict().keys()
    read = dict(iter_tensors(open_model(path)))
    assert read.keys() == reference.keys()
    for name, tensor in read.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, reference[name]), name


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "Q4_1", "Q5_0"])
def test_quantized_types(tmp_path, kind):
    tensors = tensors_of("qwen2")
    name = "blk.0.ffn_up.weight"
    path = write_gguf(
        tmp_path / "m.gguf",
        "qwen2",
        metadata_of("qwen2"),
        tensors,
        quantized={name: GGMLQuantizationType[kind]},
    )
    model = open_model(path)
    info = model.tensors["model.layers.0.mlp.up_proj.weight"]
    assert info.dtype == kind
    assert info.stored_bytes < tensors[name].nbytes
    found = read_tensor(model, "model.layers.0.mlp.up_proj.weight").numpy()
    assert found.dtype == np.float32
    step = {"F16": 1e-3, "BF16": 1e-2, "Q8_0": 0.02}.get(kind, 0.4)
    np.testing.assert_allclose(found, tensors[name], atol=step)


@pytest.mark.parametrize(
    ("drop", "named"),
    [
        ("blk.1.ffn_up.weight", "'blk.1.ffn_up.weight'"),
        ("blk.0.attn_q.bias", "'blk.0.attn_q.bias'"),
        ("token_embd.weight", "'token_embd.weight'"),
        ("qwen2.embedding_length", "'qwen2.embedding_length'"),
        ("qwen2.attention.layer_norm_rms_epsilon", "'qwen2.attention.layer_norm_rms_epsilon'"),
    ],
)
def test_what_is_missing_is_named(tmp_path, drop, named):
    with pytest.raises(ModelFileError, match="lacks the") as caught:
        open_model(write(tmp_path / "m.gguf", drop=(drop,)))
    assert named in caught.value.message
    assert "m.gguf" in caught.value.message


def test_wrong_shape_tells_both(tmp_path):
    with pytest.raises(ModelFileError) as caught:
        open_model(write(tmp_path / "m.gguf", qwen2__feed_forward_length=128))
    assert "blk.0.ffn_gate.weight" in caught.value.message
    assert "[96, 64]" in caught.value.message
    assert "[128, 64]" in caught.value.message


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"qwen2__block_count": 3}, ModelFileError, "blk.2.attn_norm.weight"),
        ({"qwen2__block_count": 1}, ModelUnsupportedError, "blk.1"),
        ({"qwen2__block_count": 4_000_000_000}, ModelFileError, "must be from 1 to 10000"),
        ({"qwen2__block_count": 0}, ModelFileError, "must be positive"),
        ({"qwen2__attention__head_count": 0}, ModelFileError, "must be positive"),
        ({"qwen2__attention__head_count_kv": 3}, ModelFileError, "evenly"),
        ({"qwen2__attention__value_length": 16}, ModelUnsupportedError, "values of 16"),
        ({"qwen2__rope__dimension_count": 16}, ModelUnsupportedError, "rotary embeddings of 16"),
        ({"qwen2__expert_count": 8}, ModelUnsupportedError, "mixture of experts"),
        ({"qwen2__context_length": "long"}, ModelFileError, "should be an integer"),
        ({"qwen2__rope__scaling__type": "longrope"}, ModelUnsupportedError, "none, linear, yarn"),
        ({"general__alignment": 48}, ModelFileError, "power of two"),
    ],
)
def test_contradictions(tmp_path, changes, error, words):
    with pytest.raises(error) as caught:
        open_model(write(tmp_path / "m.gguf", **changes))
    assert words in caught.value.message


def test_unknown_architecture_lists_the_known(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "mamba", {}, {})
    with pytest.raises(ModelUnsupportedError, match="gemma3, llama, qwen2, qwen3"):
        open_model(path)


def test_wrong_magic_empty_missing_and_foreign_files(tmp_path):
    path = tmp_path / "m.gguf"
    with pytest.raises(ModelFileError, match="does not exist"):
        open_model(path)
    path.write_bytes(b"")
    with pytest.raises(ModelFileError, match="empty"):
        open_model(path)
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        open_model(path)
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(ModelUnsupportedError, match="little-endian"):
        open_model(path)


def test_every_truncation_is_noticed(tmp_path):
    whole = write(tmp_path / "m.gguf", tied=True).read_bytes()
    cut = tmp_path / "cut.gguf"
    # Every place in the head, then some in the data, and the last byte.
    for length in [*range(1, 3000, 7), *range(3000, len(whole), 20_000), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelFileError):
            open_model(cut)


@pytest.fixture(scope="module")
def sound_head(tmp_path_factory):
    path = write(tmp_path_factory.mktemp("sound") / "m.gguf", tied=True)
    return path, path.read_bytes()


@given(st.lists(st.tuples(st.integers(0, 3500), st.integers(0, 255)), min_size=1, max_size=4))
def test_damage_to_the_head_is_never_a_surprise(sound_head, damage):
    """Flipped bytes either do not matter or end in one of our errors."""
    path, whole = sound_head
    broken = bytearray(whole)
    for position, value in damage:
        broken[position] = value
    target = path.with_name("broken.gguf")
    target.write_bytes(broken)
    try:
        open_model(target)
    except ModelError as error:
        assert str(target) in error.message


def test_arrays_are_checked_when_read(tmp_path):
    path = write(tmp_path / "m.gguf", some__words=["a", "é"], some__numbers=[1, 2, 3])
    file = read_gguf(path)
    assert file.array("some.words").strings() == ["a", "é"]
    assert file.array("some.numbers").numbers() == [1, 2, 3]
    with pytest.raises(ModelFileError, match="array of numbers"):
        file.array("some.words").numbers()
    with pytest.raises(ModelFileError, match="array of strings"):
        file.array("some.numbers").strings()
    with pytest.raises(ModelFileError, match="should be an array"):
        file.array("qwen2.block_count")


def test_shards(tmp_path):
    tensors = list(tensors_of("qwen2").items())
    parts = [tmp_path / f"m-{i:05}-of-00002.gguf" for i in (1, 2)]
    split = {"split.count": 2}
    write_gguf(parts[0], "qwen2", metadata_of("qwen2") | split, dict(tensors[:5]))
    with pytest.raises(ModelFileError, match=r"lacks its shard m-00002-of-00002\.gguf"):
        open_model(parts[0])
    write_gguf(parts[1], "qwen2", split, dict(tensors[5:]))
    model = open_model(tmp_path)
    assert model.path == parts[0]
    np.testing.assert_array_equal(
        read_tensor(model, "model.layers.1.mlp.down_proj.weight").numpy(),
        dict(tensors)["blk.1.ffn_down.weight"],
    )
    with pytest.raises(ModelFileError, match="open the first"):
        open_model(parts[1])


def test_folders(tmp_path):
    with pytest.raises(ModelFileError, match="holds no model"):
        open_model(tmp_path)
    path = write(tmp_path / "one.gguf")
    assert open_model(tmp_path).path == path
    assert open_model(tmp_path).name == tmp_path.name
    assert open_model(path).name == "one"
    assert open_model(path, name="mine").name == "mine"
    write(tmp_path / "two.gguf")
    with pytest.raises(ModelFileError, match=r"one\.gguf, two\.gguf"):
        open_model(tmp_path)


def llama3_factors(factor, theta=5000.0):
    half = HEAD_DIM // 2
    turns = 8192 * theta ** (-np.arange(half) / half) / (2 * np.pi)
    smooth = np.clip((turns - 1) / 3, 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def test_llama_3_scaling_is_recovered_from_its_tensor(tmp_path):
    def with_factors(name, factors):
        tensors = tensors_of("llama") | {"rope_freqs.weight": factors}
        return write_gguf(tmp_path / name, "llama", metadata_of("llama"), tensors)

    model = open_model(with_factors("m.gguf", llama3_factors(8.0)))
    assert model.config.rope_scaling == RopeScaling(kind="llama3", factor=8.0)
    assert not any("rope" in name for name in model.tensors)
    strange = llama3_factors(8.0)
    strange[3] *= 1.5
    with pytest.raises(ModelUnsupportedError, match="does not follow Llama 3"):
        open_model(with_factors("n.gguf", strange))
    with pytest.raises(ModelFileError, match=r"rope_freqs\.weight"):
        open_model(with_factors("o.gguf", strange[:5]))


def test_other_scalings(tmp_path):
    linear = {"qwen2__rope__scaling__type": "linear", "qwen2__rope__scaling__factor": 4.0}
    config = open_model(write(tmp_path / "m.gguf", **linear)).config
    assert config.rope_scaling == RopeScaling(kind="linear", factor=4.0)
    yarn = {
        "qwen2__rope__scaling__type": "yarn",
        "qwen2__rope__scaling__factor": 4.0,
        "qwen2__rope__scaling__original_context_length": 128,
    }
    scaling = open_model(write(tmp_path / "n.gguf", **yarn)).config.rope_scaling
    assert scaling == RopeScaling(kind="yarn", factor=4.0, original_context_tokens=128)


def test_ends_of_an_answer(tmp_path):
    tokens = {
        "tokenizer__ggml__tokens": ["a", "<|endoftext|>", "<|im_end|>", "<end_of_turn>"]
        + ["x"] * 316,
        "tokenizer__ggml__eos_token_id": 7,
    }
    base = open_model(write(tmp_path / "m.gguf", **tokens)).config
    assert base.eos_ids == (7, 1)
    chat = open_model(write(tmp_path / "n.gguf", **tokens, tokenizer__chat_template="{{ 1 }}"))
    assert chat.config.eos_ids == (7, 1, 2, 3)


def test_types_that_cannot_be_dequantized(tmp_path):
    name = "blk.0.attn_norm.weight"
    tensors = tensors_of("qwen2") | {name: np.zeros(64, np.int32)}
    model = open_model(write_gguf(tmp_path / "m.gguf", "qwen2", metadata_of("qwen2"), tensors))
    with pytest.raises(ModelUnsupportedError, match="I32"):
        read_tensor(model, "model.layers.0.input_layernorm.weight")


def test_a_file_that_shrinks_after_opening(tmp_path):
    path = write(tmp_path / "m.gguf")
    model = open_model(path)
    with path.open("r+b") as file:
        file.truncate(100_000)
    with pytest.raises(ModelFileError, match="truncated"):
        dict(iter_tensors(model))


def test_opening_imports_no_torch(tmp_path):
    path = write(tmp_path / "m.gguf")
    code = (
        "import sys; from pathlib import Path; from tokenpath.models.local import open_model; "
        f"open_model(Path({str(path)!r})); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_agrees_with_the_gguf_library(tmp_path):
    """Shapes, types and positions of every tensor, by the format's own reader."""
    path = write(tmp_path / "m.gguf", "gemma3")
    mine = read_gguf(path).tensors
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert mine.keys() == theirs.keys()
    for name, info in mine.items():
        assert info.shape == tuple(reversed(theirs[name].shape.tolist()))
        assert info.offset == theirs[name].data_offset
        assert info.stored_bytes == theirs[name].n_bytes
