"""A GGUF's metadata as a Hugging Face folder: the same architecture, tokenizer and template."""

import dataclasses
import json

import pytest
import transformers
from checkpoints import (
    CORPUS,
    VOCAB,
    byte_level_vocabulary,
    metadata_of,
    sentencepiece_vocabulary,
    tensors_of,
    write_gguf,
)

from tokenpath.models import hf_folder
from tokenpath.models.architecture import RopeScaling
from tokenpath.models.hf_config import hf_config
from tokenpath.models.hf_export import config_json, write_small_files
from tokenpath.models.local import open_model
from tokenpath.protocol.errors import ModelUnsupportedError


def opened(folder, architecture="qwen2", **metadata):
    keys = {key.replace("__", "."): value for key, value in metadata.items()}
    return open_model(
        write_gguf(
            folder / "m.gguf",
            architecture,
            metadata_of(architecture) | keys,
            tensors_of(architecture),
        )
    )


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_a_configuration_that_means_the_same(architecture, tmp_path):
    config = opened(tmp_path, architecture).config
    found = hf_config(config_json(config, tmp_path), tmp_path)
    same = {"architecture": "", "query_scale": None}
    assert dataclasses.replace(found, **same) == dataclasses.replace(config, **same)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_transformers_reads_it(architecture, tmp_path):
    config = opened(tmp_path, architecture).config
    (tmp_path / "config.json").write_text(json.dumps(config_json(config, tmp_path)))
    found = transformers.AutoConfig.from_pretrained(tmp_path)
    assert found.num_hidden_layers == config.layers
    assert found.head_dim == config.head_dim
    rope = found.rope_parameters
    if architecture == "gemma3":
        assert rope["sliding_attention"]["rope_theta"] == config.rope_theta_local
        rope = rope["full_attention"]
        assert found.layer_types == [f"{config.kind(i)}_attention" for i in range(config.layers)]
    assert rope["rope_theta"] == config.rope_theta


@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling(kind="linear", factor=4.0),
        RopeScaling(kind="yarn", factor=4.0, original_context_tokens=128, attention_factor=1.5),
        RopeScaling(kind="llama3", factor=8.0, low_freq_factor=2.0),
    ],
)
def test_scalings(scaling, tmp_path):
    config = dataclasses.replace(opened(tmp_path).config, rope_scaling=scaling)
    assert hf_config(config_json(config, tmp_path), tmp_path).rope_scaling == scaling


def test_what_no_config_says_is_refused(tmp_path):
    config = opened(tmp_path).config
    with pytest.raises(ModelUnsupportedError, match="output_bias is True"):
        config_json(dataclasses.replace(config, output_bias=True), tmp_path)
    with pytest.raises(ModelUnsupportedError, match="the family 'mamba'"):
        config_json(dataclasses.replace(config, family="mamba"), tmp_path)


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_the_tokenizer_and_the_template(kind, tmp_path):
    vocabulary = (
        byte_level_vocabulary(size=VOCAB - 2) if kind == "bytes" else sentencepiece_vocabulary()
    )
    count = len(vocabulary["tokenizer.ggml.tokens"])
    metadata = metadata_of("llama") | vocabulary | {"llama.vocab_size": max(VOCAB, count)}
    metadata["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0].content }} ü"
    tensors = tensors_of("llama")
    for name in ("token_embd.weight", "output.weight"):
        tensors[name] = tensors[name].repeat(2, 0)[: max(VOCAB, count)]
    model = open_model(write_gguf(tmp_path / "m.gguf", "llama", metadata, tensors))
    folder = tmp_path / "out"
    folder.mkdir()
    write_small_files(model.gguf, model.config, folder, tmp_path / "cache")
    written = hf_folder.load_tokenizer(folder)
    tokenizer = model.tokenizer(tmp_path / "cache")
    for text in CORPUS:
        assert written.encode(text).ids == tokenizer.encode(text)
    assert hf_folder.chat_template_source(folder) == metadata["tokenizer.chat_template"]
    assert hf_folder.template_tokens(folder) == model.template_tokens()
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs.encode(CORPUS[0]) == tokenizer.encode(CORPUS[0])
