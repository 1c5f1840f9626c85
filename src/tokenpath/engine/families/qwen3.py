"""Qwen 3: as Llama, with an RMS norm on every query and key head and heads of a free size."""

from __future__ import annotations

from tokenpath.engine.layers import Decoder, PreNormBlock
from tokenpath.engine.loading import WeightLoader
from tokenpath.models.architecture import ModelConfig


def build(config: ModelConfig, weights: WeightLoader) -> Decoder:
    """Take the weights; see ``registry.Family``."""
    blocks = [
        PreNormBlock.load(weights, config, layer, query_key_norms=True)
        for layer in weights.backend.share.layers(config.layers)
    ]
    return Decoder.load(weights, config, blocks)
