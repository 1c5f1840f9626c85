"""Rotary position embedding: frequencies, their stretching beyond the trained context, and angles.

Angles are computed once per step for the positions in it, in float32, and shared by all layers of
one kind; a table over the whole context would cost megabytes to save microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tokenpath.models.architecture import LayerKind, ModelConfig, RopeScaling


@dataclass(frozen=True, slots=True)
class Angles:
    """Cosines and sines of some tokens' positions, both float32 [T, 1, head_dim].

    A head's two halves are the two coordinates of each rotated plane. The first half of ``sin``
    carries the minus sign of the rotation, so that rotating ``x`` is
    ``x * cos + roll(x, head_dim / 2) * sin``.
    """

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class Rotary:
    """One rotary embedding: a frequency per plane, and a factor on cosines and sines."""

    inverse_frequencies: torch.Tensor
    """float32 [head_dim / 2], radians per position."""
    magnitude: float = 1.0

    def angles(self, positions: torch.Tensor) -> Angles:
        """Angles of integer positions [T]."""
        phase = positions.to(torch.float32)[:, None] * self.inverse_frequencies
        cos, sin = phase.cos() * self.magnitude, phase.sin() * self.magnitude
        return Angles(
            cos=torch.cat((cos, cos), dim=-1)[:, None, :],
            sin=torch.cat((-sin, sin), dim=-1)[:, None, :],
        )


def rotaries(config: ModelConfig, device: str) -> Mapping[LayerKind, Rotary]:
    """The rotary embedding of each kind of layer the model has.

    Sliding layers with a base of their own are not stretched: their window never reaches beyond
    the trained context. Without one they share the full layers' embedding, scaling included.
    """
    shared = _rotary(config.head_dim, config.rope_theta, config.rope_scaling, device)
    if config.rope_theta_local is None:
        return {"full": shared, "sliding": shared}
    return {
        "full": shared,
        "sliding": _rotary(config.head_dim, config.rope_theta_local, None, device),
    }


def _rotary(head_dim: int, theta: float, scaling: RopeScaling | None, device: str) -> Rotary:
    planes = torch.arange(0, head_dim, 2, dtype=torch.float32)
    plain = 1.0 / (theta ** (planes / head_dim))
    magnitude = 1.0
    if scaling is None:
        stretched = plain
    elif scaling.kind == "linear":
        stretched = plain / scaling.factor
    elif scaling.kind == "llama3":
        stretched = _llama3(plain, scaling)
    else:
        stretched = _yarn(plain, scaling, head_dim=head_dim, theta=theta)
        magnitude = _yarn_magnitude(scaling)
    return Rotary(stretched.to(device), magnitude)


def _llama3(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Slow planes are stretched by the factor, fast ones kept, those in between blended."""
    # How often a plane turns within the trained context decides how it is treated.
    turns = scaling.original_context_tokens * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return plain * kept + plain / scaling.factor * (1.0 - kept)


def _yarn(
    plain: torch.Tensor, scaling: RopeScaling, *, head_dim: int, theta: float
) -> torch.Tensor:
    """As ``_llama3``, but blended along the planes' index rather than their frequency."""

    def plane_turning(times: float) -> float:
        """The (fractional) plane that turns so often within the trained context."""
        return (
            head_dim
            * math.log(scaling.original_context_tokens / (times * 2 * math.pi))
            / (2 * math.log(theta))
        )

    first = max(math.floor(plane_turning(scaling.beta_fast)), 0)
    last = min(math.ceil(plane_turning(scaling.beta_slow)), head_dim - 1)
    ramp = torch.arange(head_dim // 2, dtype=torch.float32) - first
    # Where both ends fall on one plane, the ramp is a step just after it.
    stretched = (ramp / ((last - first) or 0.001)).clamp(0.0, 1.0)
    return plain * (1.0 - stretched) + plain / scaling.factor * stretched


def _yarn_magnitude(scaling: RopeScaling) -> float:
    """YaRN sharpens attention as the context is stretched, unless the model says by how much."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1.0 else 1.0
