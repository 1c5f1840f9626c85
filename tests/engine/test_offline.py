"""The public ``Engine``: its own behaviour on a fake model, and the real Gemma."""

from __future__ import annotations

import math
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from engine_fakes import VOCAB, Poisoned, continuation, make_core

import tokenpath
from tokenpath.engine import offline
from tokenpath.engine.interrupts import deferred_interrupt
from tokenpath.engine.offline import DEFAULT_MAX_TOKENS, Engine
from tokenpath.models.template import ChatTemplate
from tokenpath.protocol.errors import (
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    ModelError,
    SpecError,
    UnsupportedError,
)
from tokenpath.protocol.events import FinishReason
from tokenpath.protocol.request import SamplingParams

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


class FakeTokenizer:
    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [
            1 + ord(character) % (VOCAB - 1) for character in ("^" if add_special else "") + text
        ]


@pytest.fixture
def make_engine(monkeypatch):
    def make(
        template: ChatTemplate | None = None, *, max_running: int = 4, **core_options
    ) -> Engine:
        local = SimpleNamespace(
            tokenizer=FakeTokenizer, chat_template=lambda: template, name="fake"
        )
        monkeypatch.setattr(offline, "resolve", lambda *_, **__: Path("fake"))
        monkeypatch.setattr(offline, "open_model", lambda _: local)
        monkeypatch.setattr(
            offline,
            "build_engine",
            lambda *_, **__: make_core(max_running=max_running, **core_options),
        )
        return Engine(Path("/fake"), progress=False, max_running=max_running)

    return make


def expected(text: str, count: int = 8, *, add_special: bool = True) -> list[int]:
    return continuation(FakeTokenizer().encode(text, add_special=add_special), count)


def tokens_of(deltas) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def test_is_the_public_engine():
    assert tokenpath.Engine is Engine


def test_many_prompts_come_back_in_order(make_engine, capfd):
    engine = make_engine(num_blocks=20)
    prompts = [f"prompt {index}" for index in range(50)]
    completions = engine.generate(prompts, GREEDY, progress=False)
    assert [c.token_ids for c in completions] == [expected(prompt) for prompt in prompts]
    assert {c.finish_reason for c in completions} == {FinishReason.LENGTH}
    assert all(c.usage.completion_tokens == 8 for c in completions)
    assert all(c.stages.prefill_s >= 0 for c in completions)
    assert engine.stats().requests_running == 0
    assert capfd.readouterr() == ("", "")


def test_progress_goes_to_stderr_only(make_engine, capfd):
    make_engine().generate(["a", "b"], GREEDY)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "2/2" in captured.err
    assert "16 tokens" in captured.err


def test_no_more_than_two_batches_are_submitted(make_engine):
    engine = make_engine(max_running=2)
    core = engine._core
    most, step = [0], core.step

    def watch():
        stats = core.stats()
        most[0] = max(most[0], stats.requests_running + stats.requests_waiting)
        return step()

    core.step = watch
    engine.generate(["x"] * 30, GREEDY, progress=False)
    assert most == [4]


def test_a_prompt_may_be_text_ids_or_one_alone(make_engine):
    engine = make_engine()
    ids = engine.encode("hi")
    assert [c.token_ids for c in engine.generate("hi", GREEDY)] == [expected("hi")]
    assert [c.token_ids for c in engine.generate(ids, GREEDY)] == [expected("hi")]
    assert [c.token_ids for c in engine.generate([ids, ids], GREEDY)] == [expected("hi")] * 2
    assert engine.generate([]) == []


def test_sampling_parameters_for_all_or_for_each(make_engine):
    engine = make_engine(num_blocks=200)
    lengths = [msgspec.structs.replace(GREEDY, max_tokens=n) for n in (1, 5)]
    assert [len(c.token_ids) for c in engine.generate(["a", "b"], lengths)] == [1, 5]
    with pytest.raises(InvalidRequestError, match="1 sampling parameters for 2 prompts"):
        engine.generate(["a", "b"], lengths[:1])
    (default,) = engine.generate(["a"])
    assert default.usage.completion_tokens <= DEFAULT_MAX_TOKENS


def test_every_prompt_is_checked_before_any_runs(make_engine):
    engine = make_engine(max_context_tokens=20)
    with pytest.raises(ContextLengthError, match="prompt 1: the prompt has 31 tokens"):
        engine.generate(["fine", "x" * 30], GREEDY)
    with pytest.raises(InvalidRequestError, match="temperature is -1"):
        engine.generate(["fine"], SamplingParams(max_tokens=1, temperature=-1))
    assert engine.stats().steps_total == 0


def test_a_failed_sequence_leaves_the_others_their_results(make_engine):
    bad = expected("b", 3)

    def poison(chunk):
        return chunk.sequence.token_ids[-3:] == bad

    engine = make_engine(wrap=lambda runner: Poisoned(runner, poison, ValueError("no")))
    a, b, c = engine.generate(["a", "b", "c"], GREEDY)
    assert (a.token_ids, c.token_ids) == (expected("a"), expected("c"))
    assert b.token_ids == bad
    assert b.error.code == "engine_error"
    assert b.finish_reason is None
    assert (b.usage.prompt_tokens, b.usage.completion_tokens) == (a.usage.prompt_tokens, 3)
    with pytest.raises(EngineError):
        list(engine.stream("b", GREEDY))
    assert engine.stats().kv_blocks_used == 0


def test_stream_gives_deltas_and_frees_what_is_abandoned(make_engine):
    engine = make_engine()
    deltas = list(engine.stream("hi", GREEDY))
    assert tokens_of(deltas) == expected("hi")
    assert [delta.finish is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    abandoned = engine.stream("hi", GREEDY)
    next(abandoned)
    abandoned.close()
    assert engine.stats().requests_running == 0
    with pytest.raises(InvalidRequestError):
        engine.stream([], GREEDY)


def test_open_streams_and_batches_share_the_engine(make_engine):
    engine = make_engine()
    one, two = engine.stream("one", GREEDY), engine.stream("two", GREEDY)
    got = {"one": next(one).token_ids, "two": next(two).token_ids}
    (batch,) = engine.generate(["batch"], GREEDY)
    got["one"] += tokens_of(one)
    got["two"] += tokens_of(two)
    assert batch.token_ids == expected("batch")
    assert got == {"one": expected("one"), "two": expected("two")}


def test_threads_share_the_engine(make_engine):
    engine = make_engine(num_blocks=200)
    results = {}

    def work(name):
        results[name] = engine.generate([f"{name}{i}" for i in range(10)], GREEDY, progress=False)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert {name: [c.token_ids for c in got] for name, got in results.items()} == {
        name: [expected(f"{name}{i}") for i in range(10)] for name in "abc"
    }


def test_chat_renders_the_template_and_adds_no_second_beginning(make_engine):
    template = ChatTemplate("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}")
    engine = make_engine(template)
    conversation = [{"role": "user", "content": "hi"}]
    tokens = expected("user:hi;", add_special=False)
    assert [c.token_ids for c in engine.chat(conversation, GREEDY)] == [tokens]
    assert [c.token_ids for c in engine.chat([conversation] * 2, GREEDY)] == [tokens] * 2


def test_chat_with_a_base_model_says_why_not(make_engine):
    with pytest.raises(UnsupportedError, match="without a chat template"):
        make_engine().chat([{"role": "user", "content": "hi"}])


def test_ctrl_c_waits_for_the_step_aborts_and_leaves_the_engine_usable(make_engine):
    presses = iter([False, False, True])
    state = {}

    class Interrupted:
        def __init__(self, runner):
            self.runner = runner

        def run(self, plan):
            if next(presses, False):
                signal.raise_signal(signal.SIGINT)
            logits = self.runner.run(plan)
            state["steps"] = self.runner.steps
            return logits

    engine = make_engine(wrap=Interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(["a", "b"] * 10, GREEDY, progress=False)
    assert state["steps"] == 3
    engine._core.check_integrity()
    assert engine.stats().requests_running + engine.stats().requests_waiting == 0
    assert engine.stats().kv_blocks_used == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [c.token_ids for c in engine.generate(["a"], GREEDY)] == [expected("a")]


def test_a_second_ctrl_c_does_not_wait_and_closes_the_engine(make_engine):
    class Stuck:
        def run(self, plan):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("the second one should have ended the step")

    engine = make_engine(wrap=lambda runner: Stuck())
    with pytest.raises(KeyboardInterrupt):
        engine.generate(["a"], GREEDY, progress=False)
    with pytest.raises(EngineError, match="closed"):
        engine.generate(["a"], GREEDY)


def test_interrupts_in_other_threads_and_unhandled_ones_are_left_alone():
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with deferred_interrupt():
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)


def test_a_closed_engine_says_so(make_engine):
    with make_engine() as engine:
        stream = engine.stream("hi", GREEDY)
        next(stream)
    with pytest.raises(EngineError, match="closed"):
        next(stream)
    with pytest.raises(EngineError, match="closed"):
        engine.generate(["hi"])


def test_wrong_settings_and_models_are_one_sentence(tmp_path):
    with pytest.raises(SpecError, match="'kv_bytes' is wrong"):
        Engine(tmp_path, kv_bytes=3)
    with pytest.raises(SpecError, match="'threads' is wrong"):
        Engine(tmp_path, threads=0)
    with pytest.raises(ModelError, match="nowhere"):
        Engine(tmp_path / "nowhere.gguf")


# The real model.

TEXTS = [
    "The capital of France is",
    "Once upon a time, there was a little",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4,",
]


@pytest.fixture(scope="module")
def gemma(gemma_path):
    threads = torch.get_num_threads()
    with Engine(
        gemma_path, dtype="float32", threads=1, kv_cache_bytes=1 << 26, progress=False
    ) as engine:
        yield engine
    torch.set_num_threads(threads)


@pytest.mark.real_model
def test_gemma_greedy_batch_equals_one_by_one(gemma):
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=4)
    together = gemma.generate(TEXTS, params, progress=False)
    alone = [gemma.generate([text], params, progress=False)[0] for text in TEXTS]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert "5, 6" in together[-1].text
    for completion in together:
        assert len(completion.logprobs) == len(completion.token_ids)
        for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
            assert entry.token_id == entry.top[0][0] == token
            assert entry.logprob == pytest.approx(entry.top[0][1], abs=1e-6)
            assert sum(math.exp(logprob) for _, logprob, _, _ in entry.top) <= 1 + 1e-6
            assert [t[1] for t in entry.top] == sorted((t[1] for t in entry.top), reverse=True)
        assert "".join(entry.token for entry in completion.logprobs) == completion.text


@pytest.mark.real_model
def test_gemma_seeded_sampling_depends_on_the_request_alone(gemma):
    def params(seed):
        return SamplingParams(max_tokens=6, temperature=0.9, top_p=0.95, seed=seed)

    seeds = [params(seed) for seed in range(len(TEXTS))]
    together = [c.token_ids for c in gemma.generate(TEXTS, seeds, progress=False)]
    alone = [
        gemma.generate([text], p, progress=False)[0].token_ids
        for text, p in zip(TEXTS, seeds, strict=True)
    ]
    assert together == alone
    choices = gemma.generate([TEXTS[1]] * 4, [params(seed) for seed in range(4)], progress=False)
    assert len({c.text for c in choices}) == 4


@pytest.mark.real_model
def test_gemma_stop_strings_and_streaming(gemma):
    params = SamplingParams(max_tokens=20, temperature=0.0, stop=(", 7",))
    (completion,) = gemma.generate(["1, 2, 3, 4,"], params, progress=False)
    assert completion.text == " 5, 6"
    assert completion.finish_reason is FinishReason.STOP
    assert completion.matched_stop == ", 7"
    deltas = list(gemma.stream("1, 2, 3, 4,", params))
    assert "".join(delta.text for delta in deltas) == " 5, 6"
    assert deltas[-1].finish.reason is FinishReason.STOP


@pytest.mark.real_model
def test_gemma_prefix_is_reused_and_changes_nothing(gemma):
    text = "The quick brown fox jumps over the lazy dog. " * 6
    params = SamplingParams(max_tokens=6, temperature=0.0)
    first, second = (gemma.generate([text], params, progress=False)[0] for _ in range(2))
    assert second.usage.cached_prompt_tokens >= 48
    assert first.token_ids == second.token_ids


@pytest.mark.real_model
def test_gemma_has_no_chat_template(gemma):
    with pytest.raises(UnsupportedError, match="chat template"):
        gemma.chat([{"role": "user", "content": "hi"}])
