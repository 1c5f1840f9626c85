"""What there is to know about a model on disk before it is loaded.

``describe`` reads headers only; the result is plain data, printed by the CLI as a table or JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import get_args

import msgspec

from tokenpath.models import memory
from tokenpath.models.architecture import KvDtype
from tokenpath.models.layout import EMBEDDING, HEAD, TensorInfo
from tokenpath.models.local import LocalModel
from tokenpath.models.safetensors_file import read_safetensors
from tokenpath.protocol.errors import ModelFileError

_KINDS = (
    ("q_proj", "attention q"),
    ("k_proj", "attention k"),
    ("v_proj", "attention v"),
    ("o_proj", "attention o"),
    (".mlp.", "feed-forward"),
    ("norm", "norms"),
)
_KV_TOKENS = 1000


class TensorGroup(msgspec.Struct, frozen=True):
    """All tensors that play one part, as they are stored."""

    kind: str
    tensors: int
    parameters: int
    stored_bytes: int
    types: dict[str, int]
    """Stored bytes by type: ``{"Q4_K": …, "Q6_K": …}``."""


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder model that the engine can run."""

    name: str
    path: str
    format: str
    architecture: str
    family: str
    parameters: int
    stored_bytes: int
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_tokens: int
    sliding_layers: int
    sliding_window: int | None
    tied_embeddings: bool
    chat_template: bool
    groups: list[TensorGroup]
    weight_bytes: dict[str, int]
    """Memory for the weights by the type they are loaded in."""
    kv_bytes_per_1000_tokens: dict[str, int]
    """By the type of the KV cache."""


class EmbeddingDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A Hugging Face folder with an encoder, which is not served yet."""

    name: str
    path: str
    architecture: str
    parameters: int
    stored_bytes: int
    layers: int | None
    heads: int | None
    dimensions: int | None
    max_context_tokens: int | None
    types: dict[str, int]
    weight_bytes: dict[str, int]


def describe(model: LocalModel) -> Description:
    """Gather the facts of one opened model."""
    config = model.config
    kinds = [config.kind(layer) for layer in range(config.layers)]
    return Description(
        name=model.name,
        path=str(model.path),
        format=model.format,
        architecture=config.architecture,
        family=config.family,
        parameters=memory.parameters(model),
        stored_bytes=sum(t.stored_bytes for t in model.tensors.values()),
        layers=config.layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_context_tokens=config.max_context_tokens,
        sliding_layers=kinds.count("sliding"),
        sliding_window=config.sliding_window,
        tied_embeddings=config.tie_embeddings,
        chat_template=model.chat_template() is not None,
        groups=group_tensors(model.tensors),
        weight_bytes={d: memory.weight_bytes(model, d) for d in memory.WEIGHT_BYTES},
        kv_bytes_per_1000_tokens={
            dtype: config.kv_bytes_per_token(dtype) * _KV_TOKENS for dtype in get_args(KvDtype)
        },
    )


def describe_embedding(folder: Path, name: str) -> EmbeddingDescription:
    """Gather what an encoder's ``config.json`` and safetensors say.

    Raises ``ModelFileError`` if they are missing or unreadable.
    """
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{folder / 'config.json'} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelFileError(f"{folder / 'config.json'} is not a JSON object")
    tensors = [
        t for f in sorted(folder.glob("*.safetensors")) for t in read_safetensors(f).values()
    ]
    # Integer tensors are buffers, such as BERT's list of positions.
    weights = [t for t in tensors if not t.dtype.startswith(("I", "U", "BOOL"))]
    count = sum(t.elements for t in weights)
    return EmbeddingDescription(
        name=name,
        path=str(folder),
        architecture=str((config.get("architectures") or [config.get("model_type", "?")])[0]),
        parameters=count,
        stored_bytes=sum(t.stored_bytes for t in tensors),
        layers=config.get("num_hidden_layers"),
        heads=config.get("num_attention_heads"),
        dimensions=config.get("hidden_size"),
        max_context_tokens=config.get("max_position_embeddings"),
        types=_types(weights),
        weight_bytes={dtype: count * size for dtype, size in memory.ELEMENT_BYTES.items()},
    )


def group_tensors(tensors: Mapping[str, TensorInfo]) -> list[TensorGroup]:
    """Tensors by the part they play, in the order in which a token meets them."""
    order = ["embedding", *(kind for _, kind in _KINDS), "other", "head"]
    members: dict[str, list[TensorInfo]] = {kind: [] for kind in order}
    for name, tensor in tensors.items():
        members[_kind(name)].append(tensor)
    return [
        TensorGroup(
            kind=kind,
            tensors=len(group),
            parameters=sum(t.elements for t in group),
            stored_bytes=sum(t.stored_bytes for t in group),
            types=_types(group),
        )
        for kind, group in members.items()
        if group
    ]


def _kind(name: str) -> str:
    if name == EMBEDDING:
        return "embedding"
    if name == HEAD:
        return "head"
    # Norms first: `q_norm` and `k_norm` lie within attention.
    if name.endswith("norm.weight"):
        return "norms"
    return next((kind for part, kind in _KINDS if part in name), "other")


def _types(tensors: Iterable[TensorInfo]) -> dict[str, int]:
    types: dict[str, int] = {}
    for tensor in tensors:
        types[tensor.dtype] = types.get(tensor.dtype, 0) + tensor.stored_bytes
    return dict(sorted(types.items(), key=lambda item: -item[1]))
