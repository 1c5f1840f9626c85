"""Structured output through the whole engine, on tiny models with random weights.

Random weights write nonsense, so whatever is right in the output comes from the grammar alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jsonschema_rs
import numpy as np
import pytest
from grammar_cases import PERSON, SCHEMAS, matches

from tokenpath import Engine, Grammar, SamplingParams
from tokenpath.protocol.errors import InvalidRequestError
from tokenpath.protocol.events import FinishReason

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
import checkpoints

MADE = {
    "byte level": ("qwen2", checkpoints.byte_level_vocabulary),
    "SentencePiece": ("llama", checkpoints.sentencepiece_vocabulary),
    "Gemma": ("gemma3", lambda: checkpoints.sentencepiece_vocabulary(gemma=True)),
}


def make_model(kind: str, folder: Path) -> Path:
    """A checkpoint whose vocabulary is padded by three ids without a token."""
    architecture, vocabulary = MADE[kind]
    vocabulary = vocabulary()
    size = len(vocabulary["tokenizer.ggml.tokens"]) + 3
    rng = np.random.default_rng(5)
    wide = {
        name: (rng.standard_normal((size, checkpoints.HIDDEN)) / 8).astype(np.float32)
        for name in ("token_embd.weight", "output.weight")
    }
    metadata = checkpoints.metadata_of(architecture) | vocabulary
    metadata |= {"general.architecture": architecture, f"{architecture}.vocab_size": size}
    path = folder / f"{architecture}.gguf"
    tensors = checkpoints.tensors_of(architecture) | wide
    return checkpoints.write_gguf(path, architecture, metadata, tensors)


@pytest.fixture(scope="module", params=MADE)
def engine(request, tmp_path_factory):
    path = make_model(request.param, tmp_path_factory.mktemp("model"))
    with Engine(path, dtype="float32", threads=1, kv_cache_tokens=4096, progress=False) as made:
        yield made


@pytest.fixture(scope="module")
def byte_engine(tmp_path_factory):
    path = make_model("byte level", tmp_path_factory.mktemp("model"))
    with Engine(path, dtype="float32", threads=1, kv_cache_tokens=4096, progress=False) as made:
        yield made


def closing_bias(engine: Engine) -> dict[int, float]:
    """Makes random text come to an end: closing symbols, and the end itself, are likelier."""
    tokenizer = engine.tokenizer
    bytes_of = {token: tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)}
    closing = {token: 6.0 for token, data in bytes_of.items() if data in {b'"', b"}", b"]"}}
    return closing | dict.fromkeys(tokenizer.eos_ids, 6.0)


def params(engine: Engine, grammar: Grammar | None, seed: int = 0, **options) -> SamplingParams:
    options = {"max_tokens": 300, "logit_bias": closing_bias(engine)} | options
    return SamplingParams(grammar=grammar, seed=seed, **options)


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_stops_satisfies_the_schema_and_what_is_cut_says_so(engine, name):
    schema = SCHEMAS[name]
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    grammar = Grammar.json_schema(schema)
    made = engine.generate(
        ["Some text"] * 8, [params(engine, grammar, seed) for seed in range(8)], progress=False
    )
    reasons = [one.finish_reason for one in made]
    assert [one.error for one in made] == [None] * 8
    for one in made:
        if one.finish_reason is FinishReason.STOP:
            validator.validate(json.loads(one.text))
        else:
            assert one.usage.completion_tokens == 300
    assert reasons.count(FinishReason.STOP) >= 2, "hardly any came to an end"


def test_greedy_decoding_is_structured_too(engine):
    (made,) = engine.generate(
        "x", params(engine, Grammar.json_schema(PERSON), temperature=0.0), progress=False
    )
    if made.finish_reason is FinishReason.STOP:
        jsonschema_rs.validator_for(PERSON).validate(json.loads(made.text))
    else:
        assert made.text.startswith("{")


def test_a_batch_in_which_only_some_have_a_grammar(engine):
    grammars = [
        None,
        Grammar.json_schema(PERSON),
        Grammar.regex(r"[a-c]{5}-\d\d"),
        Grammar.choice(["yes", "no", "maybe"]),
        Grammar.ebnf('root ::= "<" [0-9]+ ">"'),
        None,
    ]
    wanted = [params(engine, grammar, seed=7 + i) for i, grammar in enumerate(grammars)]
    together = engine.generate(["Some text"] * 6, wanted, progress=False)
    alone = [engine.generate("Some text", one, progress=False)[0] for one in wanted]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    jsonschema_rs.validator_for(PERSON).validate(json.loads(together[1].text))
    assert matches(r"[a-c]{5}-\d\d", together[2].text)
    assert together[3].text in {"yes", "no", "maybe"}
    assert matches(r"<[0-9]+>", together[4].text)
    assert {one.finish_reason for one in together[1:5]} == {FinishReason.STOP}


def test_preemption_does_not_disturb_the_state(tmp_path_factory):
    path = make_model("byte level", tmp_path_factory.mktemp("model"))
    grammar = Grammar.json_schema({"type": "array", "items": PERSON, "minItems": 4, "maxItems": 4})
    texts = []
    for tokens in (4096, 320):
        with Engine(
            path,
            dtype="float32",
            threads=1,
            kv_cache_tokens=tokens,
            prefix_cache=False,
            progress=False,
        ) as engine:
            wanted = [params(engine, grammar, seed, max_tokens=200) for seed in range(6)]
            made = engine.generate(["Some text"] * 6, wanted, progress=False)
            texts.append([one.token_ids for one in made])
            preemptions = engine.stats().preemptions_total
            assert preemptions == 0 if tokens == 4096 else preemptions > 0
    assert texts[0] == texts[1]


def test_logprobs_are_the_models_own_and_cover_every_token(engine):
    grammar = Grammar.choice(["alpha", "beta", "gamma"])
    (made,) = engine.generate("x", params(engine, grammar, logprobs=3), progress=False)
    assert "".join(one.token for one in made.logprobs) == made.text
    for one in made.logprobs:
        assert len(one.top) == 3
        assert one.logprob <= one.top[0][1] + 1e-6
        assert np.isfinite(one.logprob)


def test_stop_strings_and_streaming(byte_engine):
    engine = byte_engine
    grammar = Grammar.regex("[ab]{3}END[cd]{5}")
    (whole,) = engine.generate("x", params(engine, grammar, seed=3), progress=False)
    assert matches("[ab]{3}END[cd]{5}", whole.text)
    deltas = list(engine.stream("x", params(engine, grammar, seed=3)))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert deltas[-1].finish.reason is FinishReason.STOP
    (cut,) = engine.generate("x", params(engine, grammar, seed=3, stop=("END",)), progress=False)
    assert cut.text == whole.text[:3]
    assert cut.matched_stop == "END"


def test_max_tokens_cuts_with_the_reason_length(byte_engine):
    grammar = Grammar.json_schema(PERSON)
    (made,) = byte_engine.generate("x", params(byte_engine, grammar, max_tokens=3), progress=False)
    assert made.finish_reason is FinishReason.LENGTH
    assert made.usage.completion_tokens == 3
    (exact,) = byte_engine.generate(
        "x", params(byte_engine, Grammar.choice(["q"]), max_tokens=1), progress=False
    )
    assert (exact.text, exact.finish_reason) == ("q", FinishReason.STOP)


def test_min_tokens_holds_the_end_back_while_the_text_can_go_on(byte_engine):
    end = dict.fromkeys(byte_engine.tokenizer.eos_ids, 100.0)
    early = params(byte_engine, Grammar.regex("a{1,30}"), logit_bias=end)
    late = params(byte_engine, Grammar.regex("a{1,30}"), logit_bias=end, min_tokens=9)
    fixed = params(byte_engine, Grammar.choice(["ab"]), logit_bias=end, min_tokens=50)
    made = byte_engine.generate(["x"] * 3, [early, late, fixed], progress=False)
    assert made[0].usage.completion_tokens == 2
    assert made[1].usage.completion_tokens == 10
    assert made[2].text == "ab"
    assert {one.finish_reason for one in made} == {FinishReason.STOP}


def test_a_bias_cannot_force_what_the_grammar_forbids(byte_engine):
    (forbidden,) = byte_engine.encode("z")
    wanted = params(byte_engine, Grammar.regex("[ab]{4}"), logit_bias={forbidden: 100.0})
    (made,) = byte_engine.generate("x", wanted, progress=False)
    assert matches("[ab]{4}", made.text)


def test_penalties_and_cuts_work_on_what_is_allowed(byte_engine):
    wanted = params(
        byte_engine, Grammar.regex("[ab]{12}"), top_k=1, top_p=0.1, min_p=0.5,
        repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=1.0,
    )  # fmt: skip
    (made,) = byte_engine.generate("x", wanted, progress=False)
    assert matches("[ab]{12}", made.text)


def test_refusals_name_their_field_before_anything_runs(byte_engine):
    before = byte_engine.stats().steps_total
    with pytest.raises(
        InvalidRequestError, match="ignore_eos cannot be combined with regex"
    ) as one:
        byte_engine.generate(
            "x", SamplingParams(max_tokens=3, grammar=Grammar.regex("a"), ignore_eos=True)
        )
    assert one.value.param == "ignore_eos"
    with pytest.raises(
        InvalidRequestError, match=r"prompt 1: .*'not' at # is not supported"
    ) as two:
        byte_engine.generate(
            ["x", "y"],
            [
                SamplingParams(max_tokens=1),
                SamplingParams(max_tokens=1, grammar=Grammar.json_schema({"not": {}})),
            ],
        )
    assert two.value.param == "json_schema"
    assert byte_engine.stats().steps_total == before
