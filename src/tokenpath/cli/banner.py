"""What ``serve`` tells the person who started it, once, beside the log."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import Literal

from tokenpath.models.sizes import human_bytes
from tokenpath.protocol.replica import ModelCard

Say = Callable[[str], None]
KEY_VARIABLE = "TOKENPATH_API_KEY"
"""Where the printed curl line looks for the key."""
Example = Literal["chat", "complete", "embed", "rerank", "classify"]
"""What a model can be shown with."""
_EXAMPLES: dict[Example, tuple[str, dict[str, object]]] = {
    "chat": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Write a haiku about the sea."}],
            "max_tokens": 32,
        },
    ),
    "complete": ("/v1/completions", {"prompt": "The capital of France is", "max_tokens": 32}),
    "embed": ("/v1/embeddings", {"input": "The tide is coming in."}),
    "rerank": (
        "/v1/rerank",
        {"query": "When is high tide?", "documents": ["The sea is high at noon.", "Bread rises."]},
    ),
    "classify": ("/v1/classify", {"input": "The tide is coming in."}),
}


def loaded_line(card: ModelCard) -> str:
    """What an engine has loaded: type, memory, and how much context it takes."""
    if card.task != "generate":
        return (
            f"Loaded {card.name}: {card.dtype}, weights {human_bytes(card.weight_bytes)}, "
            f"inputs of at most {card.max_context_tokens:,} tokens"
        )
    kv_tokens = card.kv_blocks_total * card.block_tokens
    kv_bytes = kv_tokens * card.kv_bytes_per_token
    return (
        f"Loaded {card.name}: {card.dtype}, weights {human_bytes(card.weight_bytes)}, "
        f"KV cache {kv_tokens:,} tokens ({human_bytes(kv_bytes)} in {card.kv_dtype}), "
        f"context {card.max_context_tokens:,} tokens"
    )


def door_line(*, auth: str, ever_created: bool, any_valid: bool) -> str:
    """Who may come in."""
    if auth == "none":
        return "Auth is off by the spec: open to this machine only."
    if not ever_created:
        return (
            "No API key was ever created: open to this machine only. "
            "`tokenpath keys create NAME` makes one, and from then on every request needs one."
        )
    if not any_valid:
        return (
            "Every API key is revoked, so nobody can come in; `tokenpath keys create NAME` makes "
            "a new one."
        )
    return "An API key is required (`tokenpath keys create NAME` makes one)."


def curl_line(url: str, model: str, kind: Example, *, key_needed: bool) -> str:
    """A command that works as it stands (with the key in ``TOKENPATH_API_KEY``)."""
    path, fields = _EXAMPLES[kind]
    body = json.dumps({"model": model, **fields})
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if key_needed else ""
    return (
        f"curl {shlex.quote(url + path)} -H 'Content-Type: application/json'{key} "
        f"-d {shlex.quote(body)}"
    )
