"""The other side of the engine's equality tests: transformers in float32 with eager attention.

``SMALL_MODELS`` are random models, each with what is peculiar to its family and small enough to
run in milliseconds; ``gemma_reference`` is the real Gemma, read from its GGUF by the ``gguf``
library alone, so that no code of ours stands on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import eager_attention_forward

from tokenpath.engine.runner import ModelRunner
from tokenpath.models.local import LocalModel, open_model

torch.set_num_threads(1)

VOCAB = 256
CONTEXT = 512
_SIZE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}


def _llama(**changes: object) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**_SIZE, "tie_word_embeddings": False, **changes}))


def _rope(kind: str, **parameters: float) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


def _gemma3(**changes: object) -> PreTrainedModel:
    config = Gemma3TextConfig(
        **{
            **_SIZE,
            "num_hidden_layers": 6,
            "head_dim": 24,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 18,
            "final_logit_softcapping": 4.0,
            **changes,
        }
    )
    return Gemma3ForCausalLM(config)


def _eager_softcapped(module: torch.nn.Module, *args: object, **kwargs: object) -> object:
    return eager_attention_forward(module, *args, softcap=module.attn_logit_softcapping, **kwargs)


# transformers keeps Gemma 3's limit on attention logits in its config but does not apply it.
ALL_ATTENTION_FUNCTIONS.register("eager_softcapped", _eager_softcapped)
ALL_MASK_ATTENTION_FUNCTIONS.register("eager_softcapped", eager_mask)

SMALL_MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    "llama": _llama,
    "llama-bias": lambda: _llama(attention_bias=True, mlp_bias=True, num_key_value_heads=4),
    "llama-linear": lambda: _llama(**_rope("linear", factor=3.0)),
    "llama-llama3": lambda: _llama(
        **_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        )
    ),
    "llama-yarn": lambda: _llama(**_rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "mistral-sliding": lambda: MistralForCausalLM(MistralConfig(**_SIZE, sliding_window=24)),
    "smollm-tied": lambda: _llama(
        num_attention_heads=3, num_key_value_heads=1, hidden_size=48, tie_word_embeddings=True
    ),
    "qwen2-tied": lambda: Qwen2ForCausalLM(Qwen2Config(**_SIZE, tie_word_embeddings=True)),
    "qwen2-sliding": lambda: Qwen2ForCausalLM(
        Qwen2Config(**_SIZE, use_sliding_window=True, sliding_window=20, max_window_layers=1)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SIZE, head_dim=40)),
    "gemma3": _gemma3,
    "gemma3-softcap-scaled": lambda: _gemma3(
        attn_logit_softcapping=2.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
        },
    ),
}


@cache
def small_reference(name: str) -> PreTrainedModel:
    """One of ``SMALL_MODELS`` with weights that make attention sharp and logits far apart."""
    torch.manual_seed(0)
    model = SMALL_MODELS[name]()
    softcap = getattr(model.config, "attn_logit_softcapping", None)
    model.set_attn_implementation("eager" if softcap is None else "eager_softcapped")
    centre = 0.0 if name.startswith("gemma3") else 1.0
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if tensor.dim() == 2:
                tensor.normal_(std=0.15)
            elif key.endswith("bias"):
                tensor.normal_(std=0.5)
            else:
                tensor.normal_(mean=centre, std=0.2)
    return model.eval()


def saved(model: PreTrainedModel, folder: Path) -> LocalModel:
    """The model as our reader finds it on disk."""
    model.save_pretrained(folder)
    return open_model(folder)


def small_runner(
    name: str, folder: Path, *, num_blocks: int = 256, block_tokens: int = 16
) -> ModelRunner:
    """Our engine with the weights of ``small_reference(name)``."""
    return ModelRunner(
        saved(small_reference(name), folder),
        dtype=torch.float32,
        device="cpu",
        num_blocks=num_blocks,
        block_tokens=block_tokens,
    )


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """float32 [tokens, vocab]: row ``i`` predicts token ``i + 1``."""
    return model(torch.tensor([token_ids])).logits[0]


def gemma_reference(path: Path) -> PreTrainedModel:
    """transformers' Gemma 3 270M with the weights of a GGUF, dequantized to float32."""
    import gguf

    reader = gguf.GGUFReader(path)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    config = Gemma3TextConfig(
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32_768,
        sliding_window=512,
        query_pre_attn_scalar=256,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        model = Gemma3ForCausalLM(config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, config.num_hidden_layers)
    weights = {}
    for name in model.state_dict():
        if name == "lm_head.weight":
            continue
        tensor = stored[names.get_name(name, try_suffixes=(".weight",))]
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        # Converters store Gemma's norm weights with the one added.
        weights[name] = values - 1.0 if name.endswith("norm.weight") else values
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    # Buffers that are computed, not stored, are still on the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    embedding = model.model.embed_tokens
    embedding.embed_scale = torch.tensor(embedding.scalar_embed_scale)
    return model.eval()
