"""A Hugging Face folder of a model that tokenpath can open: ``SOURCE FOLDER [--w8a8]``.

Weights in bfloat16, or with ``--w8a8`` the projections as int8 with a scale per output channel, in
the form of compressed-tensors, for engines that then quantize activations per token. Runs in
tokenpath's environment, whose readers already undo what GGUF converters do to names and values.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tokenpath.config.paths import cache_dir
from tokenpath.models import gguf_tokenizer
from tokenpath.models.architecture import ModelConfig
from tokenpath.models.local import LocalModel, open_model
from tokenpath.models.weights import iter_tensors


def main(source: Path, folder: Path, *, w8a8: bool) -> None:
    """Write the folder. Raises as ``open_model``; ``ValueError`` for a family without a form."""
    model = open_model(source)
    config = hf_config(model.config)
    if w8a8:
        config["quantization_config"] = _COMPRESSED
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, values in iter_tensors(model):
        if w8a8 and name.endswith("_proj.weight"):
            scale = values.float().abs().amax(1, keepdim=True).clamp_min(1e-8) / 127
            tensors[name] = (values.float() / scale).round().clamp(-127, 127).to(torch.int8)
            tensors[f"{name}_scale"] = scale.to(torch.bfloat16)
        else:
            tensors[name] = values.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    _write_tokenizer(model, folder)


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """What transformers calls this architecture. Raises ``ValueError`` for an unknown family."""
    common = {
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
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
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_ids[0],
    }
    if config.family == "qwen2":
        return common | {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_act": "silu",
            "use_sliding_window": False,
            "sliding_window": None,
        }
    if config.family == "gemma3":
        scale = config.query_scale or config.head_dim**-0.5
        return common | {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": round(scale**-2),
            "sliding_window": config.sliding_window,
            "rope_local_base_freq": config.rope_theta_local,
            "layer_types": [
                "sliding_attention" if kind == "sliding" else "full_attention"
                for kind in config.layer_kinds
            ],
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        }
    raise ValueError(f"{config.family} has no form for transformers here; qwen2 and gemma3 have")


def _write_tokenizer(model: LocalModel, folder: Path) -> None:
    if model.gguf is None:
        raise ValueError(f"{model.path} is a Hugging Face folder already")
    tokenizer = gguf_tokenizer.load(model.gguf, cache_dir())
    tokenizer.save(str(folder / "tokenizer.json"))
    bos, eos = model.template_tokens()
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos or None,
        "eos_token": eos,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


_INT8 = {
    "num_bits": 8,
    "symmetric": True,
    "type": "int",
    "group_size": None,
    "block_structure": None,
    "observer_kwargs": {},
}
_COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "output_activations": None,
            "weights": _INT8 | {"dynamic": False, "strategy": "channel", "observer": "minmax"},
            "input_activations": _INT8 | {"dynamic": True, "strategy": "token", "observer": None},
        }
    },
}


if __name__ == "__main__":
    positional = [argument for argument in sys.argv[1:] if argument != "--w8a8"]
    main(Path(positional[0]), Path(positional[1]), w8a8="--w8a8" in sys.argv)
