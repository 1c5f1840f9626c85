"""A Hugging Face folder's small files for a model that came without them: from a GGUF's metadata.

What is written is read again by our own reader and compared, so that a variant that a
``config.json`` of the family cannot express is refused instead of being written as another model.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenpath.models import gguf_tokenizer
from tokenpath.models.architecture import ModelConfig, RopeScaling
from tokenpath.models.gguf_file import GgufFile
from tokenpath.models.hf_config import hf_config
from tokenpath.models.hf_folder import (
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
)
from tokenpath.protocol.errors import ModelError, ModelUnsupportedError

_ARCHITECTURES: Mapping[str, tuple[str, str]] = {
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
"""By family: the class and the ``model_type`` of transformers."""


def config_json(config: ModelConfig, source: Path) -> dict[str, Any]:
    """A ``config.json`` that describes the architecture.

    Raises ``ModelUnsupportedError`` if none of its family does; ``source`` is for the message.
    """
    if config.family not in _ARCHITECTURES:
        raise ModelUnsupportedError(
            f"{source}: a config.json cannot be written for the family {config.family!r}; "
            f"supported: {', '.join(_ARCHITECTURES)}"
        )
    architecture, model_type = _ARCHITECTURES[config.family]
    values: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_context_tokens,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_scaling(config.rope_scaling),
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) or None,
    }
    match config.family:
        case "gemma3":
            values |= _gemma3(config)
        case "qwen2" | "qwen3":
            sliding = "sliding" in config.layer_kinds
            values |= {
                "hidden_act": "silu",
                "attention_bias": config.attention_bias and config.family == "qwen3",
                "use_sliding_window": sliding,
                "sliding_window": config.sliding_window,
            }
            if sliding:
                values["layer_types"] = _layer_types(config)
        case _:
            values |= {
                "hidden_act": "silu",
                "attention_bias": config.attention_bias,
                "mlp_bias": config.mlp_bias,
            }
    _check(values, config, source)
    return values


def write_small_files(gguf: GgufFile, config: ModelConfig, folder: Path, cache: Path) -> None:
    """Tokenizer, chat template and end tokens of a GGUF, as files of a folder.

    Raises ``ModelFileError`` and ``ModelUnsupportedError`` as ``gguf_tokenizer.load``.
    """
    tokenizer = gguf_tokenizer.load(gguf, cache)
    tokenizer.save(str(folder / TOKENIZER))
    bos, eos = gguf_tokenizer.template_tokens(gguf)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos or None,
        "eos_token": eos or None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_context_tokens,
    }
    template = gguf.text("tokenizer.chat_template")
    if template is not None:
        (folder / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
        settings["chat_template"] = template  # for readers from before the file
    write_json(folder / TOKENIZER_CONFIG, settings)
    ends = {"bos_token_id": config.bos_id, "eos_token_id": list(config.eos_ids) or None}
    write_json(folder / GENERATION_CONFIG, ends)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Indented, as transformers writes it."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _gemma3(config: ModelConfig) -> dict[str, Any]:
    scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
    scalar = scale**-2
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(scalar)
        if math.isclose(scalar, round(scalar), rel_tol=1e-9)
        else scalar,
        "sliding_window": config.sliding_window,
        "layer_types": _layer_types(config),
        "rope_local_base_freq": config.rope_theta_local,
        "attention_bias": config.attention_bias,
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
    }


def _layer_types(config: ModelConfig) -> list[str]:
    return [f"{config.kind(layer)}_attention" for layer in range(config.layers)]


def _rope_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    values: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "linear":
        return values
    values["original_max_position_embeddings"] = scaling.original_context_tokens
    if scaling.kind == "llama3":
        return values | {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
        }
    values |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    if scaling.attention_factor is not None:
        values["attention_factor"] = scaling.attention_factor
    return values


def _check(values: Mapping[str, Any], config: ModelConfig, source: Path) -> None:
    """Raise ``ModelUnsupportedError`` if what was written means another model."""
    try:
        found = hf_config(values, source)
    except ModelError as error:
        raise ModelUnsupportedError(
            f"{source} cannot be written as a Hugging Face model: {error.message}"
        ) from None
    for field in dataclasses.fields(ModelConfig):
        if field.name == "architecture":
            continue
        wanted, read = getattr(config, field.name), getattr(found, field.name)
        if field.name == "query_scale":  # None is the head's own
            wanted, read = (v or config.head_dim**-0.5 for v in (wanted, read))
        same = (
            math.isclose(wanted, read, rel_tol=1e-9)
            if isinstance(wanted, float) and isinstance(read, float)
            else wanted == read
        )
        if not same:
            raise ModelUnsupportedError(
                f"{source} cannot be written as a Hugging Face model: {field.name} is {wanted!r}, "
                f"which a config.json of {config.family} would say as {read!r}"
            )
