"""From GGUF metadata to ``ModelConfig``: llama.cpp's key names, its defaults and its omissions.

A GGUF says less than a ``config.json``: what llama.cpp's converters leave out is what its source
code knows about the architecture, and the same knowledge is here.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

from tokenpath.models.architecture import LayerKind, ModelConfig, RopeScaling
from tokenpath.models.gguf_file import GgufArray, GgufFile
from tokenpath.models.layout import TensorInfo, checked_layers, layer_kinds, layout_for_gguf
from tokenpath.models.special_tokens import DOCUMENT_ENDS, TURN_ENDS, end_ids
from tokenpath.protocol.errors import ModelFileError, ModelUnsupportedError

ROPE_FACTORS = "rope_freqs.weight"
"""Llama 3.1 and later: what each rotary frequency is divided by, instead of metadata."""
_GEMMA3_PATTERN = 6
_GEMMA3_LOCAL_THETA = 10_000.0
_GEMMA3_27B_LAYERS = 62
_LLAMA3_TOLERANCE = 1e-3


def gguf_config(file: GgufFile, tensors: Mapping[str, TensorInfo]) -> ModelConfig:
    """The architecture that a GGUF describes.

    ``tensors`` are those of all its shards, under their GGUF names. Raises ``ModelFileError`` on
    missing or contradictory metadata and ``ModelUnsupportedError`` on an architecture, or a
    variant of one, that the engine does not have.
    """
    architecture = file.text("general.architecture")
    if architecture is None:
        raise ModelFileError(f"{file.path} lacks the metadata key 'general.architecture'")
    family = layout_for_gguf(architecture, file.path).family
    keys = _Keys(file, architecture)
    if keys.optional_integer("expert_count"):
        raise ModelUnsupportedError(
            f"{file.path} is a mixture of experts ({architecture}.expert_count is "
            f"{keys.optional_integer('expert_count')}), which the {family} family does not run"
        )
    heads = keys.integer("attention.head_count")
    hidden = keys.integer("embedding_length")
    head_dim = keys.optional_integer("attention.key_length") or hidden // heads
    value_dim = keys.optional_integer("attention.value_length") or head_dim
    rotary = keys.optional_integer("rope.dimension_count") or head_dim
    if not head_dim == value_dim == rotary:
        raise ModelUnsupportedError(
            f"{file.path} has keys of {head_dim}, values of {value_dim} and rotary embeddings of "
            f"{rotary} dimensions; supported: all three equal"
        )
    layers = checked_layers(keys.integer("block_count"), file.path)
    vocab_size = _vocab_size(keys, tensors)
    return ModelConfig(
        family=family,
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=keys.integer("feed_forward_length"),
        layers=layers,
        heads=heads,
        kv_heads=keys.optional_integer("attention.head_count_kv") or heads,
        head_dim=head_dim,
        max_context_tokens=keys.integer("context_length"),
        rms_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope_scaling=_rope_scaling(keys, tensors, head_dim),
        tie_embeddings="output.weight" not in tensors,
        attention_bias=family == "qwen2" or "blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        bos_id=file.integer("tokenizer.ggml.bos_token_id"),
        eos_ids=_eos_ids(file, vocab_size),
        **_family_fields(family, keys, layers),
    )


class _Keys:
    """The keys below one architecture's prefix."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self._prefix = architecture + "."

    def integer(self, leaf: str) -> int:
        value = self.optional_integer(leaf)
        if value is None:
            raise self._missing(leaf)
        if value == 0:
            raise ModelFileError(
                f"{self.file.path}: {self._prefix + leaf!r} is 0, but must be positive"
            )
        return value

    def optional_integer(self, leaf: str) -> int | None:
        """An integer from 0; an array of one repeated number counts as that number."""
        key = self._prefix + leaf
        value = self.file.metadata.get(key)
        if isinstance(value, GgufArray):
            numbers = sorted(set(value.numbers()))
            if len(numbers) != 1:
                raise ModelUnsupportedError(
                    f"{self.file.path}: {key!r} differs between layers ({numbers}); supported: one "
                    "value for all layers"
                )
            return int(numbers[0])
        number = self.file.integer(key)
        if number is not None and number < 0:
            raise ModelFileError(f"{self.file.path}: {key!r} is {number}, but cannot be negative")
        return number

    def number(self, leaf: str) -> float:
        value = self.optional_number(leaf)
        if value is None:
            raise self._missing(leaf)
        return value

    def optional_number(self, leaf: str) -> float | None:
        return self.file.number(self._prefix + leaf)

    def text(self, leaf: str) -> str | None:
        return self.file.text(self._prefix + leaf)

    def array_or_integer(self, leaf: str) -> GgufArray | int | None:
        value = self.file.metadata.get(self._prefix + leaf)
        return value if isinstance(value, GgufArray) else self.file.integer(self._prefix + leaf)

    def _missing(self, leaf: str) -> ModelFileError:
        return ModelFileError(f"{self.file.path} lacks the metadata key {self._prefix + leaf!r}")


def _vocab_size(keys: _Keys, tensors: Mapping[str, TensorInfo]) -> int:
    tokens = keys.file.array("tokenizer.ggml.tokens")
    stated = keys.optional_integer("vocab_size")
    if stated is not None:
        if tokens is not None and tokens.count > stated:
            raise ModelFileError(
                f"{keys.file.path} has {tokens.count} tokens in 'tokenizer.ggml.tokens', but a "
                f"vocabulary of {stated}"
            )
        return stated
    if tokens is not None:
        return tokens.count
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFileError(f"{keys.file.path} lacks the tensor 'token_embd.weight'")
    return embedding.shape[0]


def _family_fields(family: str, keys: _Keys, layers: int) -> dict[str, Any]:
    if family != "gemma3":
        return {"rope_theta": keys.optional_number("rope.freq_base") or 10_000.0}
    window = keys.integer("attention.sliding_window")
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    return {
        "rope_theta": keys.optional_number("rope.freq_base") or 1_000_000.0,
        "rope_theta_local": keys.optional_number("rope.freq_base_swa") or _GEMMA3_LOCAL_THETA,
        "activation": "gelu_tanh",
        "sliding_window": window,
        "layer_kinds": _layer_kinds(keys, layers),
        # Only the 27B model scales by hidden / heads; no key tells it from the others.
        "query_scale": (hidden / heads) ** -0.5 if layers == _GEMMA3_27B_LAYERS else None,
        "attention_softcap": keys.optional_number("attn_logit_softcapping"),
        "logit_softcap": keys.optional_number("final_logit_softcapping"),
    }


def _layer_kinds(keys: _Keys, layers: int) -> tuple[LayerKind, ...]:
    pattern = keys.array_or_integer("attention.sliding_window_pattern")
    if isinstance(pattern, GgufArray):
        sliding = [bool(flag) for flag in pattern.numbers()]
        if len(sliding) != layers:
            raise ModelFileError(
                f"{keys.file.path}: {pattern.key!r} has {len(sliding)} entries for {layers} layers"
            )
    else:
        period = pattern or _GEMMA3_PATTERN
        sliding = [bool((layer + 1) % period) for layer in range(layers)]
    return layer_kinds(sliding)


def _rope_scaling(
    keys: _Keys, tensors: Mapping[str, TensorInfo], head_dim: int
) -> RopeScaling | None:
    if ROPE_FACTORS in tensors:
        return _llama3_scaling(keys, tensors[ROPE_FACTORS], head_dim)
    kind = keys.text("rope.scaling.type") or "none"
    factor = keys.optional_number("rope.scaling.factor") or 1.0
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if kind == "yarn":
        original = keys.optional_integer("rope.scaling.original_context_length")
        extra = keys.optional_number("rope.scaling.attn_factor")
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original_context_tokens=original or keys.integer("context_length"),
            # llama.cpp multiplies its key with the usual factor; here the field is the product.
            attention_factor=extra and extra * (0.1 * math.log(factor) + 1.0),
        )
    raise ModelUnsupportedError(
        f"{keys.file.path} has rope.scaling.type {kind!r}; supported: none, linear, yarn"
    )


def _llama3_scaling(keys: _Keys, info: TensorInfo, head_dim: int) -> RopeScaling:
    """Recover Llama 3's parameters from the frequency factors that they were turned into.

    All published models smooth between wavelengths of 8192 / 4 and 8192 / 1, so the one unknown is
    the factor, which the slowest frequency carries whole. The rest of the tensor proves it.
    """
    half = head_dim // 2
    if info.shape != (half,) or info.dtype != "F32":
        raise ModelFileError(
            f"{keys.file.path}: tensor {ROPE_FACTORS!r} is {info.dtype} of shape "
            f"{list(info.shape)}, but should be F32 of shape [{half}]"
        )
    with info.file.open("rb") as file:
        file.seek(info.offset)
        stored = struct.unpack(f"<{half}f", file.read(4 * half))
    theta = keys.optional_number("rope.freq_base") or 10_000.0
    scaling = RopeScaling(kind="llama3", factor=max(stored))
    for index, found in enumerate(stored):
        wanted = _llama3_factor(scaling, theta ** (-index / half))
        if not math.isclose(found, wanted, rel_tol=_LLAMA3_TOLERANCE):
            raise ModelUnsupportedError(
                f"{keys.file.path}: tensor {ROPE_FACTORS!r} does not follow Llama 3's scaling "
                f"(entry {index} is {found:g}, expected {wanted:g})"
            )
    return scaling


def _llama3_factor(scaling: RopeScaling, frequency: float) -> float:
    turns = scaling.original_context_tokens * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
    return 1 / ((1 - smooth) / scaling.factor + smooth)


def _eos_ids(file: GgufFile, vocab_size: int) -> tuple[int, ...]:
    named = [file.integer(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens = file.array("tokenizer.ggml.tokens")
    if tokens is None:
        return end_ids(named, {}, chat=False, vocab_size=vocab_size)
    wanted = {*DOCUMENT_ENDS, *TURN_ENDS}
    vocabulary = {text: index for index, text in enumerate(tokens.strings()) if text in wanted}
    chat = file.text("tokenizer.chat_template") is not None
    return end_ids(named, vocabulary, chat=chat, vocab_size=vocab_size)
