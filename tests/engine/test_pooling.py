"""The pooling engine against transformers, and what it promises to requests."""

import numpy as np
import pytest
import torch
from tests.engine.encoders import (
    CLASSIFIERS,
    ENCODERS,
    VOCAB,
    made,
    reference_hidden,
    reference_logits,
    saved,
)
from tests.engine.reference import small_reference

from tokenpath.config.spec import EngineSettings
from tokenpath.engine.pooling.build import build_pooling_engine
from tokenpath.models.servable import open_servable
from tokenpath.protocol.errors import (
    ContextLengthError,
    InvalidRequestError,
    ModelError,
    SpecError,
    UnsupportedError,
)
from tokenpath.protocol.events import Failed, FinishReason
from tokenpath.protocol.pooling import Pooled, PoolingInput, PoolingRequest
from tokenpath.protocol.request import GenerationRequest, SamplingParams, TokenPrompt

LENGTHS = (1, 17, 3, 3, 60, 29, 30, 8, 2, 41, 3)


def inputs(lengths=LENGTHS, vocab=VOCAB, seed=0, *, pairs=False):
    rng = np.random.default_rng(seed)
    made_inputs = []
    for length in lengths:
        ids = rng.integers(4, vocab, length).tolist()
        second = length // 2 if pairs and length > 1 else None
        made_inputs.append(PoolingInput(ids, second))
    return made_inputs


def engine(folder, **settings):
    settings = EngineSettings(**{"threads": 1, "dtype": "float32"} | settings)
    return build_pooling_engine(open_servable(folder), settings, name="toy")


def request(given, request_id="r", **fields):
    return PoolingRequest(request_id=request_id, model="toy", inputs=given, **fields)


def vectors(core, given, **fields):
    """The rows of one request, and the events that brought them."""
    core.submit(request(given, **fields))
    rows, events = None, []
    while core.has_work():
        for event in core.step():
            assert isinstance(event, Pooled), event
            part = np.frombuffer(event.vectors, "<f4").reshape(len(event.places), -1)
            rows = (
                np.full((len(given), part.shape[1]), np.nan, np.float32) if rows is None else rows
            )
            rows[event.places] = part
            events.append(event)
        core.check_integrity()
    assert np.isfinite(rows).all()
    assert sorted(place for event in events for place in event.places) == list(range(len(given)))
    assert [event.finish is not None for event in events] == [False] * (len(events) - 1) + [True]
    return rows


def pooled(hidden, how):
    return {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[how]


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_embeddings_equal_transformers(name, pooling, tmp_path):
    model = made(ENCODERS[name])
    longest = open_servable(saved(model, tmp_path)).max_tokens
    given = inputs([min(length, longest) for length in LENGTHS], pairs=True)
    rows = vectors(engine(tmp_path, pooling=pooling), given)
    for row, each in zip(rows, given, strict=True):
        expected = pooled(reference_hidden(model, each.token_ids, each.second), pooling)
        np.testing.assert_allclose(row, expected, atol=1e-5)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_scores_equal_transformers(name, tmp_path):
    model = made(CLASSIFIERS[name])
    given = inputs([min(length, 60) for length in LENGTHS], pairs=True)
    core = engine(saved(model, tmp_path))
    assert core.card.task == ("classify" if name.endswith("3") else "rerank")
    rows = vectors(core, given)
    for row, each in zip(rows, given, strict=True):
        logits = reference_logits(model, each.token_ids, each.second)
        expected = logits.softmax(-1) if len(logits) > 1 else logits.sigmoid()
        np.testing.assert_allclose(row, expected, atol=1e-5)


def test_a_checkpoint_may_ask_for_bare_logits(tmp_path):
    model = made(CLASSIFIERS["bert-1"])
    model.config.sentence_transformers = {"activation_fn": "torch.nn.modules.linear.Identity"}
    given = inputs([9, 12])
    rows = vectors(engine(saved(model, tmp_path)), given)
    expected = [reference_logits(model, each.token_ids) for each in given]
    np.testing.assert_allclose(rows, torch.stack(expected), atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mistral-sliding"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_decoders_embed_like_transformers(name, pooling, tmp_path):
    model = small_reference(name)
    model.save_pretrained(tmp_path)
    given = inputs(vocab=256)
    core = engine(tmp_path, task="embed", pooling=pooling)
    assert core.card.task == "embed" and core.card.dimensions == model.config.hidden_size
    rows = vectors(core, given)
    for row, each in zip(rows, given, strict=True):
        with torch.inference_mode():
            hidden = model.model(torch.tensor([each.token_ids])).last_hidden_state[0]
        expected = torch.nn.functional.normalize(pooled(hidden, pooling), dim=0)
        np.testing.assert_allclose(row, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen2-tied"])
def test_a_decoder_without_its_head_embeds(name, tmp_path):
    model = small_reference(name).model
    model.save_pretrained(tmp_path)
    given = inputs([9, 1], vocab=256)
    rows = vectors(engine(tmp_path), given)
    for row, each in zip(rows, given, strict=True):
        with torch.inference_mode():
            last = model(torch.tensor([each.token_ids])).last_hidden_state[0, -1]
        np.testing.assert_allclose(row, last / last.norm(), atol=1e-5)
    with pytest.raises(SpecError, match="it can embed"):
        engine(tmp_path, task="generate")


def test_sentence_transformers_files_are_followed(tmp_path):
    model = made(ENCODERS["bert"])
    saved(model, tmp_path, "Pooling", "Normalize", pooling_mode_cls_token=True)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    core = engine(tmp_path)
    assert core.card.max_context_tokens == 20
    given = inputs([5, 20])
    expected = torch.stack([reference_hidden(model, each.token_ids)[0] for each in given])
    expected = torch.nn.functional.normalize(expected)
    np.testing.assert_allclose(vectors(core, given), expected, atol=1e-5)
    plain = vectors(engine(tmp_path, pooling="last", normalize=False), given)
    last = torch.stack([reference_hidden(model, each.token_ids)[-1] for each in given])
    np.testing.assert_allclose(plain, last, atol=1e-5)


def test_a_vector_is_the_same_alone_and_in_company(tmp_path):
    core = engine(saved(made(ENCODERS["bert"]), tmp_path), max_step_tokens=100)
    given = inputs()
    together = vectors(core, given)
    for row, each in zip(together, given, strict=True):
        np.testing.assert_allclose(vectors(core, [each])[0], row, atol=1e-5)


def test_bfloat16_points_the_same_way(tmp_path):
    saved(made(ENCODERS["bert"]), tmp_path)
    exact = vectors(engine(tmp_path), inputs())
    rounded = vectors(engine(tmp_path, dtype="bfloat16"), inputs())
    lengths = np.linalg.norm(exact, axis=1) * np.linalg.norm(rounded, axis=1)
    assert ((exact * rounded).sum(1) / lengths).min() > 0.995


def test_requests_share_steps_and_a_failure_is_one_requests_own(tmp_path):
    core = engine(saved(made(ENCODERS["bert"]), tmp_path), max_step_tokens=4096)
    good, bad = inputs([3, 5]), inputs([4, 4], seed=1)
    read = core._reader.read

    def breaking(given):
        if any(each in bad for each in given):
            raise RuntimeError("no")
        return read(given)

    core._reader.read = breaking
    core.submit(request(good, "good"))
    core.submit(request(bad, "bad"))
    events = {event.request_id: event for event in core.step()}
    assert isinstance(events["bad"], Failed) and events["bad"].error.code == "engine_error"
    assert events["good"].finish.usage.prompt_tokens == 8
    assert not core.has_work()
    core.check_integrity()


def test_numbers_that_are_none_fail_their_request_only(tmp_path):
    core = engine(saved(made(ENCODERS["bert"]), tmp_path))
    read = core._reader.read
    core._reader.read = lambda given: np.where(
        np.array([[len(each.token_ids) == 7] for each in given]), np.nan, read(given)
    )
    core.submit(request(inputs([7]), "bad"))
    core.submit(request(inputs([6]), "good"))
    events = {event.request_id: event for event in core.step()}
    assert isinstance(events["bad"], Failed) and isinstance(events["good"], Pooled)


def test_an_abort_and_a_deadline_end_a_request(tmp_path):
    now = [0.0]
    folder = saved(made(ENCODERS["bert"]), tmp_path)
    core = engine(folder, max_step_tokens=8, max_running=1)
    core._clock = lambda: now[0]
    core.submit(request(inputs([5, 5, 5]), "gone"))
    core.submit(request(inputs([5, 5]), "late", timeout_s=2.0))
    assert len(core.step()) == 1
    assert core.abort("gone").reason is FinishReason.ABORT
    assert core.abort("gone") is None
    now[0] = 3.0
    (failed,) = core.step()
    assert failed.request_id == "late" and failed.error.code == "deadline_exceeded"
    assert not core.has_work()
    core.check_integrity()
    assert core.stats().aborts_total == 1 and core.stats().requests_running == 0


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ([], InvalidRequestError, "no input"),
        ([PoolingInput([])], InvalidRequestError, "empty"),
        ([PoolingInput([VOCAB])], InvalidRequestError, "vocabulary"),
        ([PoolingInput([5] * 65)], ContextLengthError, "65 tokens"),
    ],
)
def test_wrong_inputs_are_refused(given, error, words, tmp_path):
    core = engine(saved(made(ENCODERS["bert"]), tmp_path))
    with pytest.raises(error, match=words):
        core.submit(request(given))
    assert not core.has_work()
    core.check_integrity()


def test_text_is_not_asked_of_it(tmp_path):
    core = engine(saved(made(ENCODERS["bert"]), tmp_path))
    generation = GenerationRequest(
        request_id="g", model="toy", prompt=TokenPrompt([5]), sampling=SamplingParams(max_tokens=1)
    )
    with pytest.raises(UnsupportedError, match="no text"):
        core.submit(generation)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"task": "generate"}, "can do; it can embed"),
        ({"task": "rerank"}, "can do; it can embed"),
        ({"dtype": "int8"}, "float32"),
        ({"device": "nowhere"}, "nowhere"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, words, tmp_path):
    with pytest.raises(SpecError, match=words):
        engine(saved(made(ENCODERS["bert"]), tmp_path), **settings)


def test_too_little_memory_is_refused(tmp_path):
    model = open_servable(saved(made(ENCODERS["bert"]), tmp_path))
    with pytest.raises(ModelError, match="does not fit"):
        build_pooling_engine(model, EngineSettings(), name="toy", available_bytes=lambda: 1000)
