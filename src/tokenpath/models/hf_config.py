"""From a Hugging Face ``config.json`` to ``ModelConfig``, in the key names of then and now.

transformers 5 writes ``rope_parameters`` and ``layer_types``; years of published checkpoints have
``rope_theta``, ``rope_scaling``, ``sliding_window_pattern`` and leave out whatever equals the
default of their class, so those defaults are part of the format.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tokenpath.models.architecture import LayerKind, ModelConfig, RopeScaling
from tokenpath.models.layout import checked_layers, layer_kinds, layout_for_model_type
from tokenpath.protocol.errors import ModelFileError, ModelUnsupportedError

Json = Mapping[str, Any]

_QWEN: Json = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_DEFAULTS: Mapping[str, Json] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
}
_COMMON: Json = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10_000.0}
_ACTIVATIONS: Mapping[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_LAYER_KINDS: Mapping[str, LayerKind] = {
    "full_attention": "full",
    "sliding_attention": "sliding",
}


def hf_config(raw: Json, source: Path) -> ModelConfig:
    """The architecture that a ``config.json`` describes; ``source`` is its path, for messages.

    ``eos_ids`` are those of this file alone. Raises ``ModelFileError`` on a value of the wrong
    type and ``ModelUnsupportedError`` on an architecture or a variant that the engine lacks.
    """
    layout = layout_for_model_type(raw.get("model_type"), source)
    text, model_type = raw, str(raw["model_type"])
    if model_type == "gemma3":
        # The multi-modal checkpoint; its language model is a gemma3_text of its own.
        outer = {k: raw[k] for k in ("bos_token_id", "eos_token_id", "architectures") if k in raw}
        text, model_type = {**_mapping(raw.get("text_config", {}), source), **outer}, "gemma3_text"
    keys = _Keys(text, {**_COMMON, **_DEFAULTS[model_type]}, source)
    heads, hidden = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    gemma = layout.family == "gemma3"
    if gemma and keys.flag("use_bidirectional_attention"):
        raise ModelUnsupportedError(
            f"{source} has use_bidirectional_attention, which a model that generates cannot have"
        )
    biases = keys.flag("attention_bias")
    kinds, window = _windows(keys, model_type)
    scalar = keys.optional_number("query_pre_attn_scalar") if gemma else None
    if scalar is not None and not scalar > 0:
        raise ModelFileError(
            f"{source}: 'query_pre_attn_scalar' is {scalar:g}, but must be positive"
        )
    return ModelConfig(
        family=layout.family,
        architecture=_architecture(keys, model_type),
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.integer("intermediate_size"),
        layers=keys.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=keys.optional_integer("num_key_value_heads") or heads,
        head_dim=keys.optional_integer("head_dim") or hidden // heads,
        max_context_tokens=keys.integer("max_position_embeddings"),
        rms_eps=keys.number("rms_norm_eps"),
        **_rope_fields(keys, gemma=gemma),
        tie_embeddings=keys.flag("tie_word_embeddings"),
        # Qwen 2 has biases on q, k and v only, and no key for it.
        attention_bias=biases or layout.family == "qwen2",
        output_bias=biases and layout.family != "qwen2",
        mlp_bias=model_type == "llama" and keys.flag("mlp_bias"),
        activation=_activation(keys, "hidden_activation" if gemma else "hidden_act"),
        layer_kinds=kinds,
        sliding_window=window,
        query_scale=None if scalar is None else scalar**-0.5,
        attention_softcap=keys.optional_number("attn_logit_softcapping") if gemma else None,
        logit_softcap=keys.optional_number("final_logit_softcapping") if gemma else None,
        bos_id=keys.optional_integer("bos_token_id"),
        eos_ids=token_ids(keys.raw("eos_token_id"), source),
    )


def token_ids(value: object, source: Path) -> tuple[int, ...]:
    """Token ids written as one number, a list of them or null. Raises ``ModelFileError``."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ModelFileError(f"{source}: {value!r} is neither a token id nor a list of them")
    return tuple(ids)


class _Keys:
    """A configuration's values with its class's defaults behind them."""

    def __init__(self, values: Json, defaults: Json, source: Path) -> None:
        self._values = values
        self._defaults = defaults
        self.source = source

    def raw(self, key: str) -> Any:
        """The value as written, else the class's default; None if there is neither."""
        return self._values[key] if key in self._values else self._defaults.get(key)

    def values(self) -> Json:
        """What the file has, without defaults and nulls."""
        return {key: value for key, value in self._values.items() if value is not None}

    def integer(self, key: str) -> int:
        """A positive integer."""
        value = self.optional_integer(key)
        if value is None or value < 1:
            raise self._wrong(key, "a positive integer")
        return value

    def optional_integer(self, key: str) -> int | None:
        value = self.raw(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self._wrong(key, "an integer")
        return value

    def number(self, key: str) -> float:
        value = self.optional_number(key)
        if value is None:
            raise self._wrong(key, "a number")
        return value

    def optional_number(self, key: str) -> float | None:
        value = self.raw(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(key, "a number")
        try:
            return float(value)
        except OverflowError:  # an integer of more than 308 digits
            raise self._wrong(key, "a number of usual size") from None

    def flag(self, key: str) -> bool:
        """A boolean; false if absent or null."""
        value = self.raw(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return bool(value)

    def text(self, key: str) -> str | None:
        value = self.raw(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def nested(self, key: str, defaults: Json) -> _Keys | None:
        """A JSON object below ``key``; None if absent or null."""
        value = self.raw(key)
        return None if value is None else _Keys(_mapping(value, self.source), defaults, self.source)

    def has(self, key: str) -> bool:
        return key in self._values

    def _wrong(self, key: str, wanted: str) -> ModelFileError:
        found = self.raw(key)
        return ModelFileError(f"{self.source}: {key!r} is {found!r}, but should be {wanted}")


def _mapping(value: object, source: Path) -> Json:
    if not isinstance(value, dict):
        raise ModelFileError(f"{source}: {str(value)[:60]!r} should be a JSON object")
    return value


def _architecture(keys: _Keys, model_type: str) -> str:
    names = keys.raw("architectures")
    return str(names[0]) if isinstance(names, list) and names else model_type


def _activation(keys: _Keys, key: str) -> Literal["silu", "gelu_tanh"]:
    name = keys.text(key) or ""
    if name not in _ACTIVATIONS:
        raise ModelUnsupportedError(
            f"{keys.source}: {key} is {name!r}; supported: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _windows(keys: _Keys, model_type: str) -> tuple[tuple[LayerKind, ...], int | None]:
    """The kind of each layer, and the window of the sliding ones."""
    layers = checked_layers(keys.integer("num_hidden_layers"), keys.source)
    window = keys.optional_integer("sliding_window")
    if model_type == "llama" or window is None:
        return (), None
    if model_type == "mistral":
        return layer_kinds([True] * layers), window
    if model_type in {"qwen2", "qwen3"} and not keys.flag("use_sliding_window"):
        return (), None
    kinds: tuple[LayerKind, ...]
    names = keys.raw("layer_types")
    if names is not None:
        kinds = _named_kinds(names, keys)
    elif model_type == "gemma3_text":
        period = keys.integer("sliding_window_pattern")
        kinds = layer_kinds(bool((layer + 1) % period) for layer in range(layers))
    else:
        first = keys.optional_integer("max_window_layers") or 0
        kinds = layer_kinds(layer >= first for layer in range(layers))
    return (kinds, window) if "sliding" in kinds else ((), None)


def _named_kinds(names: object, keys: _Keys) -> tuple[LayerKind, ...]:
    listed = [str(name) for name in names] if isinstance(names, list) else [str(names)]
    for name in listed:
        if name not in _LAYER_KINDS:
            raise ModelUnsupportedError(
                f"{keys.source}: layer_types has {name!r}; supported: {', '.join(_LAYER_KINDS)}"
            )
    return tuple(_LAYER_KINDS[name] for name in listed)


def _rope_fields(keys: _Keys, *, gemma: bool) -> dict[str, Any]:
    """``rope_theta``, ``rope_theta_local`` and ``rope_scaling`` of any generation of configs."""
    _reject_partial_rotation(keys)
    theta = keys.number("rope_theta")
    rope = keys.nested("rope_parameters", {"rope_theta": theta})
    local = None
    if gemma:
        local = keys.number("rope_local_base_freq")
        if rope is not None and (rope.has("sliding_attention") or rope.has("full_attention")):
            sliding = rope.nested("sliding_attention", {"rope_theta": local})
            if sliding is not None:
                local = sliding.number("rope_theta")
                if _scaling(sliding, keys) is not None:
                    raise ModelUnsupportedError(
                        f"{keys.source} scales the rotary embedding of sliding layers; supported: "
                        "scaling of full-attention layers"
                    )
            rope = rope.nested("full_attention", {"rope_theta": theta})
    if rope is not None:
        theta = rope.number("rope_theta")
    old = keys.nested("rope_scaling", {})
    return {
        "rope_theta": theta,
        "rope_theta_local": local,
        "rope_scaling": _scaling(old or rope, keys),
    }


def _reject_partial_rotation(keys: _Keys) -> None:
    partial = keys.optional_number("partial_rotary_factor")
    if partial not in {None, 1.0}:
        raise ModelUnsupportedError(
            f"{keys.source} rotates only {partial:g} of each head; supported: whole heads"
        )


def _scaling(rope: _Keys | None, keys: _Keys) -> RopeScaling | None:
    if rope is None:
        return None
    _reject_partial_rotation(rope)
    kind = rope.text("rope_type") or rope.text("type") or "default"
    if kind == "default":
        return None
    if kind not in {"linear", "llama3", "yarn"}:
        raise ModelUnsupportedError(
            f"{keys.source} has rope scaling of type {kind!r}; supported: linear, llama3, yarn"
        )
    if kind == "linear":
        return RopeScaling(kind="linear", factor=rope.number("factor"))
    context = keys.integer("max_position_embeddings")
    defaults: Json = {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": context,
    }
    values = _Keys({**defaults, **rope.values()}, {}, keys.source)
    if kind == "yarn" and (values.raw("mscale") or values.raw("truncate") is False):
        raise ModelUnsupportedError(
            f"{keys.source} has yarn with mscale or without truncation; supported: plain yarn"
        )
    return RopeScaling(
        kind=kind,  # type: ignore[arg-type]  # llama3 or yarn, checked above
        factor=values.number("factor"),
        low_freq_factor=values.number("low_freq_factor"),
        high_freq_factor=values.number("high_freq_factor"),
        original_context_tokens=values.integer("original_max_position_embeddings"),
        beta_fast=values.number("beta_fast"),
        beta_slow=values.number("beta_slow"),
        attention_factor=values.optional_number("attention_factor"),
    )
