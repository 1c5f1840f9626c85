"""Scores of pairs of texts: by a cross-encoder's own judgement, or by the cosine of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenpath.protocol.pooling import PoolingInput
from tokenpath.router.served import InputReader

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Texts on two sides, and which of them are compared: one with all, or each with its own."""

    firsts: Sequence[str]
    seconds: Sequence[str]
    """As many as ``firsts``, or any number if there is one first text."""

    @property
    def characters(self) -> int:
        return sum(map(len, self.firsts)) + sum(map(len, self.seconds))

    def together(self, reader: InputReader, keep: int | None) -> list[PoolingInput]:
        """Inputs for a cross-encoder: one a pair."""
        alone = len(self.firsts) == 1
        firsts = [self.firsts[0]] * len(self.seconds) if alone else self.firsts
        return [
            reader.pair(first, second, keep=keep)
            for first, second in zip(firsts, self.seconds, strict=True)
        ]

    def apart(self, reader: InputReader, keep: int | None) -> list[PoolingInput]:
        """Inputs for an embedding model: the first texts, then the second ones."""
        return [reader.single(text, keep=keep) for text in (*self.firsts, *self.seconds)]

    def cosines(self, vectors: Floats) -> Floats:
        """[pairs] from the vectors of ``apart``; 0 where a vector is."""
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        units = vectors / np.where(lengths > 0, lengths, 1)
        firsts, seconds = units[: len(self.firsts)], units[len(self.firsts) :]
        scores: Floats = np.einsum("ij,ij->i", np.broadcast_to(firsts, seconds.shape), seconds)
        return scores
