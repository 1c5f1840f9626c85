"""Calls that tiny random models make under a grammar: what ends is read back as calls that fit."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from call_cases import FORMS, TAGS, checked_calls, constraint_of, read

from tokenpath import Engine, Grammar, SamplingParams
from tokenpath.models.dialects.families import GEMMA, HERMES, LLAMA3, MISTRAL
from tokenpath.models.dialects.reader import Text, Thought
from tokenpath.protocol.events import FinishReason

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
import checkpoints

CONTROL = ("<|endoftext|>", "<|im_start|>", "[TOOL_CALLS]", "[ARGS]")
DEFINED = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""Single tokens that are text, as Qwen has them."""


def byte_level():
    made = checkpoints.byte_level_vocabulary((*CONTROL, *DEFINED))
    made["tokenizer.ggml.token_type"][-len(DEFINED) :] = [4] * len(DEFINED)
    return made


MODELS = {
    "qwen2": byte_level,
    "llama": checkpoints.sentencepiece_vocabulary,
    "gemma3": lambda: checkpoints.sentencepiece_vocabulary(gemma=True),
}


def make_model(architecture: str, folder: Path) -> Path:
    vocabulary = MODELS[architecture]()
    size = len(vocabulary["tokenizer.ggml.tokens"])
    rng = np.random.default_rng(5)
    wide = {
        name: (rng.standard_normal((size, checkpoints.HIDDEN)) / 8).astype(np.float32)
        for name in ("token_embd.weight", "output.weight")
    }
    metadata = checkpoints.metadata_of(architecture) | vocabulary
    metadata |= {"general.architecture": architecture, f"{architecture}.vocab_size": size}
    return checkpoints.write_gguf(
        folder / "model.gguf",
        architecture,
        metadata,
        checkpoints.tensors_of(architecture) | wide,
    )


@pytest.fixture(scope="module", params=MODELS)
def engine(request, tmp_path_factory):
    path = make_model(request.param, tmp_path_factory.mktemp("model"))
    with Engine(path, dtype="float32", threads=1, kv_cache_tokens=8192, progress=False) as made:
        yield made


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """An engine whose model has tokens for the marks, so that random text has them too."""
    path = make_model("qwen2", tmp_path_factory.mktemp("model"))
    with Engine(path, dtype="float32", threads=1, kv_cache_tokens=8192, progress=False) as made:
        yield made


def controls_of(engine: Engine) -> dict[str, int]:
    ids = {mark: engine.tokenizer.token_id(mark) for mark in ("[TOOL_CALLS]", "[ARGS]")}
    return {mark: i for mark, i in ids.items() if i in engine.tokenizer.special_ids}


def generate(engine: Engine, constraint, *, prompts: int = 8, bias=None):
    tokenizer = engine.tokenizer
    closing = {
        token: 6.0
        for token in range(tokenizer.vocab_size)
        if tokenizer.token_bytes(token) in {b'"', b"}", b"]"}
    }
    wanted = [
        SamplingParams(
            grammar=Grammar.calls(constraint),
            seed=seed,
            max_tokens=400,
            logit_bias=closing | dict.fromkeys(tokenizer.eos_ids, 4.0) | (bias or {}),
            shown_token_ids=tuple(constraint.controls.values()),
        )
        for seed in range(prompts)
    ]
    made = engine.generate(["Some text"] * prompts, wanted, progress=False)
    assert [one.error for one in made] == [None] * prompts
    return made


@pytest.mark.parametrize("name", FORMS)
def test_required_calls(engine, name):
    form = FORMS[name]
    constraint = constraint_of(form, controls=controls_of(engine), required=True)
    ended = 0
    for one in generate(engine, constraint):
        if one.finish_reason is FinishReason.STOP:
            ended += 1
            events = read(form, one.text, constraint)
            assert checked_calls(events)
            assert not [event for event in events if isinstance(event, Text)]
    assert ended >= 4, "hardly any came to an end"


@pytest.mark.parametrize("form", [HERMES, LLAMA3, MISTRAL, GEMMA, TAGS], ids=lambda form: form.name)
def test_a_named_call(engine, form):
    constraint = constraint_of(form, controls=controls_of(engine), named="time")
    for one in generate(engine, constraint, prompts=2):
        assert one.finish_reason is FinishReason.STOP
        assert checked_calls(read(form, one.text, constraint)) == ["time"]


@pytest.mark.parametrize(("form", "mark"), [(HERMES, "<tool_call>"), (MISTRAL, "[TOOL_CALLS]")],
                         ids=["hermes", "mistral"])  # fmt: skip
def test_text_and_then_strict_calls(marked, form, mark):
    """The mark is made likely, so that it comes after some text; from there on the grammar holds."""
    # Of several calls there would be no end: the mark stays likely.
    constraint = constraint_of(form, controls=controls_of(marked), parallel=False)
    token = marked.tokenizer.token_id(mark)
    eos = dict.fromkeys(marked.tokenizer.eos_ids, -1.0)
    made = generate(marked, constraint, prompts=16, bias={token: 5.0} | eos)
    with_text = called = 0
    for one in made:
        if one.finish_reason is FinishReason.STOP and mark in one.text:
            events = read(form, one.text, constraint)
            assert checked_calls(events)
            called += 1
            with_text += isinstance(events[0], Text)
    assert called >= 4
    assert with_text


def test_thoughts_and_then_a_required_call(marked):
    marks = [marked.tokenizer.token_id(mark) for mark in ("<think>", "</think>")]
    constraint = constraint_of(HERMES, controls=controls_of(marked), required=True, thoughts=False)
    made = generate(marked, constraint, bias={marks[0]: 8.0, marks[1]: 8.0})
    ended = [one for one in made if one.finish_reason is FinishReason.STOP]
    assert len(ended) >= 2
    for one in ended:
        thought, *calls = read(HERMES, one.text, constraint)
        assert isinstance(thought, Thought) or one.text.startswith("<think></think>")
        assert checked_calls([thought, *calls])
