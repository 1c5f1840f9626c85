"""What there is to know about a model on disk before it is loaded.

``describe`` reads headers only; the result is plain data, printed by the CLI as a table or JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import get_args

import msgspec

from tokenpath.models import memory
from tokenpath.models.architecture import KvDtype
from tokenpath.models.encoder_model import EncoderModel
from tokenpath.models.layout import EMBEDDING, HEAD, TensorInfo
from tokenpath.models.local import LocalModel
from tokenpath.models.servable import settle_task
from tokenpath.protocol.replica import Task

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


class EncoderDescription(msgspec.Struct, frozen=True, kw_only=True):
    """An encoder, which embeds, scores or classifies."""

    name: str
    path: str
    architecture: str
    task: Task
    """What it is served for."""
    parameters: int
    stored_bytes: int
    layers: int
    heads: int
    dimensions: int
    labels: list[str]
    """Of its classification head; empty without one."""
    vocab_size: int
    max_context_tokens: int
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


def describe_encoder(model: EncoderModel) -> EncoderDescription:
    """Gather the facts of one opened encoder."""
    config = model.config
    return EncoderDescription(
        name=model.name,
        path=str(model.path),
        architecture=config.architecture,
        task=settle_task(model, "auto"),
        parameters=memory.parameters(model),
        stored_bytes=sum(t.stored_bytes for t in model.tensors.values()),
        layers=config.layers,
        heads=config.heads,
        dimensions=config.hidden_size,
        labels=list(config.labels),
        vocab_size=config.vocab_size,
        max_context_tokens=model.max_tokens,
        types=_types(model.tensors.values()),
        weight_bytes={d: memory.weight_bytes(model, d) for d in memory.ELEMENT_BYTES},
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
