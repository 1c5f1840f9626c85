"""``/v1/embeddings``, ``/v1/rerank``, ``/v1/score`` and ``/v1/classify``."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from tokenpath.config.spec import Limits
from tokenpath.gateway.openai.errors import decode
from tokenpath.gateway.openai.pooling_inputs import (
    check_count,
    check_filled,
    check_vocabulary,
    embedding_inputs,
    kept_tokens,
    listed,
    reader_of,
    tokenized,
)
from tokenpath.gateway.openai.pooling_schema import (
    Classification,
    ClassificationList,
    ClassifyRequest,
    Document,
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    PoolingBody,
    PoolingUsage,
    RerankAnswer,
    RerankRequest,
    RerankResult,
    Score,
    ScoreList,
    ScoreRequest,
)
from tokenpath.gateway.pool import PoolingDoor, PoolingPlan, Vectors
from tokenpath.gateway.scoring import Pairs
from tokenpath.gateway.tasks import CLASSIFYING, EMBEDDING, SCORING
from tokenpath.protocol.errors import InvalidRequestError
from tokenpath.protocol.pooling import PoolingInput
from tokenpath.router.served import ServedModel

_encode = msgspec.json.encode
_embedding_decoder = msgspec.json.Decoder(EmbeddingRequest)
_rerank_decoder = msgspec.json.Decoder(RerankRequest)
_score_decoder = msgspec.json.Decoder(ScoreRequest)
_classify_decoder = msgspec.json.Decoder(ClassifyRequest)


class EmbeddingDoor:
    """A vector for each input."""

    endpoint = "/v1/embeddings"
    tasks = EMBEDDING

    def decode(self, body: bytes) -> EmbeddingRequest:
        return decode(_embedding_decoder, body)

    def model_name(self, request: EmbeddingRequest) -> str:
        return request.model

    def priority(self, request: EmbeddingRequest) -> int:
        return request.priority or 0

    def check(self, request: EmbeddingRequest, limits: Limits) -> None:
        check_count(len(listed(request.input)), limits, "input")

    async def inputs(
        self, request: EmbeddingRequest, model: ServedModel, limits: Limits
    ) -> list[PoolingInput]:
        widest = model.card.dimensions
        if request.dimensions and widest and request.dimensions > widest:
            raise InvalidRequestError(
                f"Field 'dimensions' is {request.dimensions}; this model's embeddings have "
                f"{widest}.",
                param="dimensions",
            )
        given = listed(request.input)
        check_vocabulary(given, model)
        keep = kept_tokens(request.truncate_prompt_tokens, model)
        return await tokenized(
            model,
            limits,
            lambda: embedding_inputs(given, model, keep),
            characters=sum(len(each) for each in given if isinstance(each, str)),
            param="input",
        )

    def answer(self, request: EmbeddingRequest, plan: PoolingPlan, vectors: Vectors) -> bytes:
        rows = vectors if request.dimensions is None else shortened(vectors, request.dimensions)
        encoded: Sequence[list[float] | str]
        if request.encoding_format == "base64":
            encoded = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in rows]
        else:
            encoded = rows.tolist()
        data = [Embedding("embedding", index, each) for index, each in enumerate(encoded)]
        return _encode(EmbeddingList("list", data, plan.model.name, _usage(plan)))


class RerankDoor:
    """Documents in the order in which they answer a query."""

    endpoint = "/v1/rerank"
    tasks = SCORING

    def decode(self, body: bytes) -> RerankRequest:
        return decode(_rerank_decoder, body)

    def model_name(self, request: RerankRequest) -> str:
        return request.model

    def priority(self, request: RerankRequest) -> int:
        return request.priority or 0

    def check(self, request: RerankRequest, limits: Limits) -> None:
        check_count(len(request.documents), limits, "documents")
        check_filled(_texts(request), "documents")

    async def inputs(
        self, request: RerankRequest, model: ServedModel, limits: Limits
    ) -> list[PoolingInput]:
        return await _pair_inputs(_ranked(request), request, model, limits, "documents")

    def answer(self, request: RerankRequest, plan: PoolingPlan, vectors: Vectors) -> bytes:
        scores = _pair_scores(_ranked(request), plan, vectors)
        texts = _texts(request)
        # Equal scores stay in the order of the documents.
        order = np.argsort(-np.asarray(scores), kind="stable")[: request.top_n].tolist()
        results = [
            RerankResult(
                index, scores[index], Document(texts[index]) if request.return_documents else None
            )
            for index in order
        ]
        return _encode(RerankAnswer(_new_id("rerank"), plan.model.name, results, _usage(plan)))


class ScoreDoor:
    """A score for each pair of texts."""

    endpoint = "/v1/score"
    tasks = SCORING

    def decode(self, body: bytes) -> ScoreRequest:
        return decode(_score_decoder, body)

    def model_name(self, request: ScoreRequest) -> str:
        return request.model

    def priority(self, request: ScoreRequest) -> int:
        return request.priority or 0

    def check(self, request: ScoreRequest, limits: Limits) -> None:
        pairs = _scored(request)
        if len(pairs.firsts) not in {1, len(pairs.seconds)}:
            raise InvalidRequestError(
                f"Field 'text_1' has {len(pairs.firsts)} texts and 'text_2' {len(pairs.seconds)}; "
                "give one text against many, or equally many.",
                param="text_1",
            )
        check_count(len(pairs.seconds), limits, "text_2")
        check_filled(pairs.firsts, "text_1")
        check_filled(pairs.seconds, "text_2")

    async def inputs(
        self, request: ScoreRequest, model: ServedModel, limits: Limits
    ) -> list[PoolingInput]:
        return await _pair_inputs(_scored(request), request, model, limits, "text_2")

    def answer(self, request: ScoreRequest, plan: PoolingPlan, vectors: Vectors) -> bytes:
        scores = _pair_scores(_scored(request), plan, vectors)
        data = [Score("score", index, score) for index, score in enumerate(scores)]
        return _encode(
            ScoreList(_new_id("score"), "list", _now(), plan.model.name, data, _usage(plan))
        )


class ClassifyDoor:
    """A label for each text."""

    endpoint = "/v1/classify"
    tasks = CLASSIFYING

    def decode(self, body: bytes) -> ClassifyRequest:
        return decode(_classify_decoder, body)

    def model_name(self, request: ClassifyRequest) -> str:
        return request.model

    def priority(self, request: ClassifyRequest) -> int:
        return request.priority or 0

    def check(self, request: ClassifyRequest, limits: Limits) -> None:
        texts = _listed(request.input)
        check_count(len(texts), limits, "input")
        check_filled(texts, "input")

    async def inputs(
        self, request: ClassifyRequest, model: ServedModel, limits: Limits
    ) -> list[PoolingInput]:
        texts = _listed(request.input)
        keep = kept_tokens(request.truncate_prompt_tokens, model)
        reader = reader_of(model)
        return await tokenized(
            model,
            limits,
            lambda: [reader.single(text, keep=keep) for text in texts],
            characters=sum(map(len, texts)),
            param="input",
        )

    def answer(self, _request: ClassifyRequest, plan: PoolingPlan, vectors: Vectors, /) -> bytes:
        labels = plan.model.card.labels
        data = [
            Classification(index, labels[int(row.argmax())], row.tolist(), len(labels))
            for index, row in enumerate(vectors)
        ]
        return _encode(
            ClassificationList(
                _new_id("classify"), "list", _now(), plan.model.name, data, _usage(plan)
            )
        )


DOORS: Final[tuple[PoolingDoor[Any], ...]] = (
    EmbeddingDoor(),
    RerankDoor(),
    ScoreDoor(),
    ClassifyDoor(),
)
"""Every API for vectors."""


def shortened(vectors: Vectors, dimensions: int) -> Vectors:
    """The first ``dimensions`` numbers of each vector, brought to length 1 again."""
    cut = vectors[:, :dimensions]
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    units: Vectors = (cut / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    return units


async def _pair_inputs(
    pairs: Pairs, request: PoolingBody, model: ServedModel, limits: Limits, param: str
) -> list[PoolingInput]:
    keep = kept_tokens(request.truncate_prompt_tokens, model)
    reader = reader_of(model)
    make = pairs.apart if model.task == "embed" else pairs.together
    return await tokenized(
        model, limits, lambda: make(reader, keep), characters=pairs.characters, param=param
    )


def _pair_scores(pairs: Pairs, plan: PoolingPlan, vectors: Vectors) -> list[float]:
    scores = pairs.cosines(vectors) if plan.model.task == "embed" else vectors[:, 0]
    listed_scores: list[float] = scores.tolist()
    return listed_scores


def _ranked(request: RerankRequest) -> Pairs:
    return Pairs([request.query], _texts(request))


def _scored(request: ScoreRequest) -> Pairs:
    return Pairs(_listed(request.text_1), _listed(request.text_2))


def _texts(request: RerankRequest) -> list[str]:
    return [each.text if isinstance(each, Document) else each for each in request.documents]


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _usage(plan: PoolingPlan) -> PoolingUsage:
    return PoolingUsage(plan.tokens, plan.tokens)


def _new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def _now() -> int:
    return int(time.time())
