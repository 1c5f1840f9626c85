"""Rounds weights to 8 or 4 bits: what the quantized products, native or torch, compute with.

Only weights are rounded here, once, when a model is loaded. Activations are rounded per token as
they come (``quantize_rows``), by whoever multiplies them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Bits = Literal[4, 8]

GROUP = 32
"""Weights of a row that share a scale and a minimum in 4 bits."""
RUN = 128
"""Activations of a token that share a scale where weights have 8 bits."""
BLOCK = 8
"""Groups of a row that share the units in which their scales and minima are whole numbers."""
_ROWS_AT_A_TIME = 2048
"""Bounds the float32 copies that rounding makes."""


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """``weight[n, k] = scale[n] * codes[n, k]``."""

    codes: torch.Tensor
    """int8 [N, K], from -127 to 127."""
    scale: torch.Tensor
    """float32 [N]"""

    @property
    def nbytes(self) -> int:
        """Memory of the weight."""
        return self.codes.nbytes + self.scale.nbytes

    def dequantize(self) -> torch.Tensor:
        """float32 [N, K]."""
        return self.codes.float() * self.scale[:, None]


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """Four bits and a group's scale and minimum, themselves 8-bit numbers in a block's units.

    ``weight[n, k] = unit[n, b] * scale[n, g] * codes[n, k] - low_unit[n, b] * minimum[n, g]`` with
    ``g = k // 32`` and ``b = g // 8``. GGUF's Q4_K has this form too, and is taken over exactly.
    """

    codes: torch.Tensor
    """uint8 [N, K], from 0 to 15, one a byte."""
    scale: torch.Tensor
    """uint8 [N, K / 32]"""
    minimum: torch.Tensor
    """uint8 [N, K / 32]"""
    unit: torch.Tensor
    """float16 [N, ceil(K / 256)]"""
    low_unit: torch.Tensor
    """float16 [N, ceil(K / 256)]"""

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """All tensors, each with a row for each of the weight's."""
        return self.codes, self.scale, self.minimum, self.unit, self.low_unit

    @property
    def nbytes(self) -> int:
        """Memory of the weight."""
        return sum(part.nbytes for part in self.parts)

    def dequantize(self) -> torch.Tensor:
        """float32 [N, K]."""
        groups = self.codes.view(*self.scale.shape, GROUP).float()
        scale = _of_units(self.scale, self.unit)
        minimum = _of_units(self.minimum, self.low_unit)
        return (groups * scale[:, :, None] - minimum[:, :, None]).flatten(1)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 with one scale a row: codes int8 [N, K] and scales float32 [N].

    A row that holds NaN or an infinity gets a NaN scale.
    """
    x = x.float()
    largest = x.abs().amax(-1)
    scale = largest / 127.0
    inverse = torch.where(largest > 0, 127.0 / largest, torch.zeros_like(largest))
    codes = (x * inverse[:, None]).round().clamp(-127, 127).nan_to_num(0.0).to(torch.int8)
    return codes, torch.where(scale.isfinite(), scale, torch.full_like(scale, torch.nan))


def _parts(weight: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.split(weight, _ROWS_AT_A_TIME))


def to_int8(weight: torch.Tensor) -> Int8Weight:
    """Round a matrix [N, K] to 8 bits with a scale for each row."""
    parts = [quantize_rows(part) for part in _parts(weight)]
    return Int8Weight(torch.cat([c for c, _ in parts]), torch.cat([s for _, s in parts]))


def to_int4(weight: torch.Tensor) -> Int4Weight:
    """Round a matrix [N, K], K a multiple of 32, to 4 bits with a scale and minimum per group."""
    parts = zip(*(_int4_rows(part).parts for part in _parts(weight)), strict=True)
    return Int4Weight(*(torch.cat(part) for part in parts))


def take_int4(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> Int4Weight:
    """Weights that are 4-bit codes already: ``weight = scale * (codes - zero)`` in groups of 32.

    ``codes`` is uint8 [N, K], ``scale`` and ``zero`` are float32 [N, K / 32], none negative. Codes
    stay as they are; scales are rounded to the 8-bit numbers of their block, and minima so that a
    group's zero stays where it was as nearly as they allow.
    """
    whole, unit = _nearest_in_units(scale)
    common = zero[0, 0]
    if (zero == common).all():  # symmetric: a minimum is the same multiple of every scale
        low_unit, minimum = (unit.float() * common).half(), whole
    else:
        minimum, low_unit = _nearest_in_units(zero * _of_units(whole, unit))
    return Int4Weight(codes.contiguous(), whole, minimum, unit, low_unit)


def _nearest_in_units(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``_in_units``, rounded to the nearest."""
    blocks = torch.nn.functional.pad(values, (0, -values.shape[1] % BLOCK)).view(
        len(values), -1, BLOCK
    )
    largest = blocks.amax(-1)
    unit = torch.where(largest > 0, largest / 255.0 * (1 + 2**-10) + 2**-24, largest).half()
    count = torch.where(unit[:, :, None] > 0, blocks / unit.float()[:, :, None], blocks)
    whole = count.round().clamp(0, 255).to(torch.uint8).flatten(1)
    return whole[:, : values.shape[1]].contiguous(), unit


def _int4_rows(weight: torch.Tensor) -> Int4Weight:
    values = weight.float().view(len(weight), -1, GROUP)
    minimum, low_unit = _in_units((-values.amin(-1)).clamp(min=0.0))
    floor = _of_units(minimum, low_unit)
    scale, unit = _in_units((values.amax(-1) + floor).clamp(min=0.0) / 15.0)
    step = _of_units(scale, unit)
    inverse = torch.where(step > 0, 1.0 / step, torch.zeros_like(step))
    codes = ((values + floor[:, :, None]) * inverse[:, :, None]).round().clamp(0, 15)
    return Int4Weight(codes.to(torch.uint8).flatten(1), scale, minimum, unit, low_unit)


def _in_units(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Non-negative [N, G] as whole numbers, rounded up, of a unit that 8 neighbours share.

    Rounded up, so that the largest and smallest weights of a group stay within its 16 places.
    """
    blocks = torch.nn.functional.pad(values, (0, -values.shape[1] % BLOCK)).view(
        len(values), -1, BLOCK
    )
    largest = blocks.amax(-1)
    # Half precision rounds by up to 2^-11 of the value, or by 2^-25: not below what is needed.
    unit = torch.where(largest > 0, largest / 255.0 * (1 + 2**-10) + 2**-24, largest).half()
    count = torch.where(unit[:, :, None] > 0, blocks / unit.float()[:, :, None], blocks)
    whole = (count - 1e-3).ceil().clamp(0, 255).to(torch.uint8).flatten(1)
    return whole[:, : values.shape[1]].contiguous(), unit


def _of_units(whole: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """float32 [N, G]: the opposite of ``_in_units``."""
    return whole.float() * unit.float().repeat_interleave(BLOCK, 1)[:, : whole.shape[1]]
