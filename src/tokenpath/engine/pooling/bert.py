"""BERT and RoBERTa: absolute positions, attention both ways, a norm after each part.

Products and attention run in the model's dtype; norms, pooling and the classification head's answer
in float32 whatever that is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from tokenpath.engine.pooling.encoder_weights import EncoderWeights
from tokenpath.engine.pooling.ragged import Layout, RaggedAttention, plan_attention
from tokenpath.models.encoder import Activation, EncoderConfig, head_names


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: torch.Tensor
    bias: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)

    @classmethod
    def load(cls, weights: EncoderWeights, *names: str) -> _Linear:
        """Matrices with the same input, stacked in the order given."""
        return cls(
            torch.cat([weights.take(f"{name}.weight") for name in names]),
            torch.cat([weights.take(f"{name}.bias") for name in names]),
        )


@dataclass(frozen=True, slots=True)
class _Norm:
    """Of the sum of a part's input and output."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        normed = functional.layer_norm(
            x.float(), self.weight.shape, self.weight, self.bias, self.eps
        )
        return normed.to(x.dtype)

    @classmethod
    def load(cls, weights: EncoderWeights, name: str, eps: float) -> _Norm:
        return cls(
            weights.take(f"{name}.weight", dtype=torch.float32),
            weights.take(f"{name}.bias", dtype=torch.float32),
            eps,
        )


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: _Linear
    out: _Linear
    attention_norm: _Norm
    up: _Linear
    down: _Linear
    norm: _Norm
    heads: int
    activation: Activation

    def __call__(self, x: torch.Tensor, attention: RaggedAttention) -> torch.Tensor:
        """[T, hidden] to [T, hidden]."""
        qkv = self.qkv(x).view(len(x), 3, self.heads, -1)
        x = self.attention_norm(x + self.out(attention(qkv)))
        return self.norm(x + self.down(_activated(self.up(x), self.activation)))

    @classmethod
    def load(cls, weights: EncoderWeights, config: EncoderConfig, layer: int) -> _Layer:
        at = f"encoder.layer.{layer}"
        own = f"{at}.attention.self"
        return cls(
            qkv=_Linear.load(weights, f"{own}.query", f"{own}.key", f"{own}.value"),
            out=_Linear.load(weights, f"{at}.attention.output.dense"),
            attention_norm=_Norm.load(weights, f"{at}.attention.output.LayerNorm", config.norm_eps),
            up=_Linear.load(weights, f"{at}.intermediate.dense"),
            down=_Linear.load(weights, f"{at}.output.dense"),
            norm=_Norm.load(weights, f"{at}.output.LayerNorm", config.norm_eps),
            heads=config.heads,
            activation=config.activation,
        )


@dataclass(frozen=True, slots=True)
class Classifier:
    """A head on the first token's vector; in float32, for it is a single row of each input."""

    dense: _Linear
    out: _Linear

    def __call__(self, first: torch.Tensor) -> torch.Tensor:
        """[N, hidden] to logits float32 [N, labels]."""
        return self.out(torch.tanh(self.dense(first.float())))


@dataclass(frozen=True, slots=True)
class Bert:
    """A whole encoder, and its head if it has one."""

    config: EncoderConfig
    device: str
    words: torch.Tensor
    positions: torch.Tensor
    types: torch.Tensor
    norm: _Norm
    layers: tuple[_Layer, ...]
    head: Classifier | None

    def hidden(self, layout: Layout) -> torch.Tensor:
        """[T, hidden] of the last layer."""
        positions = layout.positions + self.config.first_position
        # A model with one type of tokens, as RoBERTa, makes no difference between two texts.
        types = np.minimum(layout.seconds, self.config.token_types - 1)
        x = functional.embedding(self._index(layout.token_ids), self.words)
        x = x + functional.embedding(self._index(types), self.types)
        x = self.norm(x + functional.embedding(self._index(positions), self.positions))
        attention = plan_attention(layout, dtype=x.dtype, device=self.device)
        for layer in self.layers:
            x = layer(x, attention)
        return x

    def _index(self, values: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)

    @classmethod
    def load(cls, config: EncoderConfig, weights: EncoderWeights) -> Bert:
        """Take every tensor of ``encoder_shapes``."""
        head = None
        if config.labels:
            dense, out = (
                _Linear(
                    weights.take(f"{name}.weight", dtype=torch.float32),
                    weights.take(f"{name}.bias", dtype=torch.float32),
                )
                for name in head_names(config)
            )
            head = Classifier(dense, out)
        return cls(
            config=config,
            device=weights.device,
            words=weights.take("embeddings.word_embeddings.weight"),
            positions=weights.take("embeddings.position_embeddings.weight"),
            types=weights.take("embeddings.token_type_embeddings.weight"),
            norm=_Norm.load(weights, "embeddings.LayerNorm", config.norm_eps),
            layers=tuple(_Layer.load(weights, config, index) for index in range(config.layers)),
            head=head,
        )


def _activated(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    match activation:
        case "gelu":
            return functional.gelu(x)
        case "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
        case "relu":
            return functional.relu(x)
