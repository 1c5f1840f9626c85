"""The architecture of a decoder model in one vocabulary, whatever file format described it.

Readers of ``config.json`` and of GGUF metadata both produce a ``ModelConfig``; the engine's model
families read nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LayerKind = Literal["full", "sliding"]
KvDtype = Literal["float32", "bfloat16", "int8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    ``kind`` is ``linear`` (divide positions by ``factor``), ``llama3`` (Llama 3.1's smoothed
    interpolation) or ``yarn``; the fields not used by a kind are ignored.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_tokens: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer with rotary positions, RMS norms and a gated feed-forward."""

    family: str
    """Which file of ``engine/families`` runs it: ``llama``, ``qwen2``, ``qwen3``, ``gemma3``."""
    architecture: str
    """The name the checkpoint gave itself, for people: ``Qwen2ForCausalLM``, ``gemma3`` …"""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_context_tokens: int
    rms_eps: float
    rope_theta: float
    rope_theta_local: float | None = None
    """Base of the sliding layers' rotary embedding, where it differs (Gemma 3: 10,000)."""
    rope_scaling: RopeScaling | None = None
    """Applies to all layers, except to sliding ones that have ``rope_theta_local``."""
    tie_embeddings: bool = False
    """The output head is the input embedding."""
    attention_bias: bool = False
    """Biases on the q, k and v projections (Qwen 2: yes)."""
    output_bias: bool = False
    """Bias on the attention's output projection."""
    mlp_bias: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    layer_kinds: tuple[LayerKind, ...] = ()
    """One per layer; empty means all full."""
    sliding_window: int | None = None
    """A sliding layer's token sees itself and the ``sliding_window - 1`` tokens before it."""
    query_scale: float | None = None
    """Attention logits are multiplied by this; None means ``head_dim ** -0.5``."""
    attention_softcap: float | None = None
    """``c * tanh(x / c)`` on attention logits."""
    logit_softcap: float | None = None
    """``c * tanh(x / c)`` on the final logits."""
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def kind(self, layer: int) -> LayerKind:
        """Attention kind of one layer."""
        return self.layer_kinds[layer] if self.layer_kinds else "full"

    def kv_bytes_per_token(self, dtype: KvDtype) -> int:
        """Bytes of keys and values that one token takes over all layers."""
        return 2 * self.layers * self.kv_heads * self.kv_head_bytes(dtype)

    def kv_head_bytes(self, dtype: KvDtype) -> int:
        """Bytes of one head's key, or value, of one token; in int8 with its float32 scale."""
        match dtype:
            case "float32":
                return 4 * self.head_dim
            case "bfloat16":
                return 2 * self.head_dim
            case "int8":
                return self.head_dim + 4
