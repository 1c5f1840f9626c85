"""Bodies of the calls for vectors, and their answers: OpenAI's, Cohere's and vLLM's forms.

``null`` means absent; unknown fields are ignored, as everywhere.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tokenpath.gateway.openai.schema import INT32_MAX, INT32_MIN, NonEmpty, Positive, TokenId


class PoolingBody(msgspec.Struct, frozen=True, kw_only=True):
    """What these calls share."""

    model: NonEmpty
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    """Cut each input to so many tokens instead of refusing longer ones; -1: to what the model
    reads."""
    priority: Annotated[int, Meta(ge=INT32_MIN, le=INT32_MAX)] | None = None
    """Lower is served first. Default 0."""
    user: str | None = None


class EmbeddingRequest(PoolingBody, frozen=True, kw_only=True):
    """Body of ``POST /v1/embeddings``."""

    input: str | list[str | TokenId | list[TokenId]]
    """A text, a list of texts, token ids, or a list of lists of token ids."""
    encoding_format: Literal["float", "base64"] | None = None
    """``base64``: the vectors' float32 numbers, little-endian. Default ``float``."""
    dimensions: Positive | None = None
    """Keep so many of a vector's first numbers and bring them to length 1 again."""


class Document(msgspec.Struct, frozen=True):
    """A document as an object."""

    text: str


class RerankRequest(PoolingBody, frozen=True, kw_only=True):
    """Body of ``POST /v1/rerank``, in Cohere's and Jina's form."""

    query: NonEmpty
    documents: Annotated[list[str | Document], Meta(min_length=1)]
    top_n: Positive | None = None
    """Answer with the best so many. Default all."""
    return_documents: bool | None = None
    """Repeat the documents' texts in the answer. Default false."""


class ScoreRequest(PoolingBody, frozen=True, kw_only=True):
    """Body of ``POST /v1/score``, in vLLM's form: one text against many, or pair by pair."""

    text_1: str | Annotated[list[str], Meta(min_length=1)]
    text_2: str | Annotated[list[str], Meta(min_length=1)]


class ClassifyRequest(PoolingBody, frozen=True, kw_only=True):
    """Body of ``POST /v1/classify``."""

    input: str | Annotated[list[str], Meta(min_length=1)]


class PoolingUsage(msgspec.Struct, frozen=True):
    """Token counts of a call that generates nothing."""

    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, frozen=True):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """Numbers, or their bytes in base64."""


class EmbeddingList(msgspec.Struct, frozen=True):
    """Answer of ``POST /v1/embeddings``."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PoolingUsage


class RerankResult(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    """Which of the documents."""
    relevance_score: float
    document: Document | None = None


class RerankAnswer(msgspec.Struct, frozen=True):
    """Answer of ``POST /v1/rerank``: the best document first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: PoolingUsage


class Score(msgspec.Struct, frozen=True):
    object: Literal["score"]
    index: int
    score: float


class ScoreList(msgspec.Struct, frozen=True):
    """Answer of ``POST /v1/score``."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class Classification(msgspec.Struct, frozen=True):
    index: int
    label: str
    """Of the largest probability."""
    probs: list[float]
    """One a label, in the model's order."""
    num_classes: int


class ClassificationList(msgspec.Struct, frozen=True):
    """Answer of ``POST /v1/classify``."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classification]
    usage: PoolingUsage
