"""What a model is served for, and which endpoints answer for it."""

from __future__ import annotations

from collections.abc import Collection

from tokenpath.protocol.errors import UnsupportedError
from tokenpath.protocol.replica import Task
from tokenpath.router.served import ServedModel

GENERATING: frozenset[Task] = frozenset({"generate"})
EMBEDDING: frozenset[Task] = frozenset({"embed"})
SCORING: frozenset[Task] = frozenset({"embed", "rerank"})
"""An embedding model scores by the cosine of its vectors."""
CLASSIFYING: frozenset[Task] = frozenset({"rerank", "classify"})

_DOES: dict[Task, str] = {
    "generate": "generates text: use /v1/chat/completions or /v1/completions",
    "embed": "makes embeddings: use /v1/embeddings, /v1/rerank or /v1/score",
    "rerank": "scores pairs of texts: use /v1/rerank, /v1/score or /v1/classify",
    "classify": "classifies texts: use /v1/classify",
}


def check_task(model: ServedModel, tasks: Collection[Task], endpoint: str) -> None:
    """Raise ``UnsupportedError`` if an endpoint for ``tasks`` is asked for another model's work."""
    if model.task not in tasks:
        raise UnsupportedError(
            f"Model '{model.name}' {_DOES[model.task]}, not {endpoint}.", param="model"
        )
