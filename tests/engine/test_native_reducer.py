"""The native passes over logits find what torch's find, for every instruction set."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tokenpath.engine.kernels.native_module import native_module
from tokenpath.engine.kernels.native_reducer import NativeReducer
from tokenpath.engine.rows import CHUNK, TORCH, Rows
from tokenpath.engine.sampler import sample
from tokenpath.engine.sampling_state import SamplingState
from tokenpath.protocol.request import SamplingParams

pytestmark = pytest.mark.skipif(native_module() is None, reason="no C++ compiler when installed")
KERNELS = () if native_module() is None else native_module().usable()


@pytest.fixture(params=[(k, threads) for k in KERNELS for threads in (1, 3)], ids=str)
def reducer(request):
    kernels, threads = request.param
    return NativeReducer(native_module(), native_module().Team(threads), kernels)


def logits(rows, vocab):
    generator = torch.Generator().manual_seed(rows * vocab)
    return torch.randn(rows, vocab, generator=generator) * 5


@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("vocab", [1, 127, 128, 1000, 5 * CHUNK])
def test_maxima_are_exact_and_sums_within_rounding(reducer, rows, vocab):
    values = logits(rows, vocab)
    ours, plain = Rows(values, reducer), Rows(values, TORCH)
    assert np.array_equal(ours.maxima, plain.maxima)
    assert np.array_equal(ours.argmax(), values.argmax(-1).numpy())
    temperatures = np.linspace(0.3, 2.0, rows).tolist()
    some = list(range(rows))[::2]
    found = ours.sums(some, [temperatures[row] for row in some])
    wanted = plain.sums(some, [temperatures[row] for row in some])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-30)


def test_what_is_no_number_stays_in_its_row(reducer):
    values = logits(5, 300)
    values[1, 7] = math.nan
    values[2, 299] = math.inf
    values[3] = -math.inf
    ours, plain = Rows(values, reducer), Rows(values, TORCH)
    np.testing.assert_array_equal(ours.maxima, plain.maxima)  # counts NaN as equal to NaN
    sums = ours.sums(range(5), [1.0] * 5)
    assert np.isfinite(sums).all(axis=1).tolist() == [True, False, False, False, True]


def test_a_row_gives_the_same_bits_in_any_company(reducer):
    values = logits(9, 1000)
    together = Rows(values, reducer).sums(range(9), [0.7] * 9)
    for row in range(9):
        alone = Rows(values[row : row + 1], reducer).sums([0], [0.7])
        assert np.array_equal(alone[0], together[row])


@pytest.mark.parametrize(
    "cut", [{}, {"top_p": 0.9}, {"top_k": 7}, {"min_p": 0.05}, {"top_p": 0.5, "logprobs": 3}]
)
def test_the_sampler_draws_the_same_tokens(reducer, cut):
    values = logits(20, 3000)
    states = [
        SamplingState(SamplingParams(max_tokens=9, temperature=0.8, **cut), prompt=(), seed=seed)
        for seed in range(20)
    ]
    ours = sample(values.clone(), states, reducer)
    plain = sample(values.clone(), states)
    assert [one.token_id for one in ours] == [one.token_id for one in plain]
    for one, other in zip(ours, plain, strict=True):
        if one.scores is not None:
            assert one.scores.logprob == pytest.approx(other.scores.logprob, abs=1e-5)
