"""The engine loop with a runner whose output is known."""

from __future__ import annotations

import random

import pytest
import torch
from engine_fakes import (
    EOS,
    VOCAB,
    Clock,
    Collector,
    FakeText,
    Poisoned,
    assert_idle,
    continuation,
    eager_speculator,
    make_core,
    request,
    run_all,
)
from hypothesis import given
from hypothesis import strategies as st

from tokenpath.protocol.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from tokenpath.protocol.events import FinishReason
from tokenpath.protocol.request import GenerationRequest, SamplingParams, TokenPrompt


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def visible(tokens: list[int]) -> str:
    return b"".join(FakeText().token_bytes(token) for token in tokens).decode(errors="replace")


def test_one_request():
    core = make_core()
    core.submit(request("a", [5, 6, 7]))
    result = run_all(core)["a"]
    expected = continuation([5, 6, 7], 8)
    assert result.token_ids == expected
    assert result.text == visible(expected)
    assert result.finish.reason is FinishReason.LENGTH
    usage = result.finish.usage
    assert (usage.prompt_tokens, usage.cached_prompt_tokens, usage.completion_tokens) == (3, 0, 8)
    assert core.step() == []


@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(8, 30),
    max_step_tokens=st.sampled_from([1, 3, 7, 64]),
    max_running=st.sampled_from([1, 2, 5, 16]),
    prefix_cache=st.booleans(),
    speculates=st.booleans(),
)
def test_any_schedule_gives_the_undisturbed_output(
    seed, num_blocks, max_step_tokens, max_running, prefix_cache, speculates
):
    """Arrivals, aborts, priorities, chunking, preemption, speculation: none may change a token."""
    rng = random.Random(seed)
    core = make_core(
        num_blocks=num_blocks,
        max_step_tokens=max_step_tokens,
        max_running=max_running,
        prefix_cache=prefix_cache,
        speculator=eager_speculator(seed) if speculates else None,
    )
    collector = Collector()
    expected: dict[str, list[int]] = {}
    aborted: set[str] = set()
    common = [rng.randrange(1, VOCAB) for _ in range(8)]
    pending = 12
    while pending or core.has_work():
        if pending and rng.random() < 0.4:
            pending -= 1
            name = f"r{pending}"
            prompt = common[: rng.randrange(1, 9)] + [
                rng.randrange(1, VOCAB) for _ in range(rng.randrange(8))
            ]
            count = rng.randrange(1, 17)
            core.submit(request(name, prompt, max_tokens=count, priority=rng.randrange(3)))
            expected[name] = continuation(prompt, count)
        if rng.random() < 0.05 and expected:
            name = rng.choice(sorted(expected))
            ended = name in aborted or (name in collector.results and collector.results[name].ended)
            assert (core.abort(name) is None) is ended
            if not ended:
                aborted.add(name)
        events = core.step()
        assert not {event.request_id for event in events} & aborted
        collector.take(events)
        core.check_integrity()
    for name, tokens in expected.items():
        if name in aborted:
            continue
        result = collector.results[name]
        assert result.failed is None
        assert result.token_ids == tokens
        assert result.text == visible(tokens)
    assert_idle(core)
    assert core.stats().aborts_total == len(aborted)


def test_hundreds_of_requests_through_a_tiny_pool_are_preempted_and_right():
    rng = random.Random(1)
    core = make_core(num_blocks=14, max_running=12, max_step_tokens=16)
    collector = Collector()
    expected = {}
    for index in range(300):
        prompt = [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 20))]
        expected[f"r{index}"] = continuation(prompt, 20)
        core.submit(request(f"r{index}", prompt, max_tokens=20, priority=rng.randrange(-1, 2)))
        collector.take(core.step())
        core.check_integrity()
    results = run_all(core, collector)
    assert {name: result.token_ids for name, result in results.items()} == expected
    stats = core.stats()
    assert stats.preemptions_total > 20
    assert stats.generated_tokens_total == 300 * 20
    assert sum(r.finish.stages.preemptions for r in results.values()) == stats.preemptions_total


def test_sampling_is_the_same_alone_in_a_batch_and_after_preemption():
    params = {"temperature": 1.5, "top_p": 0.95, "ignore_eos": True, "max_tokens": 12}
    prompts = [[i + 1, 2, 3] for i in range(10)]

    class Flat:
        """Logits spread over the vocabulary, a function of the tokens alone."""

        def __init__(self, runner):
            self.runner = runner

        def run(self, plan):
            logits = self.runner.run(plan)
            for row, token in zip(logits, logits.argmax(-1).tolist(), strict=True):
                row.copy_(torch.randn(VOCAB, generator=torch.Generator().manual_seed(token)))
            return logits

    def outputs(**options):
        core = make_core(wrap=Flat, **options)
        for index, prompt in enumerate(prompts):
            core.submit(request(str(index), prompt, seed=index, **params))
        return {k: r.token_ids for k, r in run_all(core).items()}, core.stats()

    together, stats = outputs(num_blocks=9)
    alone, _ = outputs(max_running=1)
    assert stats.preemptions_total > 0
    assert together == alone
    assert len({tuple(tokens) for tokens in alone.values()}) == len(prompts)


def test_requests_without_a_seed_differ():
    core = make_core(wrap=lambda runner: Uniform())
    for name in "ab":
        core.submit(request(name, [1, 2], temperature=1.0, max_tokens=12))
    results = run_all(core)
    assert results["a"].token_ids != results["b"].token_ids


class Uniform:
    def run(self, plan):
        return torch.zeros(sum(chunk.samples for chunk in plan.chunks), VOCAB)


# Failures stay with the request that has them.


@pytest.mark.parametrize(
    "error", [ValueError("no"), MemoryError(), torch.OutOfMemoryError("no"), RuntimeError(
        "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")]
)  # fmt: skip
def test_a_poisoned_sequence_fails_alone(error):
    def poison(chunk):
        return chunk.sequence.request_id == "bad" and chunk.sequence.output_tokens >= 3

    core = make_core(wrap=lambda runner: Poisoned(runner, poison, error))
    prompts = {name: [index + 1, 4, 4] for index, name in enumerate(["a", "bad", "b", "c"])}
    for name, prompt in prompts.items():
        core.submit(request(name, prompt))
    results = run_all(core)
    for name in "abc":
        assert results[name].token_ids == continuation(prompts[name], 8)
    bad = results["bad"]
    assert bad.token_ids == continuation(prompts["bad"], 3)
    assert bad.failed.error.code == "engine_error"
    assert ("memory" in bad.failed.error.message) == (not isinstance(error, ValueError))


def test_a_failed_prefill_leaves_nothing_in_the_prefix_cache():
    def poison(chunk):
        return chunk.sequence.request_id == "bad"

    core = make_core(
        max_step_tokens=8, wrap=lambda runner: Poisoned(runner, poison, ValueError("no"))
    )
    prompt = list(range(1, 30))
    core.submit(request("bad", prompt))
    assert run_all(core)["bad"].failed is not None
    assert core.stats().kv_blocks_cached == 0
    core.submit(request("good", prompt))
    result = run_all(core)["good"]
    assert result.token_ids == continuation(prompt, 8)
    assert result.finish.usage.cached_prompt_tokens == 0


def test_a_runner_that_is_wholly_broken_ends_every_request_and_the_core_goes_on():
    broken = [True]
    core = make_core(wrap=lambda runner: Poisoned(runner, lambda _: broken[0], ValueError("no")))
    for name in "abc":
        core.submit(request(name, [1, 2]))
    assert all(result.failed for result in run_all(core).values())
    broken[0] = False
    core.submit(request("d", [1, 2]))
    assert run_all(core)["d"].token_ids == continuation([1, 2], 8)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_end_their_request(value, temperature):
    class Spoiled:
        def __init__(self, runner):
            self.runner = runner

        def run(self, plan):
            logits = self.runner.run(plan)
            sampling = [chunk for chunk in plan.chunks if chunk.samples]
            for row, chunk in zip(logits, sampling, strict=True):
                if chunk.sequence.request_id == "bad":
                    row[3] = value
            return logits

    core = make_core(wrap=Spoiled)
    core.submit(request("good", [1, 2]))
    core.submit(request("bad", [2, 2], temperature=temperature))
    results = run_all(core)
    assert results["good"].token_ids == continuation([1, 2], 8)
    assert "NaN or infinity" in results["bad"].failed.error.message


def test_a_detokenizer_that_raises_ends_its_request_and_its_text_is_not_logged(caplog):
    class Touchy(FakeText):
        def detokenizer(self, stop, shown):
            inner = super().detokenizer(stop, shown)
            push = inner.push

            def checked(token_id):
                if made is fakes[1]:
                    raise ValueError(secret)
                return push(token_id)

            made = inner
            inner.push = checked
            fakes.append(inner)
            return inner

    fakes = []
    secret = "what the client wrote"
    core = make_core(text=Touchy())
    for name in "abc":
        core.submit(request(name, [ord(name) % VOCAB, 2]))
    results = run_all(core)
    assert results["b"].failed.error.code == "engine_error"
    assert results["a"].finish
    assert results["c"].finish
    assert "output of b failed: ValueError" in caplog.text
    assert secret not in caplog.text


def test_the_detokenizer_is_told_which_control_tokens_have_a_text():
    class Told(FakeText):
        def detokenizer(self, stop, shown):
            told.append(shown)
            return super().detokenizer(stop, shown)

    told = []
    core = make_core(text=Told())
    core.submit(request("a", [1, 2], shown_token_ids=(3, 4)))
    core.submit(request("b", [1, 2]))
    run_all(core)
    assert told == [(3, 4), ()]


# Entry.


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": float("inf")}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logprobs": -1}, "logprobs"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"shown_token_ids": (VOCAB,)}, "shown_token_ids"),
    ],
)
def test_parameters_out_of_range_are_refused(wrong, param):
    core = make_core()
    core.submit(request("good", [1, 2]))
    with pytest.raises(InvalidRequestError) as caught:
        core.submit(request("bad", [1, 2], **wrong))
    assert caught.value.param == param
    assert list(run_all(core)) == ["good"]


def test_prompts_that_cannot_run_are_refused():
    core = make_core(num_blocks=4, block_tokens=4)
    core.submit(request("good", [1, 2]))
    with pytest.raises(InvalidRequestError, match="empty"):
        core.submit(request("bad", []))
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        core.submit(request("bad", [VOCAB]))
    with pytest.raises(InvalidRequestError, match="in use"):
        core.submit(request("good", [1]))
    with pytest.raises(ContextLengthError, match="16"):
        core.submit(request("bad", [1] * 16))
    with pytest.raises(UnsupportedError):
        core.submit(
            GenerationRequest(
                request_id="bad", model="fake", prompt=TokenPrompt([1]),
                sampling=SamplingParams(max_tokens=1), adapter="x",
            )
        )  # fmt: skip
    assert list(run_all(core)) == ["good"]


def test_output_ends_where_the_context_does():
    core = make_core(max_context_tokens=10)
    core.submit(request("a", [1, 2, 3], max_tokens=1000))
    result = run_all(core)["a"]
    assert result.token_ids == continuation([1, 2, 3], 7)
    assert result.finish.reason is FinishReason.LENGTH


def test_end_token_is_counted_but_not_shown():
    prompt = next(
        [a, b] for a in range(1, VOCAB) for b in range(1, VOCAB)
        if EOS in continuation([a, b], 20)[4:]
    )  # fmt: skip
    place = continuation(prompt, 20).index(EOS)
    core = make_core()
    core.submit(request("a", prompt, max_tokens=40, ignore_eos=False))
    core.submit(request("b", prompt, max_tokens=40, ignore_eos=False, min_tokens=place + 1))
    results = run_all(core)
    assert results["a"].token_ids == continuation(prompt, place)
    assert results["a"].finish.reason is FinishReason.STOP
    assert results["a"].finish.matched_stop is None
    assert results["a"].finish.usage.completion_tokens == place + 1
    assert len(results["b"].token_ids) > place


# Time.


def test_deadline_counts_from_submit_and_frees_at_once():
    clock = Clock()
    core = make_core(clock=clock, max_running=1)
    core.submit(request("slow", [1, 2], max_tokens=100, timeout_s=2.0))
    core.submit(request("waiting", [1, 3], timeout_s=1.0))
    core.submit(request("patient", [1, 4], timeout_s=50.0))
    collector = Collector()
    collector.take(core.step())
    clock.now += 1.0
    collector.take(core.step())
    assert collector.results["waiting"].failed.error.code == "deadline_exceeded"
    assert not collector.results["slow"].ended
    clock.now += 1.0
    collector.take(core.step())
    assert collector.results["slow"].failed.error.code == "deadline_exceeded"
    assert "2 seconds" in collector.results["slow"].failed.error.message
    assert run_all(core, collector)["patient"].finish.reason is FinishReason.LENGTH


def test_stages_sum_to_the_life_of_the_request():
    clock = Clock()
    clock.tick = 0.125
    core = make_core(clock=clock, num_blocks=9, max_running=4)
    started = {}
    for index in range(4):
        core.submit(request(str(index), [index + 1, 2, 3], max_tokens=20))
        started[str(index)] = clock.now
    while core.has_work():
        for event in core.step():
            if event.finish:
                stages = event.finish.stages
                total = stages.queue_s + stages.prefill_s + stages.decode_s
                # Everything is a multiple of 1/8, so the sums are exact.
                assert 0 <= clock.now - (started[event.request_id] + total) <= 1.0
                assert stages.queue_s > 0
                assert stages.prefill_s > 0
                assert stages.decode_s > 0
    assert core.stats().preemptions_total > 0
    assert core.stats().step_seconds_total > 0


def test_cached_prompt_tokens_are_counted_once():
    core = make_core(num_blocks=32)
    prompt = list(range(1, 18))
    core.submit(request("first", prompt, max_tokens=4))
    run_all(core)
    core.submit(request("second", prompt, max_tokens=4))
    result = run_all(core)["second"]
    assert result.finish.usage.cached_prompt_tokens == 16
    assert core.stats().cached_prompt_tokens_total == 16
    assert core.stats().prompt_tokens_total == 34


def test_abort_of_an_unknown_request_says_so():
    core = make_core()
    assert core.abort("nobody") is None
    core.submit(request("a", [1, 2]))
    assert core.abort("a").reason is FinishReason.ABORT
    assert core.abort("a") is None
    assert core.step() == []
    assert_idle(core)


# What a request has cost, however it ends.


def seconds(stages) -> float:
    return stages.queue_s + stages.prefill_s + stages.decode_s


def preempted_core(clock):
    """A core with one sequence that was preempted after its first tokens, and its id."""
    core = make_core(clock=clock, num_blocks=9, max_running=4)
    started = {}
    for index in range(4):
        core.submit(request(str(index), [index + 1, 2, 3], max_tokens=20))
        started[str(index)] = clock.now
    while core.stats().preemptions_total == 0:
        core.step()
    preempted = [
        name
        for name, live in core._live.items()
        if live.stages.preemptions and live.output.generated
    ]
    return core, preempted[0], started[preempted[0]]


def test_an_abort_in_the_queue_costs_queue_time_alone():
    clock = Clock()
    core = make_core(clock=clock, max_running=1)
    core.submit(request("first", [1, 2]))
    core.submit(request("a", [1, 2, 3]))
    core.step()
    clock.now += 3
    finish = core.abort("a")
    assert (finish.stages.queue_s, finish.stages.prefill_s, finish.stages.decode_s) == (3, 0, 0)
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (3, 0)
    assert finish.usage.cached_prompt_tokens is None  # it never looked
    assert list(run_all(core)) == ["first"]


def test_an_abort_in_prefill_has_its_prefill():
    clock = Clock()
    core = make_core(clock=clock, max_step_tokens=4)
    core.submit(request("a", list(range(1, 20))))
    clock.now += 1
    core.step()
    clock.now += 4
    finish = core.abort("a")
    assert (finish.stages.queue_s, finish.stages.prefill_s, finish.stages.decode_s) == (1, 4, 0)
    assert finish.usage.completion_tokens == 0
    assert_idle(core)


def test_an_abort_in_decode_has_all_stages_and_every_token():
    clock = Clock()
    core = make_core(clock=clock)
    core.submit(request("a", [1, 2, 3], max_tokens=100))
    clock.now += 1
    for _ in range(5):
        core.step()
        clock.now += 2
    finish = core.abort("a")
    assert finish.reason is FinishReason.ABORT
    assert (finish.stages.queue_s, finish.stages.prefill_s, finish.stages.decode_s) == (1, 0, 10)
    assert finish.usage.completion_tokens == 5
    assert core.stats().generated_tokens_total == 5
    assert_idle(core)


def test_an_abort_of_a_preempted_sequence_keeps_what_it_had():
    clock = Clock()
    clock.tick = 0.125
    core, name, started = preempted_core(clock)
    generated = core._live[name].output.generated
    clock.now += 7
    finish = core.abort(name)
    assert finish.stages.preemptions == 1
    assert finish.stages.queue_s >= 7
    assert finish.stages.decode_s > 0
    assert finish.usage.completion_tokens == generated > 0
    assert seconds(finish.stages) == clock.now - started
    run_all(core)


@given(seed=st.integers(0, 2**32), num_blocks=st.integers(8, 16))
def test_an_abort_at_any_moment_accounts_for_the_whole_life(seed, num_blocks):
    """Stages sum to the time since arrival exactly, whatever happened; no token is lost."""
    rng = random.Random(seed)
    clock = Clock()
    clock.tick = 0.125  # sums of multiples of 1/8 are exact
    core = make_core(clock=clock, num_blocks=num_blocks, max_running=4, max_step_tokens=8)
    arrived: dict[str, float] = {}
    tokens = 0
    for index in range(8):
        prompt = [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 9))]
        arrived[str(index)] = clock.now - rng.randrange(3)
        core.submit(request(str(index), prompt, max_tokens=16), arrived=arrived[str(index)])
        for _ in range(rng.randrange(3)):
            for event in core.step():
                if event.finish is not None:
                    tokens += event.finish.usage.completion_tokens
    for name, came in arrived.items():
        finish = core.abort(name)
        if finish is not None:
            assert seconds(finish.stages) == clock.now - came
            tokens += finish.usage.completion_tokens
        core.check_integrity()
    assert tokens == core.stats().generated_tokens_total
    assert_idle(core)


def test_a_deadline_tells_what_the_request_has_cost():
    clock = Clock()
    core = make_core(clock=clock)
    core.submit(request("late", [1, 2, 3], max_tokens=100, timeout_s=4.0))
    clock.now += 1
    for _ in range(2):
        core.step()
        clock.now += 1.5
    [failed] = core.step()
    assert failed.error.code == "deadline_exceeded"
    assert (failed.stages.queue_s, failed.stages.decode_s) == (1, 3)
    assert (failed.usage.prompt_tokens, failed.usage.completion_tokens) == (3, 2)


def test_a_failure_tells_what_the_request_has_cost():
    def poison(chunk):
        return chunk.sequence.output_tokens >= 3

    clock = Clock()
    clock.tick = 0.125
    core = make_core(clock=clock, wrap=lambda runner: Poisoned(runner, poison, ValueError("no")))
    core.submit(request("bad", [4, 4]))
    arrived = clock.now
    failed = run_all(core)["bad"].failed
    assert failed.usage.completion_tokens == 3
    assert failed.stages.decode_s > 0
    assert 0 <= clock.now - arrived - seconds(failed.stages) <= 1


def test_queue_and_deadline_count_from_the_arrival():
    clock = Clock()
    core = make_core(clock=clock)
    arrived = clock.now
    clock.now += 2.5  # the step that was running when it came
    core.submit(request("a", [1, 2], max_tokens=1), arrived=arrived)
    core.submit(request("b", [1, 2], timeout_s=2.0), arrived=arrived)
    events = {event.request_id: event for event in core.step()}
    assert events["a"].finish.stages.queue_s == 2.5
    assert events["b"].error.code == "deadline_exceeded"
    assert events["b"].stages.queue_s == 2.5
