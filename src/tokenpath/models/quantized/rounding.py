"""Rounds a matrix to the codes and scales of a checkpoint, with the least error that matters.

Each group's scale is searched: a little below what its largest weight asks for, most weights come
nearer to a code. What counts is the error of the product, so squared errors are weighted by the
mean square of the activation that each input channel was seen to have; without a calibration all
channels count the same. And a large weight counts more than a small one: models lean on the few
that they have, and scales that cut them off cost more than the squares of their errors say.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SHRINKS = tuple(1.0 - 0.03 * step for step in range(17))
"""Parts of a group's range that are tried as its scale's."""
_REFINEMENTS = 3
_TRIED_OF_8_BITS = 3
"""So many codes leave little to gain."""
_WEIGHTS_AT_A_TIME = 1 << 20
_CODE_BITS = 8
"""Codes of so many bits are symmetric about their middle, without the one below."""


@dataclass(frozen=True, slots=True)
class GroupCodes:
    """``weight[n, k] = scale[n, g] * (codes[n, k] - zero[n, g])`` in groups along a row."""

    codes: torch.Tensor
    """uint8 [N, K], from 0."""
    scale: torch.Tensor
    """[N, G], in the dtype that is stored."""
    zero: torch.Tensor
    """uint8 [N, G]"""

    def dequantize(self) -> torch.Tensor:
        """float32 [N, K]."""
        grouped = self.codes.view(*self.scale.shape, -1).float()
        scale, zero = self.scale.float()[:, :, None], self.zero.float()[:, :, None]
        return ((grouped - zero) * scale).flatten(1)


def round_groups(
    weight: torch.Tensor,
    *,
    bits: int,
    group: int,
    symmetric: bool,
    scale_dtype: torch.dtype,
    importance: torch.Tensor | None = None,
) -> GroupCodes:
    """Codes of a float32 matrix [N, K], whose rows are whole groups.

    ``importance`` [K] is what a squared error of each input channel counts. Raises ``ValueError``
    for rows that are not whole groups or hold NaN or an infinity.
    """
    rows, columns = weight.shape
    if columns % group:
        raise ValueError(f"rows of {columns} weights are no whole groups of {group}")
    if not weight.isfinite().all():
        raise ValueError("there are weights that are not finite")
    counts = torch.ones(columns) if importance is None else importance.float()
    # Channels that never fired may fire elsewhere: they count a little.
    counts = counts.clamp(min=float(counts.mean()) * 1e-3 + 1e-30).view(1, -1, group)
    step = max(1, _WEIGHTS_AT_A_TIME // columns)
    parts = [
        _search(part.view(len(part), -1, group), counts, bits, scale_dtype, symmetric=symmetric)
        for part in torch.split(weight, step)
    ]
    codes, scale, zero = (torch.cat(part) for part in zip(*parts, strict=True))
    return GroupCodes(codes.view(rows, columns), scale, zero)


def _search(
    values: torch.Tensor,
    counts: torch.Tensor,
    bits: int,
    scale_dtype: torch.dtype,
    *,
    symmetric: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [n, G, g], scales and zeros [n, G] of float32 groups [n, G, g]."""
    typical = values.square().mean((1, 2), keepdim=True).sqrt()
    counts = counts * (typical + values.abs())
    top = (1 << bits) - 1
    lowest = 1 if symmetric and bits == _CODE_BITS else 0
    middle = 1 << (bits - 1)
    low, high = values.amin(-1).clamp(max=0.0), values.amax(-1).clamp(min=0.0)
    widest = torch.maximum(-low, high) / (top - middle) if symmetric else (high - low) / top

    def stored(scale: torch.Tensor) -> torch.Tensor:
        return scale.clamp(min=torch.finfo(scale_dtype).tiny).to(scale_dtype).float()

    def coded(scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        return (values / scale[:, :, None] + zero[:, :, None]).round_().clamp_(lowest, top)

    def error(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        meant = (codes - zero[:, :, None]) * scale[:, :, None]
        return (meant.sub_(values).square_().mul_(counts)).sum(-1)

    best_scale, best_zero = stored(widest), torch.full_like(low, float(middle))
    best = torch.full_like(low, torch.inf)
    for shrink in SHRINKS if bits < _CODE_BITS else SHRINKS[:_TRIED_OF_8_BITS]:
        scale = stored(widest * shrink)
        zero = best_zero
        if not symmetric:
            zero = (-low * shrink / scale).round().clamp(0, top)
        found = error(coded(scale, zero), scale, zero)
        better = found < best
        best = torch.where(better, found, best)
        best_scale = torch.where(better, scale, best_scale)
        best_zero = torch.where(better, zero, best_zero)
    for _ in range(_REFINEMENTS):
        # With these codes, the scale of the least error; with that scale, perhaps better codes.
        shifted = coded(best_scale, best_zero) - best_zero[:, :, None]
        weighted = shifted * counts
        norm = (weighted * shifted).sum(-1)
        ideal = (weighted * values).sum(-1) / norm.clamp(min=torch.finfo(torch.float32).tiny)
        scale = stored(torch.where(norm > 0, ideal, best_scale))
        found = error(coded(scale, best_zero), scale, best_zero)
        better = found < best
        best = torch.where(better, found, best)
        best_scale = torch.where(better, scale, best_scale)
    codes = coded(best_scale, best_zero).to(torch.uint8)
    return codes, best_scale.to(scale_dtype), best_zero.to(torch.uint8)
