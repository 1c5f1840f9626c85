"""Rounds a matrix column by column, each making up for the errors of those before (GPTQ).

Where the input channels' products are known, and not only how strong each is, what one weight's
rounding does wrong can be mended by the weights that are not rounded yet. The order of columns
stays as it is, so the result is stored as any other.
"""

from __future__ import annotations

import torch

from tokenpath.models.quantized.rounding import GroupCodes, round_groups

_DAMPING = 0.01
"""Of the mean strength, added to every channel's: how far the text is taken for the truth."""


def round_with_feedback(
    weight: torch.Tensor,
    products: torch.Tensor,
    *,
    bits: int,
    group: int,
    symmetric: bool,
    scale_dtype: torch.dtype,
) -> GroupCodes:
    """As ``round_groups``, with the mean products of input channels: float32 [K, K].

    Raises ``ValueError`` as ``round_groups``, and for products that no activations have.
    """
    columns = weight.shape[1]
    strengths = products.diagonal()
    upper = _inverse_factor(products)
    left = weight.clone()
    parts: list[GroupCodes] = []
    top = (1 << bits) - 1
    for begin in range(0, columns, group):
        end = begin + group
        found = round_groups(
            left[:, begin:end].contiguous(),
            bits=bits,
            group=group,
            symmetric=symmetric,
            scale_dtype=scale_dtype,
            importance=strengths[begin:end],
        )
        scale, zero = found.scale.float()[:, 0], found.zero.float()[:, 0]
        codes = torch.empty_like(found.codes)
        errors = torch.empty(len(weight), group)
        for place in range(group):
            column = begin + place
            value = left[:, column]
            code = (value / scale + zero).round_().clamp_(0, top)
            codes[:, place] = code.to(torch.uint8)
            error = (value - (code - zero) * scale) / upper[column, column]
            left[:, column:end] -= error[:, None] * upper[column, column:end]
            errors[:, place] = error
        left[:, end:] -= errors @ upper[begin:end, end:]
        parts.append(GroupCodes(codes, found.scale, found.zero))
    return GroupCodes(
        torch.cat([part.codes for part in parts], 1),
        torch.cat([part.scale for part in parts], 1),
        torch.cat([part.zero for part in parts], 1),
    )


def _inverse_factor(products: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of the damped products: float32 [K, K]."""
    wide = products.double()
    strengths = wide.diagonal()
    damping = _DAMPING * strengths.mean() + torch.finfo(torch.float32).tiny
    wide = wide + torch.diag_embed(damping.expand(len(wide)))
    lower, failed = torch.linalg.cholesky_ex(wide)
    if failed or not lower.isfinite().all():
        raise ValueError("the calibration's activations have no finite products")
    inverse = torch.cholesky_inverse(lower)
    upper: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return upper.float()
