"""Llama, and what shares its shape: Mistral (with or without its sliding window), SmolLM."""

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
