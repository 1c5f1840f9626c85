"""The pure parts: arrivals, traces, prompts, percentiles, limits, options."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenpath.bench import settings, trace, workload
from tokenpath.bench.arrivals import poisson_offsets
from tokenpath.bench.measure import Answer, Limits, Samples, quantiles
from tokenpath.bench.trace import ScaledRow, TraceRow, parse_trace, scale
from tokenpath.bench.wire import Api, PromptKind
from tokenpath.bench.workload import Domain, Length, Segment, content, from_trace, synthetic
from tokenpath.protocol.errors import SpecError

# --- arrivals


def test_poisson_is_seeded_and_has_the_rate_asked_for():
    first = list(itertools.islice(poisson_offsets(50.0, seed=7), 5000))
    assert first == list(itertools.islice(poisson_offsets(50.0, seed=7), 5000))
    assert first != list(itertools.islice(poisson_offsets(50.0, seed=8), 5000))
    gaps = np.diff([0.0, *first])
    assert (gaps > 0).all()
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.1)  # exponential: deviation equals mean


@given(rate=st.floats(0.01, 1e5), seed=st.integers(0, 2**62))
def test_poisson_rate_only_stretches_time(rate, seed):
    one = list(itertools.islice(poisson_offsets(1.0, seed), 20))
    scaled = list(itertools.islice(poisson_offsets(rate, seed), 20))
    assert scaled == pytest.approx([moment / rate for moment in one])


# --- traces

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:04.0319600,110,27
""".splitlines()


def test_azure_rows():
    rows = list(parse_trace(AZURE, "a.csv"))
    assert [(r.prompt_tokens, r.output_tokens, r.block_ids) for r in rows] == [
        (4808, 10, ()),
        (3180, 8, ()),
        (110, 27, ()),
    ]
    assert [r.offset_s for r in rows] == pytest.approx([0, 0.052, 0.052], abs=1e-6)


def test_mooncake_rows():
    rows = list(
        parse_trace(
            [
                '{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}',
                "",
                '{"timestamp": 30535, "input_length": 512, "output_length": 26, "hash_ids": [46]}',
            ],
            "m.jsonl",
        )
    )
    assert rows == [
        TraceRow(0.0, 600, 52, (46, 47)),
        TraceRow(pytest.approx(3.053), 512, 26, (46,)),
    ]


MOON = '{"timestamp": %s, "input_length": %s, "output_length": %s, "hash_ids": %s}'


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], ["empty"]),
        (["a,b"], ["line 1", "header"]),
        (AZURE[:1], ["no requests"]),
        ([*AZURE, "2023-11-16 18:17:05,1"], ["line 5", "3 columns"]),
        ([*AZURE, "yesterday,1,1"], ["line 5", "TIMESTAMP"]),
        ([*AZURE, "2023-11-16 18:17:05,x,1"], ["line 5", "ContextTokens", "'x'"]),
        ([*AZURE, "2023-11-16 18:17:05,5,0"], ["line 5", "GeneratedTokens", "at least 1"]),
        ([*AZURE, "2023-11-16 18:17:01,5,1"], ["line 5", "before"]),
        ([MOON % (0, 5, 5, [1]), "{"], ["line 2", "Mooncake"]),
        ([MOON % (0, 513, 5, [1])], ["line 1", "2 hash_ids"]),
        ([MOON % (0, 5, 5, [-1])], ["line 1", "negative"]),
        ([MOON % (0, 5, '"5"', [1])], ["line 1", "output_length"]),
        ([MOON % (9, 5, 5, [1]), MOON % (8, 5, 5, [1])], ["line 2", "before"]),
    ],
)
def test_malformed_traces_name_the_line(lines, words):
    with pytest.raises(SpecError) as caught:
        list(parse_trace(lines, "the.trace"))
    assert "the.trace" in caught.value.message
    for word in words:
        assert word in caught.value.message


def test_a_trace_that_cannot_be_read(tmp_path):
    with pytest.raises(SpecError, match=r"cannot read the trace .*No such file"):
        list(trace.read_trace(tmp_path / "none"))
    (tmp_path / "bad").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="not UTF-8"):
        list(trace.read_trace(tmp_path / "bad"))


@given(
    prompt=st.integers(1, 10_000),
    output=st.integers(1, 1000),
    divisor=st.integers(1, 600),
    factor=st.floats(0.01, 100),
)
def test_scaling_divides_lengths_and_stretches_time_only(prompt, output, divisor, factor):
    ids = tuple(range(100, 100 + math.ceil(prompt / trace.BLOCK_TOKENS)))
    for row in (TraceRow(2.0, prompt, output, ids), TraceRow(2.0, prompt, output)):
        scaled = scale(row, time_scale=factor, length_divisor=divisor)
        assert scaled.offset_s == pytest.approx(2.0 * factor)
        assert scaled.output_tokens == math.ceil(output / divisor)
        assert sum(tokens for _, tokens in scaled.blocks) == math.ceil(prompt / divisor)
        assert tuple(i for i, _ in scaled.blocks if i is not None) == row.block_ids


# --- prompts

SESSIONS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=2, max_size=6)
"""Requests as walks in a tree; the ids below name its nodes, as in a real trace."""


def tree_ids(path):
    return tuple(
        sum((step + 1) * 7**i for i, step in enumerate(path[: n + 1])) for n in range(len(path))
    )


@given(
    paths=SESSIONS,
    divisor=st.sampled_from([1, 2, 7, 16, 51]),
    alphabet=st.sampled_from([len(workload.WORDS), 19_000]),
    seed=st.integers(0, 2**62),
    last=st.integers(1, 512),
)
def test_two_requests_share_exactly_the_blocks_with_equal_hash_ids(
    paths, divisor, alphabet, seed, last
):
    block = trace.BLOCK_TOKENS
    rows = [TraceRow(0.0, (len(p) - 1) * block + last, 1, tree_ids(p)) for p in paths]
    planned = from_trace(scale(row, time_scale=1, length_divisor=divisor) for row in rows)
    prompts = [content(p.segments, alphabet=alphabet, seed=seed) for p in planned]
    for (row_a, a), (row_b, b) in itertools.combinations(zip(rows, prompts, strict=True), 2):
        whole = min(row_a.prompt_tokens, row_b.prompt_tokens) // block
        equal_ids = common(row_a.block_ids[:whole], row_b.block_ids[:whole])
        bounds = [i * block // divisor for i in range(whole + 1)]
        shared = common(a.tolist(), b.tolist())
        assert sum(shared >= end for end in bounds[1:]) == equal_ids


def common(a, b):
    """How many leading items are equal."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@given(
    seed=st.integers(0, 2**62),
    alphabet=st.sampled_from([len(workload.WORDS), 19_000]),
    numbers=st.lists(st.integers(0, 2**33), min_size=2, max_size=20, unique=True),
    tokens=st.integers(6, 300),
)
def test_content_is_never_repeated_by_accident(seed, alphabet, numbers, tokens):
    keys = [(domain, n) for domain in (Domain.UNIQUE, Domain.BLOCK, Domain.WARMUP) for n in numbers]
    prompts = [content([Segment(d, n, tokens)], alphabet=alphabet, seed=seed) for d, n in keys]
    assert len({p[: workload.key_symbols(alphabet)].tobytes() for p in prompts}) == len(keys)
    assert all(p.min() >= 0 and p.max() < alphabet for p in prompts)
    assert (prompts[0] == content([Segment(*keys[0], tokens)], alphabet=alphabet, seed=seed)).all()
    longer = content([Segment(*keys[0], tokens + 9)], alphabet=alphabet, seed=seed)
    assert (longer[:tokens] == prompts[0]).all()


def test_another_seed_gives_other_content():
    segments = [Segment(Domain.UNIQUE, 3, 64)]
    one, two = (content(segments, alphabet=19_000, seed=seed) for seed in (1, 2))
    assert common(one.tolist(), two.tolist()) < 2
    assert (one == two).sum() < 8


def test_synthetic_lengths_and_shared_prefix():
    planned = list(
        itertools.islice(
            synthetic(Length(20, 40), Length(5, 9), shared_prefix_tokens=16, seed=3), 200
        )
    )
    assert {p.prompt_tokens for p in planned} == set(range(20, 41))
    assert {p.output_tokens for p in planned} == set(range(5, 10))
    prompts = [content(p.segments, alphabet=19_000, seed=3).tolist() for p in planned]
    assert all(p[:16] == prompts[0][:16] for p in prompts)
    assert len({tuple(p[16:20]) for p in prompts}) == 200


def test_synthetic_ends_with_its_offsets():
    planned = list(
        synthetic(Length(4, 4), Length(1, 1), shared_prefix_tokens=0, seed=1, offsets=[0.5, 2.0])
    )
    assert [(p.index, p.offset_s) for p in planned] == [(0, 0.5), (1, 2.0)]


def test_words_are_one_per_symbol():
    text = workload.words(np.arange(len(workload.WORDS)))
    assert len(text.split(" ")) == len(set(text.split(" "))) == len(workload.WORDS)


def test_a_hash_id_that_is_too_large_is_refused():
    row = ScaledRow(0.0, ((1 << 40, 5),), 1)
    with pytest.raises(SpecError, match="hash id"):
        content(next(from_trace([row])).segments, alphabet=100, seed=1)


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "x", "1.5", "uniform:5", "uniform:9-3", "uniform:0-3", "1" * 10]
)
def test_bad_lengths(text):
    with pytest.raises(SpecError, match="--some"):
        Length.parse(text, "--some")


def test_lengths():
    assert Length.parse("128", "") == Length(128, 128)
    assert Length.parse("uniform:16-64", "") == Length(16, 64)
    assert str(Length(3, 3)) == "3"
    assert str(Length(3, 5)) == "uniform:3-5"


# --- figures

FLOATS = st.floats(0, 1e6, allow_nan=False)


@given(values=st.lists(FLOATS, min_size=1, max_size=200), fraction=st.floats(0, 1))
def test_quantiles_are_numpys(values, fraction):
    found = quantiles(values, [fraction, 0.5, 0.99])
    assert found == pytest.approx(
        np.quantile(values, [fraction, 0.5, 0.99]).tolist(), rel=1e-9, abs=1e-9
    )


@given(chunks=st.lists(st.lists(FLOATS, max_size=20), max_size=20))
def test_samples_within_their_bound_are_exact(chunks):
    samples = Samples(bound=400)
    for chunk in chunks:
        samples.extend(chunk)
    every = [value for chunk in chunks for value in chunk]
    found = samples.distribution()
    assert found.exact
    assert found.count == len(every)
    if not every:
        assert found.mean is found.p50 is found.max is None
        return
    assert found.max == max(every)
    assert found.mean == pytest.approx(np.mean(every))
    assert [found.p50, found.p90, found.p99] == pytest.approx(
        np.quantile(every, [0.5, 0.9, 0.99]).tolist()
    )


def test_samples_beyond_their_bound_are_a_fair_sample_and_say_so():
    samples = Samples(bound=1000)
    for value in range(20_000):
        samples.add(float(value))
    found = samples.distribution()
    assert not found.exact
    assert (found.count, found.max, found.mean) == (20_000, 19_999.0, 9_999.5)
    assert found.p50 == pytest.approx(10_000, rel=0.1)


def test_limits():
    limits = Limits.parse("ttft=0.5, itl=0.1,e2e=30,tpot=.05")
    assert limits == Limits(ttft=0.5, itl=0.1, tpot=0.05, e2e=30.0)
    good = Answer(ttft=0.5, e2e=30.0, gaps=[0.01, 0.1], tpot=0.05)
    assert good.meets(limits)
    assert Answer(9, 9, [9], None).meets(Limits())
    for bad in (
        Answer(0.51, 30.0, [0.1], 0.05),
        Answer(0.5, 30.1, [0.1], 0.05),
        Answer(0.5, 30.0, [0.01, 0.11, 0.01], 0.05),
        Answer(0.5, 30.0, [0.1], 0.06),
        Answer(0.5, 30.0, [0.1], None),
    ):
        assert not bad.meets(limits)


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=", "ttft=-1", "foo=1", "ttft=1,ttft=2", "ttft=nan"]
)
def test_bad_limits(text):
    with pytest.raises(SpecError, match="--limits"):
        Limits.parse(text)


# --- options


def checked(**options):
    return settings.check(url="http://h/v1", seed=1, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"concurrency": 1, "rate": 2.0}, ["--concurrency", "--rate", "contradict"]),
        ({"trace_file": "x", "rate": 2.0}, ["--trace", "--rate", "contradict"]),
        ({"trace_file": "x", "prompt_tokens": "5"}, ["--trace", "--prompt-tokens", "contradict"]),
        ({"trace_file": "x", "shared_prefix_tokens": 5}, ["--trace", "--shared-prefix-tokens"]),
        ({"rate": 1.0, "time_scale": 2.0}, ["--trace", "--time-scale", "contradict"]),
        ({"length_divisor": 2}, ["--trace", "--length-divisor", "contradict"]),
        ({"max_in_flight": 2}, ["closed loop", "--max-in-flight"]),
        ({"trace_file": "x", "concurrency": 2, "time_scale": 2.0}, ["closed loop", "--time-scale"]),
        ({"trace_file": "x", "concurrency": 2, "output_tokens": "5"}, ["--trace", "--output-tok"]),
        ({"api": Api.CHAT, "prompt_kind": PromptKind.TOKENS}, ["tokens", "chat", "contradict"]),
        ({"api": Api.CHAT, "vocabulary": "5-9"}, ["words", "--vocabulary", "contradict"]),
        ({"prompt_tokens": "16", "shared_prefix_tokens": 16}, ["--shared-prefix-tokens", "below"]),
        ({"concurrency": 0}, ["--concurrency", "at least 1"]),
        ({"requests": 0}, ["--requests", "at least 1"]),
        ({"warmup": -1}, ["--warmup", "at least 0"]),
        ({"rate": 0.0}, ["--rate", "above 0"]),
        ({"rate": math.nan}, ["--rate", "above 0"]),
        ({"duration_s": math.inf}, ["--duration", "above 0"]),
        ({"timeout_s": -1.0}, ["--timeout-s", "above 0"]),
        ({"trace_file": "x", "time_scale": 0.0}, ["--time-scale", "above 0"]),
        ({"trace_file": "x", "length_divisor": 0}, ["--length-divisor", "at least 1"]),
        ({"temperature": -0.1}, ["--temperature"]),
        ({"temperature": math.nan}, ["--temperature"]),
        ({"vocabulary": "9-10"}, ["--vocabulary"]),
        ({"vocabulary": "x"}, ["--vocabulary"]),
        ({"limits": "x=1"}, ["--limits"]),
        ({"prompt_tokens": "none"}, ["--prompt-tokens"]),
        ({"output_tokens": "0"}, ["--output-tokens"]),
    ],
)
def test_contradictory_or_wrong_options_are_named(options, words):
    with pytest.raises(SpecError) as caught:
        checked(**options)
    for word in words:
        assert word in caught.value.message


def test_every_run_is_bounded():
    assert (checked().requests, checked().duration_s) == (100, 60.0)
    assert checked(requests=5).requests == 5
    assert checked(requests=5).duration_s == settings.MOST_DURATION_S
    assert checked(duration_s=5.0).requests == settings.MOST_REQUESTS


def test_prompt_kind_follows_the_api():
    assert checked().prompt_kind is PromptKind.TOKENS
    assert checked(api=Api.CHAT).prompt_kind is PromptKind.WORDS


def test_warmup_prompts_are_not_measured_prompts():
    configuration = checked(warmup=3, prompt_tokens="32", shared_prefix_tokens=8)
    warm = settings.plan_warmup(configuration)
    measured = list(itertools.islice(settings.plan(configuration), 3))
    assert len(warm) == 3
    prompts = [content(p.segments, alphabet=19_000, seed=1).tolist() for p in warm + measured]
    assert len({tuple(p[:8]) for p in prompts}) == 1
    assert len({tuple(p[8:16]) for p in prompts}) == 6


def test_a_trace_plan_keeps_moments_and_lengths():
    configuration = checked(trace_file="x", time_scale=2.0, length_divisor=10)
    planned = list(settings.plan(configuration, iter(parse_trace(AZURE, "a"))))
    assert [(p.prompt_tokens, p.output_tokens) for p in planned] == [(481, 1), (318, 1), (11, 3)]
    assert planned[1].offset_s == pytest.approx(0.104, abs=1e-5)
