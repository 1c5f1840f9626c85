"""The parts that model families are built from.

Each part has a constructor that takes its weights out of a ``WeightLoader`` by their Hugging Face
names, and is then called once per step with all the step's tokens. What a part computes is written
here; how, is the kernel backend's affair.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch

from tokenpath.engine.kernels.base import (
    Activation,
    AttentionSpec,
    AttentionStep,
    KernelBackend,
    Linear,
    LinearInput,
    Table,
)
from tokenpath.engine.kv_cache import KvCache
from tokenpath.engine.loading import WeightLoader
from tokenpath.engine.rotary import Angles
from tokenpath.models.architecture import LayerKind, ModelConfig
from tokenpath.models.layout import EMBEDDING


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers share during one step."""

    token_ids: torch.Tensor
    """int64 [T]"""
    slots: torch.Tensor
    """int64 [T] places in the KV pool that the step writes."""
    angles: Mapping[LayerKind, Angles]
    attention: Mapping[AttentionSpec, AttentionStep]
    cache: KvCache


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """``x / rms(x) * weight``."""

    backend: KernelBackend
    weight: torch.Tensor
    """float32, over the last dimension or the last two."""
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape and dtype as ``x``."""
        return self.backend.norm(x, self.weight, self.eps)

    def into_linear(self, x: torch.Tensor) -> LinearInput:
        """The same, as input of a ``Linear``."""
        return self.backend.norm_input(x, self.weight, self.eps)

    @classmethod
    def load(
        cls, weights: WeightLoader, name: str, config: ModelConfig, *, offset: float = 0.0
    ) -> RMSNorm:
        """A norm over the hidden size; ``offset`` 1 for families that store ``weight - 1``."""
        weight = weights.norm(f"{name}.weight", config.hidden_size, offset=offset)
        return cls(weights.backend, weight, config.rms_eps)

    @classmethod
    def load_query_key(
        cls, weights: WeightLoader, prefix: str, config: ModelConfig, *, offset: float = 0.0
    ) -> RMSNorm:
        """Norms of each query and key head, as one over [heads + kv_heads, head_dim]."""
        query = weights.norm(f"{prefix}.q_norm.weight", config.head_dim, offset=offset)
        key = weights.norm(f"{prefix}.k_norm.weight", config.head_dim, offset=offset)
        own = weights.backend.share.own(config)
        both = torch.cat((query.expand(own.heads, -1), key.expand(own.kv_heads, -1)))
        return cls(weights.backend, both, config.rms_eps)


@dataclass(frozen=True, slots=True)
class Attention:
    """Self-attention of one layer, from normed activations to the output projection."""

    backend: KernelBackend
    layer: int
    """Number among the layers that this rank has."""
    kind: LayerKind
    spec: AttentionSpec
    qkv: Linear
    out: Linear
    query_key_norm: RMSNorm | None

    def __call__(self, x: LinearInput, step: Step) -> torch.Tensor:
        """[T, hidden] to [T, hidden]; writes the tokens' keys and values on the way."""
        spec, kv = self.spec, step.cache.layers[self.layer]
        projected = self.qkv(x).view(-1, spec.heads + 2 * spec.kv_heads, spec.head_dim)
        # Queries and keys are normed and rotated together: the same arithmetic, half the calls.
        query_key = projected[:, : spec.heads + spec.kv_heads]
        if self.query_key_norm is not None:
            query_key = self.query_key_norm(query_key)
        query_key = self.backend.rotate(query_key, step.angles[self.kind])
        values = projected[:, spec.heads + spec.kv_heads :]
        self.backend.write_kv(kv, query_key[:, spec.heads :], values, step.slots)
        attended = self.backend.join(step.attention[spec](query_key[:, : spec.heads], kv))
        return self.backend.join(self.out(attended))

    @classmethod
    def load(
        cls,
        weights: WeightLoader,
        prefix: str,
        config: ModelConfig,
        layer: int,
        *,
        query_key_norm: RMSNorm | None = None,
    ) -> Attention:
        """Take ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj`` under ``prefix``."""
        share = weights.backend.share
        spec = attention_spec(share.own(config), config.kind(layer))
        query_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
        return cls(
            backend=weights.backend,
            layer=layer - share.layers(config.layers).start,
            kind=config.kind(layer),
            spec=spec,
            qkv=weights.linear(
                [f"{prefix}.{part}_proj" for part in "qkv"],
                [query_rows, kv_rows, kv_rows],
                config.hidden_size,
                bias=config.attention_bias,
            ),
            out=weights.linear(
                [f"{prefix}.o_proj"], [config.hidden_size], query_rows, bias=config.output_bias
            ),
            query_key_norm=query_key_norm,
        )


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """``down(activation(gate(x)) * up(x))``."""

    backend: KernelBackend
    gate_up: Linear
    down: Linear
    activation: Activation

    def __call__(self, x: LinearInput) -> torch.Tensor:
        """[T, hidden] to [T, hidden]."""
        joined = self.backend.join(self.backend.gated_input(self.gate_up(x), self.activation))
        return self.backend.join(self.down(joined))

    @classmethod
    def load(cls, weights: WeightLoader, prefix: str, config: ModelConfig) -> GatedMLP:
        """Take ``gate_proj``, ``up_proj`` and ``down_proj`` under ``prefix``."""
        width = config.intermediate_size
        return cls(
            backend=weights.backend,
            gate_up=weights.gate_up(
                (f"{prefix}.gate_proj", f"{prefix}.up_proj"),
                width,
                config.hidden_size,
                bias=config.mlp_bias,
            ),
            down=weights.linear(
                [f"{prefix}.down_proj"], [config.hidden_size], width, bias=config.mlp_bias
            ),
            activation=config.activation,
        )


class Block(Protocol):
    """One layer of a decoder.

    A family that norms what attention or the feed-forward part puts out, before it is added, has
    ``attention_out_norm`` and ``mlp_out_norm`` besides; the native program looks for them.
    """

    @property
    def attention_norm(self) -> RMSNorm: ...

    @property
    def attention(self) -> Attention: ...

    @property
    def mlp_norm(self) -> RMSNorm: ...

    @property
    def mlp(self) -> GatedMLP: ...

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, hidden] to [T, hidden], residual included."""
        ...


@dataclass(frozen=True, slots=True)
class PreNormBlock:
    """The common block: norm, attention, add; norm, feed-forward, add."""

    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: GatedMLP

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """See ``Block``."""
        x = x + self.attention(self.attention_norm.into_linear(x), step)
        return x + self.mlp(self.mlp_norm.into_linear(x))

    @classmethod
    def load(
        cls,
        weights: WeightLoader,
        config: ModelConfig,
        layer: int,
        *,
        query_key_norms: bool = False,
    ) -> PreNormBlock:
        """Take one layer of the usual names."""
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        norm = RMSNorm.load_query_key(weights, attention, config) if query_key_norms else None
        return cls(
            attention_norm=RMSNorm.load(weights, f"{prefix}.input_layernorm", config),
            attention=Attention.load(weights, attention, config, layer, query_key_norm=norm),
            mlp_norm=RMSNorm.load(weights, f"{prefix}.post_attention_layernorm", config),
            mlp=GatedMLP.load(weights, f"{prefix}.mlp", config),
        )


@dataclass(frozen=True, slots=True)
class Decoder:
    """A whole model: embedding, blocks, last norm and head."""

    backend: KernelBackend
    embedding: Table | None
    """None in a stage that is not the first."""
    embedding_scale: float | None
    blocks: Seq[Block]
    """Of this stage."""
    norm: RMSNorm | None
    head: Linear | None
    """None, as the norm, in a stage that is not the last."""
    logit_softcap: float | None
    vocab_size: int

    @property
    def attention_specs(self) -> frozenset[AttentionSpec]:
        """The kinds of attention that a step must plan for."""
        return frozenset(block.attention.spec for block in self.blocks)

    def hidden(self, step: Step, x: torch.Tensor | None = None) -> torch.Tensor:
        """[T, hidden] after the last block, not normed; fills the step's part of the KV pool.

        ``x`` is what the stage before made, if there is one.
        """
        if x is None:
            assert self.embedding is not None, "a later stage is given what to go on with"
            x = self.backend.embed(self.embedding, step.token_ids)
            if self.embedding_scale is not None:
                x = x * self.embedding_scale
        for block in self.blocks:
            x = block(x, step)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocab] of some rows of ``hidden``."""
        assert self.norm is not None, "the last stage makes logits"
        assert self.head is not None, "the last stage makes logits"
        joined = self.backend.join(self.head(self.norm.into_linear(hidden)))
        # Where parts are of unequal size, the last one has been filled up.
        logits = joined[:, : self.vocab_size].float()
        if self.logit_softcap is None:
            return logits
        return torch.tanh(logits / self.logit_softcap) * self.logit_softcap

    @classmethod
    def load(
        cls,
        weights: WeightLoader,
        config: ModelConfig,
        blocks: Seq[Block],
        *,
        embedding_scale: float | None = None,
        norm_offset: float = 0.0,
    ) -> Decoder:
        """Take what surrounds the blocks, under the usual names."""
        share = weights.backend.share
        table = head = norm = None
        if share.has(EMBEDDING, config):
            table = weights.table(EMBEDDING, config.vocab_size, config.hidden_size)
        if share.last:
            head = (
                weights.tied(table)
                if config.tie_embeddings
                else weights.linear(
                    ("lm_head",), (config.vocab_size,), config.hidden_size, bias=False
                )
            )
            norm = RMSNorm.load(weights, "model.norm", config, offset=norm_offset)
        return cls(
            backend=weights.backend,
            embedding=table if share.first else None,
            embedding_scale=embedding_scale,
            blocks=blocks,
            norm=norm,
            head=head,
            logit_softcap=config.logit_softcap,
            vocab_size=config.vocab_size,
        )


def attention_spec(config: ModelConfig, kind: LayerKind) -> AttentionSpec:
    """The arithmetic of attention in layers of one kind."""
    return AttentionSpec(
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5 if config.query_scale is None else config.query_scale,
        window=config.sliding_window if kind == "sliding" else None,
        softcap=config.attention_softcap,
    )
