"""Encoders on disk: what is read of their folders, and what is refused."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.engine.encoders import CLASSIFIERS, ENCODERS, made, saved, word_tokenizer

from tokenpath.models.input_tokenizer import InputTokenizer, fitted
from tokenpath.models.servable import open_servable, settle_task
from tokenpath.protocol.errors import (
    InvalidRequestError,
    ModelFileError,
    ModelUnsupportedError,
    SpecError,
)


@pytest.fixture
def folder(tmp_path):
    return saved(made(ENCODERS["bert"]), tmp_path)


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"hidden_act": "mish"}, ModelUnsupportedError, "hidden_act"),
        ({"position_embedding_type": "relative_key"}, ModelUnsupportedError, "absolute"),
        ({"is_decoder": True}, ModelUnsupportedError, "both ways"),
        ({"architectures": ["BertForTokenClassification"]}, ModelUnsupportedError, "head"),
        ({"quantization_config": {"quant_method": "gptq"}}, ModelUnsupportedError, "gptq"),
        ({"num_attention_heads": 5}, ModelFileError, "divided among 5 heads"),
        ({"hidden_size": "big"}, ModelFileError, "hidden_size"),
        ({"num_hidden_layers": 4}, ModelFileError, "lacks the tensor 'encoder.layer.3"),
        ({"num_hidden_layers": 2}, ModelUnsupportedError, "encoder.layer.2"),
        ({"intermediate_size": 40}, ModelFileError, r"shape \[48, 32\].*calls for \[40, 32\]"),
    ],
)
def test_what_does_not_fit_is_refused(folder, values, error, words):
    change(folder / "config.json", **values)
    with pytest.raises(error, match=words):
        open_servable(folder)


@pytest.mark.parametrize(
    ("modules", "pooling", "words"),
    [
        (["Pooling"], {"pooling_mode_max_tokens": True}, "max"),
        (["Pooling"], {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "pools"),
        (["Pooling", "Dense"], {"pooling_mode": "mean"}, "Dense"),
        (["Pooling"], {"pooling_mode": "mean", "include_prompt": False}, "prompt"),
    ],
)
def test_modules_that_are_not_computed_are_refused(tmp_path, modules, pooling, words):
    saved(made(ENCODERS["bert"]), tmp_path, *modules, **pooling)
    with pytest.raises(ModelUnsupportedError, match=words):
        open_servable(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"max_seq_length": 0}'])
def test_a_broken_side_file_is_named(folder, text):
    (folder / "sentence_bert_config.json").write_text(text)
    with pytest.raises(ModelFileError, match="sentence_bert_config"):
        open_servable(folder)


def test_old_names_prefixes_and_other_heads_are_understood(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    old = {
        "bert."
        + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in tensors.items()
    }
    old["cls.predictions.bias"] = torch.zeros(3)
    old["bert.embeddings.position_ids"] = torch.arange(64)[None]
    save_file(old, file)
    change(folder / "config.json", architectures=["BertForMaskedLM"])
    assert len(open_servable(folder).tensors) == len(
        [name for name in tensors if not name.startswith("pooler")]
    )


def test_tasks_go_by_the_head(tmp_path):
    found = {}
    for name, maker in {**CLASSIFIERS, "bert": ENCODERS["bert"]}.items():
        model = open_servable(saved(made(maker), tmp_path / name))
        found[name] = settle_task(model, "auto")
        assert settle_task(model, found[name]) == found[name]
        with pytest.raises(SpecError, match="task 'generate'"):
            settle_task(model, "generate")
    assert found == {
        "bert": "embed",
        "bert-1": "rerank",
        "bert-3": "classify",
        "xlm-roberta-1": "rerank",
    }


texts = st.lists(st.sampled_from(["the", "cat", "sea", "unknown"]), max_size=12).map(" ".join)


@given(texts, texts, st.integers(5, 20))
def test_cutting_is_that_of_the_library(first, second, keep):
    ours = InputTokenizer(word_tokenizer(), vocab_size=100)
    theirs = word_tokenizer()
    theirs.enable_truncation(keep)
    assert ours.single(first, keep=keep).token_ids == theirs.encode(first).ids
    pair, truth = ours.pair(first, second, keep=keep), theirs.encode(first, second)
    assert pair.token_ids == truth.ids
    assert [int(i >= pair.second) for i in range(len(pair.token_ids))] == truth.type_ids


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 60))
def test_two_lengths_fill_the_room(first, second, room):
    kept = fitted(first, second, room)
    assert sum(kept) == min(first + second, room)
    assert 0 <= kept[0] <= first and 0 <= kept[1] <= second


def test_tokens_without_a_vector_are_refused():
    with pytest.raises(InvalidRequestError, match="'water'"):
        InputTokenizer(word_tokenizer(), vocab_size=10).single("the water")
