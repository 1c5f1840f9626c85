"""Small checkpoints and vocabularies, written by the public libraries and not by tokenpath."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 96, 2, 4, 2, 32, 320

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "def main(argument: int) -> int:\n    return argument + 1  # the answer\n",
    "tokens, tokens and more tokens; the tokenizer turns the text into tokens",
    "Das schöne Wetter über der Stadt; 1234567890 + 42 = ?",
    "你好世界 你好世界 🎉 it's we'll they're  double  spaces   triple",
]


def metadata_of(architecture: str) -> dict[str, Any]:
    """The metadata that every GGUF of an architecture needs."""
    prefix = architecture + "."
    values: dict[str, Any] = {
        prefix + "context_length": 512,
        prefix + "embedding_length": HIDDEN,
        prefix + "block_count": LAYERS,
        prefix + "feed_forward_length": INNER,
        prefix + "attention.head_count": HEADS,
        prefix + "attention.head_count_kv": KV_HEADS,
        prefix + "attention.layer_norm_rms_epsilon": 1e-5,
        prefix + "attention.key_length": HEAD_DIM,
        prefix + "attention.value_length": HEAD_DIM,
        prefix + "rope.freq_base": 5000.0,
        prefix + "vocab_size": VOCAB,
    }
    if architecture == "gemma3":
        values[prefix + "attention.sliding_window"] = 16
    return values


def tensors_of(architecture: str, *, tied: bool = False, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors under GGUF names, in torch's shape order."""
    rng = np.random.default_rng(seed)
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        block: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (HIDDEN,),
            "attn_q.weight": (queries, HIDDEN),
            "attn_k.weight": (keys, HIDDEN),
            "attn_v.weight": (keys, HIDDEN),
            "attn_output.weight": (HIDDEN, queries),
            "ffn_norm.weight": (HIDDEN,),
            "ffn_gate.weight": (INNER, HIDDEN),
            "ffn_up.weight": (INNER, HIDDEN),
            "ffn_down.weight": (HIDDEN, INNER),
        }
        if architecture == "qwen2":
            block |= {"attn_q.bias": (queries,), "attn_k.bias": (keys,), "attn_v.bias": (keys,)}
        if architecture in {"qwen3", "gemma3"}:
            block |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
        if architecture == "gemma3":
            block |= {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    quantized: Mapping[str, GGMLQuantizationType] | None = None,
    raw: Mapping[str, tuple[np.ndarray, GGMLQuantizationType]] | None = None,
) -> Path:
    """Write a GGUF by llama.cpp's own writer; ``raw`` are blocks that replace a tensor's values."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, values in tensors.items():
        kind = (quantized or {}).get(name)
        if name in (raw or {}):
            blocks, kind = raw[name]
            writer.add_tensor(name, blocks, raw_dtype=kind)
        elif kind is None:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


def byte_level_vocabulary(
    specials: Iterable[str] = ("<|endoftext|>", "<|im_start|>"), *, size: int = 400
) -> dict[str, Any]:
    """``tokenizer.ggml.*`` of a GPT-2-style BPE trained on the corpus."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    import json

    state = json.loads(trained.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].__getitem__)
    merges = [m if isinstance(m, str) else " ".join(m) for m in state["merges"]]
    specials = list(specials)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens + specials,
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3] * len(specials),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 1,
        "tokenizer.ggml.add_bos_token": False,
    }


def sentencepiece_vocabulary(*, gemma: bool = False) -> dict[str, Any]:
    """``tokenizer.ggml.*`` of a SentencePiece-style BPE trained on the corpus."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    vocab = trained.get_vocab()
    pieces = [t for t in sorted(vocab, key=vocab.__getitem__) if len(t) > 1]
    letters = [t for t in sorted(vocab, key=vocab.__getitem__) if len(t) == 1]
    control = ["<pad>", "<eos>", "<bos>", "<unk>"] if gemma else ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    spaces = ["  ", "   "] if gemma else []
    user_defined = ["<b>", "\n\n"] if gemma else []
    tokens = control + byte_tokens + user_defined + spaces + pieces + letters
    types = (
        [3] * len(control)
        + [6] * len(byte_tokens)
        + [4] * (len(user_defined) + len(spaces))
        + [1] * (len(pieces) + len(letters))
    )
    if not gemma:
        types[0] = 2
    first = len(tokens) - len(pieces) - len(letters)
    scores = [0.0 if i < first else float(first - i) for i in range(len(tokens))]
    bos, eos, unknown = (2, 1, 3) if gemma else (1, 2, 0)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": bos,
        "tokenizer.ggml.eos_token_id": eos,
        "tokenizer.ggml.unknown_token_id": unknown,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": not gemma,
    }
