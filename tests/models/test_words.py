"""Codes in words: any bits, any length, either axis; what is packed comes back."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenpath.models.quantized.form import AWQ_ORDER
from tokenpath.models.quantized.words import pack, unpack

sizes = st.integers(1, 100)


def drawn(seed, rows, count, bits):
    numbers = np.random.default_rng(seed).integers(0, 1 << bits, (rows, count))
    return torch.from_numpy(numbers.astype(np.uint8))


@given(st.integers(1, 8), st.integers(1, 5), sizes, st.integers(0, 2**32))
def test_a_stream_of_bits(bits, rows, count, seed):
    """Against the definition: bit b of code c is bit ``c * bits + b`` of the row's words."""
    codes = drawn(seed, rows, count, bits)
    words = pack(codes, bits)
    assert words.dtype == torch.int32
    assert words.shape == (rows, -(-count * bits // 32))
    stream = np.unpackbits(words.numpy().view(np.uint8), axis=1, bitorder="little")
    wanted = (codes.numpy()[..., None] >> np.arange(bits)) & 1
    assert (stream[:, : count * bits].reshape(rows, count, bits) == wanted).all()
    assert not stream[:, count * bits :].any()
    assert torch.equal(unpack(words, bits, count, axis=1), codes)
    assert torch.equal(unpack(words.t().contiguous(), bits, count, axis=0), codes.t())


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 12), st.integers(0, 2**32))
def test_any_words_at_all(bits, rows, words, seed):
    """Unused bits, and the sign of a word, change nothing."""
    raw = np.random.default_rng(seed).integers(-(2**31), 2**31, (rows, words)).astype(np.int32)
    count = words * 32 // bits
    found = unpack(torch.from_numpy(raw), bits, count, axis=1).numpy()
    stream = np.unpackbits(raw.view(np.uint8), axis=1, bitorder="little")
    values = stream[:, : count * bits].reshape(rows, count, bits).astype(int)
    assert (found == (values << np.arange(bits)).sum(-1)).all()


def test_an_order_within_words():
    word = torch.tensor([[0x76543210]], dtype=torch.int32)
    assert unpack(word, 4, 8, axis=1, order=AWQ_ORDER).tolist() == [[0, 4, 1, 5, 2, 6, 3, 7]]


def test_more_codes_than_there_are():
    with pytest.raises(ValueError, match="2 words hold no 17 codes of 4 bits"):
        unpack(torch.zeros((1, 2), dtype=torch.int32), 4, 17, axis=1)
