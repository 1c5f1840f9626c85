"""Gemma 3 (text): sliding and global layers, norms before and after each part, scaled embeddings.

Its norms store ``weight - 1``; its sliding layers have a rotary base of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenpath.engine.layers import Attention, Decoder, GatedMLP, RMSNorm, Step
from tokenpath.engine.loading import WeightLoader
from tokenpath.models.architecture import ModelConfig

_NORM_OFFSET = 1.0


@dataclass(frozen=True, slots=True)
class _Block:
    """Norm, attention, norm, add; norm, feed-forward, norm, add."""

    attention_norm: RMSNorm
    attention: Attention
    attention_out_norm: RMSNorm
    mlp_norm: RMSNorm
    mlp: GatedMLP
    mlp_out_norm: RMSNorm

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        attended = self.attention(self.attention_norm.into_linear(x), step)
        x = x + self.attention_out_norm(attended)
        return x + self.mlp_out_norm(self.mlp(self.mlp_norm.into_linear(x)))


def build(config: ModelConfig, weights: WeightLoader) -> Decoder:
    """Take the weights; see ``registry.Family``."""
    blocks = [
        _load_block(config, weights, layer) for layer in weights.backend.share.layers(config.layers)
    ]
    # The model was trained with this factor rounded to the activations' type.
    scale = torch.tensor(config.hidden_size**0.5, dtype=weights.dtype).item()
    return Decoder.load(weights, config, blocks, embedding_scale=scale, norm_offset=_NORM_OFFSET)


def _load_block(config: ModelConfig, weights: WeightLoader, layer: int) -> _Block:
    prefix = f"model.layers.{layer}"

    def norm(name: str) -> RMSNorm:
        return RMSNorm.load(weights, f"{prefix}.{name}", config, offset=_NORM_OFFSET)

    attention = f"{prefix}.self_attn"
    query_key = RMSNorm.load_query_key(weights, attention, config, offset=_NORM_OFFSET)
    return _Block(
        attention_norm=norm("input_layernorm"),
        attention=Attention.load(weights, attention, config, layer, query_key_norm=query_key),
        attention_out_norm=norm("post_attention_layernorm"),
        mlp_norm=norm("pre_feedforward_layernorm"),
        mlp=GatedMLP.load(weights, f"{prefix}.mlp", config),
        mlp_out_norm=norm("post_feedforward_layernorm"),
    )
