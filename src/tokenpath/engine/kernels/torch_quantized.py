"""Quantized products in plain torch: the same arithmetic as the native kernels, without them.

It is what runs where the native module is missing, and what the native kernels are tested against.
Weights are int8 or int4. Activations are int8, with a scale for every 128 of them where weights are
int8 and one for a token where they are int4; everything else is as in ``torch_backend``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenpath.engine.kernels.quantize import (
    RUN,
    Bits,
    Int4Weight,
    Int8Weight,
    quantize_rows,
    to_int4,
    to_int8,
)

_ROWS_AT_A_TIME = 8192
"""Bounds the float32 copy of weights that a product makes."""


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """A ``Linear`` of rounded weights and activations."""

    weight: Int8Weight | Int4Weight
    bias: torch.Tensor | None
    """float32 [out]"""
    dtype: torch.dtype
    """Of the result."""

    @property
    def weight_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.weight, Int8Weight):
            product = _product(_rounded(x, RUN), self.weight.codes) * self.weight.scale
        else:
            product = _rounded(x, x.shape[-1]) @ self.weight.dequantize().t()
        if self.bias is not None:
            product += self.bias
        return product.to(self.dtype)


def _rounded(x: torch.Tensor, size: int) -> torch.Tensor:
    """float32 like x [M, K], rounded to 8 bits with a scale for every ``size`` values of a row."""
    parts = torch.split(x, size, -1)
    return torch.cat([codes * scale[:, None] for codes, scale in map(quantize_rows, parts)], -1)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """float32 [M, N] of float32 [M, K] and int8 [N, K]."""
    parts = torch.split(right, _ROWS_AT_A_TIME)
    return torch.cat([left @ part.float().t() for part in parts], 1)


def quantized_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, bits: Bits, dtype: torch.dtype
) -> QuantizedLinear:
    """Round a matrix [out, in]; ``dtype`` is that of the products."""
    rounded = to_int8(weight) if bits == 8 else to_int4(weight)  # noqa: PLR2004 - 8 bits
    return QuantizedLinear(rounded, None if bias is None else bias.float(), dtype)
