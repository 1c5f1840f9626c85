"""A retrieval task cut out of plain text: find the passage that a few words were taken from.

The text is cut into passages of equal length. A question is a run of words from a passage's middle,
which the passage then lacks; its neighbours, from the same page or file, are easily mistaken
for it. Nothing is random, so the same text is the same task everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

PASSAGE_WORDS = 96
QUESTION_WORDS = 12


@dataclass(frozen=True, slots=True)
class Task:
    """Question ``i`` was taken out of passage ``i``."""

    passages: tuple[str, ...]
    questions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """How well questions found their passages."""

    recall_at_1: float
    """Part of the questions whose passage came first."""
    recall_at_10: float
    """Part of them whose passage was among the first ten."""
    mean_reciprocal_rank: float


def cut(texts: Sequence[str], *, most: int | None = None) -> Task:
    """Cut a task of at most ``most`` passages, an equal share from each text."""
    share = None if most is None else -(-most // len(texts))
    passages: list[str] = []
    questions: list[str] = []
    for text in texts:
        words = text.split()
        ends = range(PASSAGE_WORDS, len(words) + 1, PASSAGE_WORDS)
        for end in ends[:share]:
            block = words[end - PASSAGE_WORDS : end]
            begin = (PASSAGE_WORDS - QUESTION_WORDS) // 2
            questions.append(" ".join(block[begin : begin + QUESTION_WORDS]))
            passages.append(" ".join(block[:begin] + block[begin + QUESTION_WORDS :]))
    return Task(tuple(passages[:most]), tuple(questions[:most]))


def ranking(questions: Floats, passages: Floats) -> npt.NDArray[np.int64]:
    """[questions, passages]: passages by falling cosine; equal ones in their order."""
    order: npt.NDArray[np.int64] = np.argsort(
        -(_units(questions) @ _units(passages).T), axis=1, kind="stable"
    )
    return order


def judge(order: npt.NDArray[np.int64]) -> Found:
    """How well each question found the passage of its own number."""
    ranks = np.argmax(order == np.arange(len(order))[:, None], axis=1)
    return Found(
        recall_at_1=float((ranks < 1).mean()),
        recall_at_10=float((ranks < 10).mean()),  # noqa: PLR2004 - as its name says
        mean_reciprocal_rank=float((1.0 / (ranks + 1)).mean()),
    )


def agreement(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64], *, first: int) -> float:
    """Mean part of a question's ``first`` passages that two rankings share."""
    shared = [
        len(np.intersect1d(a[:first], b[:first])) / min(first, len(a))
        for a, b in zip(one, other, strict=True)
    ]
    return float(np.mean(shared))


def least_cosine(one: Floats, other: Floats) -> float:
    """Of the vectors of equal place, the two that differ most."""
    return float((_units(one) * _units(other)).sum(axis=1).min())


def _units(vectors: Floats) -> Floats:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32, copy=False)
