"""Qwen 2 and 2.5: Llama's shape with biases on q, k and v, which the config announces."""

from __future__ import annotations

from tokenpath.engine.layers import Decoder, PreNormBlock
from tokenpath.engine.loading import WeightLoader
from tokenpath.models.architecture import ModelConfig


def build(config: ModelConfig, weights: WeightLoader) -> Decoder:
    """Take the weights; see ``registry.Family``."""
    blocks = [
        PreNormBlock.load(weights, config, layer)
        for layer in weights.backend.share.layers(config.layers)
    ]
    return Decoder.load(weights, config, blocks)
