"""Quantized products in plain torch: the same arithmetic as the native kernels, without them.

It is what runs where the native module is missing, and what the native kernels are tested against.
Weights are int8 or int4 and activations int8, one scale a token; everything else is as in
``torch_backend``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenpath.engine.kernels.quantize import (
    Bits,
    Int4Weight,
    Int8Weight,
    quantize_rows,
    to_int4,
    to_int8,
)


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
        codes, scale = quantize_rows(x)
        if isinstance(self.weight, Int8Weight):
            product = _int8_product(codes, self.weight.codes).float() * self.weight.scale
        else:
            product = codes.float() @ self.weight.dequantize().t()
        product *= scale[:, None]
        if self.bias is not None:
            product += self.bias
        return product.to(self.dtype)


def _int8_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """int32 [M, N] of int8 [M, K] and [N, K], exact."""
    return torch._int_mm(left, right.t())  # noqa: SLF001 - torch has no public name for it


def quantized_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, bits: Bits, dtype: torch.dtype
) -> QuantizedLinear:
    """Round a matrix [out, in]; ``dtype`` is that of the products."""
    rounded = to_int8(weight) if bits == 8 else to_int4(weight)  # noqa: PLR2004 - 8 bits
    return QuantizedLinear(rounded, None if bias is None else bias.float(), dtype)
