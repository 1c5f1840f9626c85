"""Makes keys fit for one 8-bit scale a head, from what the weights alone say of their channels.

Some channels of a model's keys are a hundred times larger than the others, always the same ones: a
large bias, or a large weight of the keys' norm, makes them so. Under one scale the others would be
rounded away. So keys are divided by each channel's expected size before they are rounded, and
queries multiplied with it: their products are the same, and queries have 16 bits to spare for it.
Rotation mixes the two channels of a plane, so both have the plane's size.
"""

from __future__ import annotations

import torch

from tokenpath.engine.kernels.base import AttentionSpec

_CONTENT = 1.0
"""Size that a key's content adds to its bias: what projections of normed activations have."""


def key_balance(
    spec: AttentionSpec, *, bias: torch.Tensor | None, norm: torch.Tensor | None
) -> torch.Tensor | None:
    """Factors float32 [heads + kv_heads, head_dim] for rotated queries and keys; None: all are 1.

    ``bias`` [(heads + 2 * kv_heads) * head_dim] is that of the fused q, k, v projection; ``norm``
    [heads + kv_heads, head_dim] the weight of the norm of queries and keys, which decides alone
    where there is one.
    """
    keys = slice(spec.heads, spec.heads + spec.kv_heads)
    if norm is not None:
        size = _of_planes(norm[keys].float())
        size = size.clamp(min=1e-3 * float(size.amax()) or 1.0)
    elif bias is not None:
        size = _of_planes(bias.float().view(-1, spec.head_dim)[keys])
        size = (size.square() + _CONTENT**2).sqrt()
    else:
        return None
    queries = size.repeat_interleave(spec.heads // spec.kv_heads, dim=0)
    return torch.cat([queries, 1 / size])


def _of_planes(channels: torch.Tensor) -> torch.Tensor:
    """Root mean square over a plane's two channels, for both: [kv_heads, head_dim] twice."""
    planes = channels.view(len(channels), 2, -1).square().mean(-2).sqrt()
    return torch.cat([planes, planes], dim=-1)
