"""Codes of a few bits in 32-bit words: a dense stream, lowest bits first, along one axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

WORD = 32


def unpack(
    words: torch.Tensor,
    bits: int,
    count: int,
    *,
    axis: Literal[0, 1],
    order: Sequence[int] | None = None,
) -> torch.Tensor:
    """The first ``count`` codes along an axis of int32 words [R, C], as uint8.

    ``order`` is where in a word its codes lie, if not one after the other. Raises ``ValueError``
    if there are fewer codes.
    """
    if words.shape[axis] * WORD < count * bits:
        raise ValueError(f"{words.shape[axis]} words hold no {count} codes of {bits} bits")
    # Codes lie alike in every so many words: one in 4 bits, three in 3 bits.
    span = bits // math.gcd(bits, WORD)
    missing = -words.shape[axis] % span
    if missing:
        padding = (0, missing) if axis == 1 else (0, 0, 0, missing)
        words = torch.nn.functional.pad(words, padding)
    shape = (*words.shape[:axis], -1, span, *words.shape[axis + 1 :])
    planes = words.reshape(shape).unbind(axis + 1)
    codes = [_code(planes, place * bits, bits) for place in range(span * WORD // bits)]
    if order is not None:
        codes = [codes[place] for place in order]
    stacked = torch.stack(codes, axis + 1).flatten(axis, axis + 1)
    return stacked.narrow(axis, 0, count)


def _code(planes: Sequence[torch.Tensor], start: int, bits: int) -> torch.Tensor:
    """The codes that start at one bit of every span of words."""
    word, offset = divmod(start, WORD)
    # A shift keeps the sign, which the mask takes away: never more bits are wanted than are there.
    low_bits = min(bits, WORD - offset)
    value = (planes[word] >> offset) & ((1 << low_bits) - 1)
    if low_bits < bits:
        value = value | ((planes[word + 1] & ((1 << (bits - low_bits)) - 1)) << low_bits)
    return value.to(torch.uint8)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The opposite of ``unpack`` along the last axis: uint8 [R, count] to int32 [R, words]."""
    rows, count = codes.shape
    span = bits // math.gcd(bits, WORD)
    per_span = span * WORD // bits
    padded = torch.nn.functional.pad(codes, (0, -count % per_span)).view(rows, -1, per_span).long()
    words = padded.new_zeros((rows, padded.shape[1], span + 1))
    for place in range(per_span):
        word, offset = divmod(place * bits, WORD)
        value = padded[:, :, place] << offset
        words[:, :, word] |= value & 0xFFFF_FFFF
        words[:, :, word + 1] |= value >> WORD
    signed = words[:, :, :span].flatten(1)
    signed = torch.where(signed >= 1 << (WORD - 1), signed - (1 << WORD), signed)
    return signed[:, : -(-count * bits // WORD)].to(torch.int32).contiguous()
