"""The sampler against a naive reference, against exact probabilities, and against its neighbours."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tokenpath.engine.logprobs import spell
from tokenpath.engine.randomness import uniform
from tokenpath.engine.rows import CHUNK, Rows, descending
from tokenpath.engine.sampler import Sampled, sample
from tokenpath.engine.sampling_state import SamplingState
from tokenpath.protocol.errors import EngineError
from tokenpath.protocol.request import SamplingParams


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def state(*, prompt=(), output=(), seed=0, position=None, ends=(), **params) -> SamplingState:
    made = SamplingState(
        SamplingParams(max_tokens=1000, **params), prompt=prompt, seed=seed, end_ids=ends
    )
    for token in output:
        made.record(token)
    if position is not None:
        made.generated = position
    return made


def draw(logits: np.ndarray, *states: SamplingState) -> list:
    return sample(torch.tensor(np.atleast_2d(logits), dtype=torch.float32), states)


def reference_logits(logits: np.ndarray, s: SamplingState, prompt, output) -> np.ndarray:
    """Bias, penalties and mask, one token at a time."""
    p = s.params
    x = logits.astype(np.float32).copy()
    for token, bias in p.logit_bias.items():
        x[token] += np.float32(bias)
    raw = x.astype(np.float64)
    for token in range(len(x)):
        if token in prompt or token in output:
            r = np.float32(p.repetition_penalty)
            x[token] = x[token] / r if x[token] > 0 else x[token] * r
        if token in output:
            x[token] -= np.float32(output.count(token)) * np.float32(p.frequency_penalty)
            x[token] -= np.float32(p.presence_penalty)
    if s.generated < p.min_tokens:
        for token in s.end_ids:
            x[token] = -np.inf
    return raw, x.astype(np.float64)


def reference_draw(
    x: np.ndarray, p: SamplingParams, u: float, u_in_chunk: float, *, top_p=None, min_p=None
) -> int:
    """The obvious implementation in float64."""
    top_p = p.top_p if top_p is None else top_p
    min_p = p.min_p if min_p is None else min_p
    if p.temperature == 0:
        return int(np.argmax(x))
    weights = np.exp((x - x.max()) / p.temperature)
    weights /= weights.sum()
    filtered = p.top_k > 0 or p.top_p < 1 or p.min_p > 0
    if not filtered:
        starts = range(0, len(x), CHUNK)
        start = starts[reference_invert([weights[i : i + CHUNK].sum() for i in starts], u)]
        return start + reference_invert(weights[start : start + CHUNK], u_in_chunk)
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if p.top_k:
        order = order[: p.top_k]
    kept, total, mass = [], 0.0, sum(weights[i] for i in order)
    for token in order:
        if p.top_p < 1 and total >= top_p * mass:
            break
        if p.min_p > 0 and weights[token] < min_p * weights.max():
            break
        kept.append(token)
        total += weights[token]
    return kept[reference_invert([weights[token] for token in kept], u)]


def reference_invert(weights, u: float) -> int:
    total, cumulative = sum(weights), 0.0
    for index, weight in enumerate(weights):
        cumulative += weight
        if cumulative > u * total:
            return index
    return len(weights) - 1


logit = st.one_of(
    st.integers(-24, 24).map(lambda i: i / 4),  # many ties
    st.floats(-12, 12, width=32),
)
params = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.1, 0.7, 1.0, 2.0]),
        "top_k": st.integers(0, 40),
        "top_p": st.floats(0.05, 1.0),
        "min_p": st.floats(0.0, 1.0),
        "repetition_penalty": st.floats(0.5, 2.0),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "min_tokens": st.integers(0, 5),
    },
)


@given(st.data(), st.integers(2, 300), params)
def test_equals_a_naive_implementation(data, vocab, given_params):
    seed = data.draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    logits = np.resize(np.array(data.draw(st.lists(logit, min_size=2, max_size=60))), vocab)
    rng.shuffle(logits)
    token = st.integers(0, vocab - 1)
    prompt = data.draw(st.lists(token, max_size=6))
    output = data.draw(st.lists(token, max_size=6))
    ends = data.draw(st.lists(token, max_size=1))
    bias = data.draw(st.dictionaries(token, st.floats(-5, 5), max_size=3))
    k = data.draw(st.integers(0, 5))
    s = state(
        prompt=prompt,
        output=output,
        seed=seed,
        ends=ends,
        logit_bias=bias,
        logprobs=k,
        **given_params,
    )
    p = s.params
    raw, x = reference_logits(logits, s, prompt, output)
    (drawn,) = draw(logits, s)
    u, v = uniform(seed, len(output)), uniform(seed, len(output), 1)
    if drawn.token_id != reference_draw(x, p, u, v):
        # The cuts and the draw are exact up to rounding: there either side of a cut is right.
        assert drawn.token_id in {
            reference_draw(x, p, u + du, v + dv, top_p=p.top_p + dp, min_p=p.min_p * (1 + dm))
            for du in (-1e-6, 0, 1e-6)
            for dv in (-1e-6, 0, 1e-6)
            for dp in (-1e-6, 0, 1e-6)
            for dm in (-1e-9, 0, 1e-9)
        }
    logprobs = raw - (np.log(np.exp(raw - raw.max()).sum()) + raw.max())
    assert drawn.scores.logprob == pytest.approx(logprobs[drawn.token_id], abs=1e-5)
    order = sorted(range(vocab), key=lambda i: (-raw[i], i))[:k]
    assert [token for token, _ in drawn.scores.top] == order
    assert [value for _, value in drawn.scores.top] == pytest.approx(
        [logprobs[i] for i in order], abs=1e-5
    )


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
@pytest.mark.parametrize(
    "given_params",
    [
        {"top_p": 0.3}, {"top_p": 0.9}, {"top_p": 0.9999}, {"top_p": 0.99, "min_p": 0.01},
        {"min_p": 0.001}, {"top_k": 100}, {"top_k": 900}, {"top_k": 900, "top_p": 0.5}, {},
    ],
)  # fmt: skip
def test_equals_the_naive_implementation_on_many_tokens(scale, given_params):
    """Nuclei from a handful of tokens to nearly all, and more of them than there are chunks."""
    vocab = 20_000
    x = np.random.default_rng(5).normal(scale=scale, size=vocab).astype(np.float32)
    x = x.astype(np.float64)
    states = [state(seed=seed, **given_params) for seed in range(12)]
    drawn = [d.token_id for d in draw(np.tile(x, (12, 1)), *states)]
    expected = [
        reference_draw(x, s.params, uniform(s.seed, 0), uniform(s.seed, 0, 1)) for s in states
    ]
    # A draw within rounding of a boundary may fall to the neighbour; more than one is an error.
    assert sum(a != b for a, b in zip(drawn, expected, strict=True)) <= 1


# A small distribution, drawn from often: the frequencies must be those of the exact probabilities.

SMALL = np.array([2.0, 1.5, 1.5, 1.0, 0.5, 0.0, 0.0, -0.5, -1.0, -2.0, -3.0, -9.0])
DRAWS = 10_000
CRITICAL = {3: 30.7, 5: 35.9, 11: 49.6}
"""Chi-square values that chance exceeds once in a million, by degrees of freedom."""


def frequencies(given_params, *, over: str) -> np.ndarray:
    tokens = []
    for start in range(0, DRAWS, 500):
        numbers = range(start, start + 500)
        if over == "seeds":
            states = [state(seed=n, position=7, **given_params) for n in numbers]
        else:
            states = [state(seed=42, position=n, **given_params) for n in numbers]
        tokens += [drawn.token_id for drawn in draw(np.tile(SMALL, (500, 1)), *states)]
    return np.bincount(tokens, minlength=len(SMALL))


def distribution(x: np.ndarray, temperature=1.0) -> np.ndarray:
    weights = np.exp((x - x.max()) / temperature)
    return weights / weights.sum()


@pytest.mark.parametrize("over", ["seeds", "positions"])
@pytest.mark.parametrize(
    ("given_params", "kept"),
    [
        ({}, 12),
        ({"temperature": 2.0}, 12),
        ({"top_k": 4}, 4),
        ({"top_p": 0.8, "temperature": 1.3}, 6),
        ({"min_p": 0.2}, 5),
    ],
)
def test_frequencies_are_the_probabilities(given_params, kept, over):
    probabilities = distribution(SMALL, given_params.get("temperature", 1.0))
    if "top_p" in given_params:
        kept = 1 + int(np.searchsorted(probabilities.cumsum(), given_params["top_p"]))
    if "min_p" in given_params:
        kept = int((probabilities >= given_params["min_p"] * probabilities[0]).sum())
    probabilities[kept:] = 0  # SMALL is sorted, so the cut is a place in it
    probabilities /= probabilities.sum()
    counts = frequencies(given_params, over=over)
    assert counts[kept:].sum() == 0
    expected = probabilities[:kept] * DRAWS
    chi_square = ((counts[:kept] - expected) ** 2 / expected).sum()
    assert chi_square < CRITICAL[min(limit for limit in CRITICAL if limit >= kept - 1)]


# A row is not touched by its neighbours.


@given(st.data(), st.integers(1, 3000), st.lists(params, min_size=2, max_size=12))
def test_a_row_gives_the_same_alone_and_in_a_batch(data, vocab, many):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = rng.normal(scale=4, size=(len(many), vocab)).astype(np.float32)
    logits = np.round(logits, data.draw(st.integers(0, 4)))

    def states():
        return [
            state(
                seed=index, prompt=[0], output=[vocab - 1], logprobs=index % 3 or None,
                logit_bias={0: 1.0} if index % 2 else {}, ends=[0], **given_params,
            )
            for index, given_params in enumerate(many)
        ]  # fmt: skip

    together = draw(logits, *states())
    alone = [draw(row, s)[0] for row, s in zip(logits, states(), strict=True)]
    assert together == [
        Sampled(a.token_id, a.scores) if isinstance(a, Sampled) else b
        for a, b in zip(alone, together, strict=True)
    ]


@pytest.mark.parametrize("threads", [1, 2])
def test_large_vocabulary_rows_are_independent_too(threads):
    torch.set_num_threads(threads)
    rng = np.random.default_rng(3)
    logits = torch.tensor(rng.normal(scale=3, size=(20, 262_144)), dtype=torch.float32)
    logits = logits.bfloat16().float()  # as a bfloat16 model makes them: full of ties
    kinds = [
        {}, {"temperature": 0.0}, {"top_p": 0.95}, {"top_p": 0.5, "temperature": 0.3},
        {"top_k": 50, "top_p": 0.9}, {"min_p": 0.1}, {"top_k": 5000},
    ]  # fmt: skip

    def states():
        return [state(seed=i, logprobs=3, **kinds[i % len(kinds)]) for i in range(20)]

    together = sample(logits.clone(), states())
    for index, alone in enumerate(states()):
        assert sample(logits[index : index + 1].clone(), [alone]) == [together[index]]


def test_bad_logits_fail_their_row_only():
    logits = np.zeros((6, 130))
    logits[1, 129] = np.nan
    logits[2, 5] = np.inf
    logits[3, :] = -np.inf
    logits[4, 7:] = -np.inf  # a masked vocabulary is fine
    for given_params in ({"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.5}):
        drawn = draw(logits, *(state(seed=i, logprobs=2, **given_params) for i in range(6)))
        assert [isinstance(d, EngineError) for d in drawn] == [
            False,
            True,
            True,
            True,
            False,
            False,
        ]
        assert "NaN or infinity" in str(drawn[1])
        assert "NaN or infinity" in str(drawn[2])
        assert "-inf" in str(drawn[3])
        assert drawn[4].token_id < 7


def test_greedy_takes_the_lowest_id_of_a_tie():
    logits = np.zeros(500)
    logits[[130, 131, 400]] = 2.0
    assert draw(logits, state(temperature=0.0))[0].token_id == 130


def test_a_very_cold_temperature_is_greedy_and_finite():
    logits = np.linspace(-500, 500, 200)
    for temperature in (1e-300, 1e-6, 1e-4):
        assert draw(logits, state(temperature=temperature))[0].token_id == 199


def test_the_smallest_repetition_penalties_are_finite():
    logits = np.linspace(-500, 500, 200)
    for penalty in (5e-324, 1e-40, 1e-7, 1e-6):
        for given_params in ({"temperature": 0.0}, {"temperature": 2.0}, {"top_p": 0.9}):
            drawn = draw(
                logits,
                state(prompt=[5, 150, 160], repetition_penalty=penalty, logprobs=1, **given_params),
            )
            assert drawn[0].token_id == 160


def test_end_tokens_come_only_after_min_tokens():
    logits = np.zeros(10)
    logits[[3, 4]] = 50.0
    s = state(temperature=0.0, min_tokens=2, ends=[3, 4])
    seen = []
    for _ in range(3):
        token = draw(logits, s)[0].token_id
        s.record(token)
        seen.append(token)
    assert seen == [0, 0, 3]


def test_logprobs_are_of_the_model_not_of_the_sampler():
    """Bias counts; penalties, masks, temperature and cuts do not."""
    logits = np.array([1.0, 0.0, -1.0])
    s = state(
        output=[0], logit_bias={2: 3.0}, frequency_penalty=2.0, temperature=0.2, top_k=1,
        min_tokens=9, ends=[2], logprobs=3,
    )  # fmt: skip
    (drawn,) = draw(logits, s)
    assert drawn.token_id == 1  # 2 is masked, 0 is penalized
    expected = np.log(distribution(np.array([1.0, 0.0, 2.0])))
    assert drawn.scores.logprob == pytest.approx(expected[1], abs=1e-6)
    assert [token for token, _ in drawn.scores.top] == [2, 0, 1]


def test_scores_are_spelled_with_their_bytes():
    class Bytes:
        def token_bytes(self, token_id):
            return [b"a", b"\xf0", "é".encode()][token_id]

    (drawn,) = draw(np.array([0.0, 2.0, 1.0]), state(temperature=0.0, logprobs=2))
    spelled = spell(1, drawn.scores, Bytes())
    assert (spelled.token, spelled.token_bytes) == ("\ufffd", b"\xf0")
    assert [(text, data) for _, _, text, data in spelled.top] == [
        ("\ufffd", b"\xf0"),
        ("é", "é".encode()),
    ]


@given(st.lists(logit, min_size=1, max_size=700), st.integers(1, 800))
@example([0.0, -0.0] * 100, 150)
def test_largest_is_the_head_of_a_full_sort(values, count):
    logits = np.array(values, dtype=np.float32)
    ids, found = Rows(torch.tensor(logits)[None]).largest(0, count)
    order = sorted(range(len(values)), key=lambda i: (-logits[i], i))[:count]
    assert ids.tolist() == order
    assert found.tolist() == logits[order].tolist()
    assert descending(logits).tolist() == sorted(range(len(values)), key=lambda i: (-logits[i], i))


def test_uniform_draws_are_uniform_and_unrelated():
    draws = np.array([[uniform(seed, position) for position in range(100)] for seed in range(200)])
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = np.histogram(draws, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 75  # 19 degrees of freedom, one in a billion
    assert abs(np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(draws[:, :-1].ravel(), draws[:, 1:].ravel())[0, 1]) < 0.03
    second = np.array([[uniform(s, p, 1) for p in range(100)] for s in range(200)])
    assert abs(np.corrcoef(draws.ravel(), second.ravel())[0, 1]) < 0.03
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)
    assert len({uniform(2**70 + seed, 0) for seed in range(100)}) == 100
