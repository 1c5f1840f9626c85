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
_FEWER_STEPS = tuple(range(14, 5, -1))
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

    def rows(self, order: torch.Tensor) -> Int8Weight:
        """The same rows in another order."""
        return Int8Weight(self.codes[order], self.scale[order])

    def dequantize(self) -> torch.Tensor:
        """float32 [N, K]."""
        return self.codes.float() * self.scale[:, None]


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """``weight[n, k] = scale[n, g] * codes[n, k] - minimum[n, g]`` with ``g = k // 32``."""

    codes: torch.Tensor
    """uint8 [N, K], from 0 to 15, one a byte."""
    scale: torch.Tensor
    """float16 [N, K / 32]"""
    minimum: torch.Tensor
    """float16 [N, K / 32]"""

    @property
    def nbytes(self) -> int:
        """Memory of the weight."""
        return self.codes.nbytes + self.scale.nbytes + self.minimum.nbytes

    def rows(self, order: torch.Tensor) -> Int4Weight:
        """The same rows in another order."""
        return Int4Weight(self.codes[order], self.scale[order], self.minimum[order])

    def dequantize(self) -> torch.Tensor:
        """float32 [N, K]."""
        groups = self.codes.view(len(self.codes), -1, GROUP).float()
        values = groups * self.scale.float()[:, :, None] - self.minimum.float()[:, :, None]
        return values.flatten(1)


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
    """Round a matrix [N, K], K a multiple of 32, to 4 bits with a scale and minimum per group.

    A group that came from a 4-bit format is found again exactly, up to the rounding of its scale
    and minimum to half precision: its values lie on a grid, and so does the result.
    """
    parts = [_int4_rows(part) for part in _parts(weight)]
    return Int4Weight(
        torch.cat([p.codes for p in parts]),
        torch.cat([p.scale for p in parts]),
        torch.cat([p.minimum for p in parts]),
    )


def _int4_rows(weight: torch.Tensor) -> Int4Weight:
    values = weight.float().reshape(-1, GROUP)
    low, high = values.amin(-1), values.amax(-1)
    span = high - low
    steps = torch.full_like(span, 15.0)
    error = _grid_error(values, low, span, steps)
    # Values on a grid that use fewer than its 16 places: look for their number of steps.
    rest = torch.nonzero(error > 1e-5 * span.square()).squeeze(1)
    for count in _FEWER_STEPS:
        if len(rest) == 0:
            break
        tried = torch.full_like(span[rest], float(count))
        found = _grid_error(values[rest], low[rest], span[rest], tried)
        better = found < 0.01 * error[rest]
        steps[rest[better]] = float(count)
        rest = rest[~better]
    scale = (span / steps).half()
    minimum = (-low).half()
    inverse = torch.where(scale > 0, 1.0 / scale.float(), torch.zeros_like(span))
    codes = ((values + minimum.float()[:, None]) * inverse[:, None]).round().clamp(0, 15)
    rows = len(weight)
    return Int4Weight(
        codes.to(torch.uint8).view(rows, -1), scale.view(rows, -1), minimum.view(rows, -1)
    )


def _grid_error(
    values: torch.Tensor, low: torch.Tensor, span: torch.Tensor, steps: torch.Tensor
) -> torch.Tensor:
    """Largest squared distance of each group's values from a grid of so many steps."""
    unit = torch.where(span > 0, span / steps, torch.ones_like(span))[:, None]
    place = (values - low[:, None]) / unit
    return ((place - place.round()).abs().amax(-1) * unit[:, 0]).square()
