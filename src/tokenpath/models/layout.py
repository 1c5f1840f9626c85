"""Which tensors a checkpoint of each family holds: their names, their shapes, and their GGUF dress.

One row of ``LAYOUTS`` per model family is all that the readers know about it. The names are those
of Hugging Face checkpoints; the GGUF names and the two changes that GGUF converters make to values
(offset norms, interleaved rotary rows) are told from the same row, so that both formats come out
alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenpath.models.architecture import LayerKind, ModelConfig
from tokenpath.protocol.errors import ModelFileError, ModelUnsupportedError

if TYPE_CHECKING:
    from tokenpath.models.quantized.form import Quantized

Shape = tuple[int, ...]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
MAX_LAYERS = 10_000
"""Far beyond any model; a damaged number would else cost gigabytes before it is found wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Where one tensor lies on disk and how it is stored."""

    shape: Shape
    """In torch's order: the last dimension is contiguous."""
    dtype: str
    """The stored type's own name: ``Q4_K``, ``F32``, ``BF16`` …"""
    stored_bytes: int
    file: Path
    offset: int
    """First byte of the data, from the start of ``file``."""
    quantized: Quantized | None = None
    """The stored tensors that a matrix of a quantized checkpoint is made of; its own ``file`` and
    ``offset`` are then those of its codes, and ``stored_bytes`` is the sum."""

    @property
    def parts(self) -> tuple[TensorInfo, ...]:
        """The stored tensors: itself, or what it is made of."""
        return (self,) if self.quantized is None else self.quantized.parts

    @property
    def elements(self) -> int:
        """How many numbers the tensor has."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What distinguishes one family's checkpoint from the plain decoder's."""

    family: str
    model_types: tuple[str, ...]
    """Values of ``model_type`` in a ``config.json``."""
    gguf_architectures: tuple[str, ...]
    """Values of ``general.architecture`` in a GGUF."""
    query_key_norms: bool = False
    sandwich_norms: bool = False
    """Norms after attention and after the feed-forward, besides those before."""
    gguf_norms_offset: bool = False
    """GGUF stores norm weights as ``1 + w``, where Hugging Face stores ``w``."""
    gguf_interleaved_rotary: bool = False
    """GGUF stores the rows of q and k as rotary pairs (0, 1), (2, 3) … instead of halves."""


LAYOUTS = (
    Layout(
        family="llama",
        model_types=("llama", "mistral"),
        gguf_architectures=("llama",),
        gguf_interleaved_rotary=True,
    ),
    Layout(family="qwen2", model_types=("qwen2",), gguf_architectures=("qwen2",)),
    Layout(
        family="qwen3",
        model_types=("qwen3",),
        gguf_architectures=("qwen3",),
        query_key_norms=True,
    ),
    Layout(
        family="gemma3",
        model_types=("gemma3_text", "gemma3"),
        gguf_architectures=("gemma3",),
        query_key_norms=True,
        sandwich_norms=True,
        gguf_norms_offset=True,
    ),
)


def layout_of(family: str) -> Layout:
    """The row of a family that a reader has already recognised."""
    return next(layout for layout in LAYOUTS if layout.family == family)


def layout_for_model_type(model_type: object, source: Path) -> Layout:
    """The row for a ``config.json``'s ``model_type``. Raises ``ModelUnsupportedError``."""
    for layout in LAYOUTS:
        if model_type in layout.model_types:
            return layout
    known = sorted(name for layout in LAYOUTS for name in layout.model_types)
    raise ModelUnsupportedError(
        f"{source} has model_type {model_type!r}; supported: {', '.join(known)}"
    )


def layout_for_gguf(architecture: object, source: Path) -> Layout:
    """The row for a GGUF's ``general.architecture``. Raises ``ModelUnsupportedError``."""
    for layout in LAYOUTS:
        if architecture in layout.gguf_architectures:
            return layout
    known = sorted(name for layout in LAYOUTS for name in layout.gguf_architectures)
    raise ModelUnsupportedError(
        f"{source} has general.architecture {architecture!r}; supported: {', '.join(known)}"
    )


def checked_layers(count: int, source: Path) -> int:
    """A file's number of layers, before anything is made that is as long as it says.

    Raises ``ModelFileError`` for a number that no model has.
    """
    if not 0 < count <= MAX_LAYERS:
        raise ModelFileError(
            f"{source}: the number of layers is {count}, but must be from 1 to {MAX_LAYERS}"
        )
    return count


def layer_kinds(sliding: Iterable[bool]) -> tuple[LayerKind, ...]:
    """Attention kinds from one flag per layer."""
    return tuple("sliding" if flag else "full" for flag in sliding)


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor that a checkpoint with this configuration must hold, with its shape."""
    shapes: dict[str, Shape] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(config).items()}
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def gguf_names(config: ModelConfig) -> dict[str, str]:
    """GGUF name to canonical name, for every tensor of ``expected_shapes``."""
    names = {
        "token_embd.weight": EMBEDDING,
        "output_norm.weight": "model.norm.weight",
        "output.weight": HEAD,
    }
    parts = dict(_GGUF_PARTS)
    if layout_of(config.family).sandwich_norms:
        parts |= _GGUF_SANDWICH_PARTS
    for layer in range(config.layers):
        for stored, canonical in parts.items():
            for leaf in ("weight", "bias"):
                names[f"blk.{layer}.{stored}.{leaf}"] = f"model.layers.{layer}.{canonical}.{leaf}"
    expected = expected_shapes(config)
    return {stored: canonical for stored, canonical in names.items() if canonical in expected}


def check_config(config: ModelConfig, source: Path) -> None:
    """Raise ``ModelFileError`` if a configuration's numbers cannot belong to one model."""
    positive = {
        "vocabulary size": config.vocab_size,
        "hidden size": config.hidden_size,
        "feed-forward size": config.intermediate_size,
        "number of layers": config.layers,
        "number of heads": config.heads,
        "number of key-value heads": config.kv_heads,
        "head size": config.head_dim,
        "context length": config.max_context_tokens,
        "norm epsilon": config.rms_eps,
        "rotary base": config.rope_theta,
    }
    for what, value in positive.items():
        if not value > 0:
            raise ModelFileError(f"{source}: the {what} is {value}, but must be positive")
    if config.heads % config.kv_heads:
        raise ModelFileError(
            f"{source}: {config.heads} heads cannot share {config.kv_heads} key-value heads evenly"
        )
    if config.head_dim % 2:
        raise ModelFileError(
            f"{source}: the head size is {config.head_dim}, but rotary embeddings need an even one"
        )
    if len(config.layer_kinds) not in {0, config.layers}:
        raise ModelFileError(
            f"{source}: {len(config.layer_kinds)} layer types are given for {config.layers} layers"
        )
    if "sliding" in config.layer_kinds and not (config.sliding_window or 0) > 0:
        raise ModelFileError(
            f"{source}: there are sliding layers, but the window is {config.sliding_window}"
        )


def check_tensors(
    config: ModelConfig,
    tensors: Mapping[str, TensorInfo],
    source: Path,
    *,
    stored_names: Mapping[str, str] | None = None,
) -> None:
    """Compare a checkpoint's tensors with what its configuration promises.

    ``stored_names`` maps canonical names to the file's own, which are the ones to tell people.
    Raises ``ModelFileError`` on a missing tensor or a wrong shape, ``ModelUnsupportedError`` on a
    tensor that the family does not use, since ignoring weights gives a different model.
    """
    told = stored_names or {}
    expected = expected_shapes(config)
    for name, shape in expected.items():
        found = tensors.get(name)
        if found is None:
            raise ModelFileError(
                f"{source} lacks the tensor {told.get(name, name)!r} of shape {list(shape)}, "
                f"which its {config.architecture} configuration calls for"
            )
        if found.shape != shape:
            raise ModelFileError(
                f"{source}: tensor {told.get(name, name)!r} has shape {list(found.shape)}, but its "
                f"configuration calls for {list(shape)}"
            )
    reject_unused(tensors.keys() - expected.keys(), config.family, source)


def reject_unused(names: Iterable[str], family: str, source: Path) -> None:
    """Raise ``ModelUnsupportedError`` if there are tensors that nobody would read."""
    unused = sorted(names)
    if unused:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        raise ModelUnsupportedError(
            f"{source} holds the tensor {unused[0]!r}{more}, which the {family} family does not use"
        )


_GGUF_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_SANDWICH_PARTS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    layout = layout_of(config.family)
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if layout.query_key_norms:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    if layout.sandwich_norms:
        shapes["pre_feedforward_layernorm.weight"] = (hidden,)
        shapes["post_feedforward_layernorm.weight"] = (hidden,)
    if config.attention_bias:
        shapes["self_attn.q_proj.bias"] = (queries,)
        shapes["self_attn.k_proj.bias"] = (keys,)
        shapes["self_attn.v_proj.bias"] = (keys,)
    if config.output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.mlp_bias:
        shapes["mlp.gate_proj.bias"] = (inner,)
        shapes["mlp.up_proj.bias"] = (inner,)
        shapes["mlp.down_proj.bias"] = (hidden,)
    return shapes
