"""Logits that can be asked for their largest entries without sorting or scanning the vocabulary.

A vocabulary has up to 262,144 entries and a step up to 64 rows of it, so every pass over all of it
is felt. One vectorised pass takes the maximum of each chunk of 128 entries; after that the
likeliest tokens are found by looking into the few chunks that can hold them. ``torch.topk`` and
``argmax`` cost eight times as much on a CPU, and leave the order of equal values open; here it is
fixed: value descending, then id ascending.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone knows it by

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

CHUNK = 128
_BLOCK = 8
"""Rows whose weights torch computes at a time: 8 MB at the largest vocabularies, which the
allocator gives again and the cache holds; all rows at once take three times as long."""


class Reducer(Protocol):
    """The passes over whole vocabularies, chunk by chunk; no row's figures depend on another's."""

    def maxima(self, chunks: torch.Tensor) -> Floats:
        """``[rows, chunks]``: each chunk's largest logit; NaN if there is a NaN in it.

        ``chunks`` is float32 ``[rows, chunks, CHUNK]``.
        """
        ...

    def sums(self, chunks: torch.Tensor, best: Floats, temperatures: Floats) -> Floats:
        """``[rows, chunks]``: the sum of ``exp((logit - best) / temperature)`` over each chunk.

        ``best`` and ``temperatures`` are ``[rows]``; where ``best`` is not finite, nothing is
        promised.
        """
        ...


class TorchReducer:
    """A ``Reducer`` of torch calls, on any device."""

    def maxima(self, chunks: torch.Tensor) -> Floats:
        return to_numpy(chunks.amax(-1))

    def sums(self, chunks: torch.Tensor, best: Floats, temperatures: Floats) -> Floats:
        device = chunks.device
        highest = torch.from_numpy(best).to(device)[:, None, None]
        divisors = torch.from_numpy(temperatures).to(device)[:, None, None]
        found = []
        for start in range(0, len(chunks), _BLOCK):
            rows = slice(start, start + _BLOCK)
            weights = (chunks[rows] - highest[rows]).div_(divisors[rows]).exp_()
            found.append(to_numpy(weights.sum(-1)))
        return np.concatenate(found)


TORCH = TorchReducer()


class Rows:
    """Float32 logits ``[rows, vocab]`` with the maximum of every chunk.

    Nothing here reduces across rows, so a row gives the same answers in any company. A row that
    holds NaN has a NaN maximum.
    """

    def __init__(self, logits: torch.Tensor, reducer: Reducer = TORCH) -> None:
        self.vocab = logits.shape[1]
        self.chunks = chunked(logits)
        """``[rows, chunks, CHUNK]``; the last chunk is filled up with -inf."""
        self.maxima: Floats = reducer.maxima(self.chunks)
        """``[rows, chunks]``."""
        self.best: Floats = self.maxima.max(-1)
        """``[rows]``: each row's largest logit; NaN if any is NaN."""
        self._reducer = reducer

    def sums(self, rows: Sequence[int], temperatures: Sequence[float]) -> Doubles:
        """``[len(rows), chunks]``: weights ``exp((logit - largest) / temperature)``, by chunk.

        NaN in a row that allows no choice.
        """
        chunks = select(self.chunks, rows)
        best, divisors = self.best[list(rows)], np.array(temperatures, np.float32)
        sums = self._reducer.sums(chunks, best, divisors).astype(np.float64)
        sums[~np.isfinite(best)] = np.nan
        return sums

    def argmax(self) -> Ints:
        """``[rows]``: id of each row's largest logit; the lowest on a tie."""
        best_chunks = self.maxima.argmax(-1)
        rows = torch.arange(len(best_chunks), device=self.chunks.device)
        columns = torch.from_numpy(best_chunks).to(self.chunks.device)
        ids: Ints = best_chunks * CHUNK + to_numpy(self.chunks[rows, columns]).argmax(-1)
        return ids

    def at_least(self, row: int, threshold: float) -> tuple[Ints, Floats]:
        """Ids and values of every logit ``>= threshold``, value descending, then id ascending."""
        chunks = np.flatnonzero(self.maxima[row] >= threshold)
        if len(chunks) == self.maxima.shape[1]:
            values = to_numpy(self.chunks[row])
        else:
            index = torch.from_numpy(chunks).to(self.chunks.device)
            values = to_numpy(self.chunks[row].index_select(0, index))
        where = np.flatnonzero(values.reshape(-1) >= threshold)
        ids = chunks[where // CHUNK] * CHUNK + where % CHUNK
        found = values.reshape(-1)[where]
        if threshold == -np.inf:  # the padding is no token
            real = ids < self.vocab
            ids, found = ids[real], found[real]
        order = descending(found)
        return ids[order], found[order]

    def largest(self, row: int, count: int) -> tuple[Ints, Floats]:
        """Ids and values of the ``count`` largest logits (all, if there are fewer), in order."""
        maxima = self.maxima[row]
        if count == 0:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        if count >= self.vocab:
            threshold = -np.inf
        elif count <= len(maxima):
            # ``count`` chunks reach this value, so at least ``count`` logits do.
            threshold = float(np.partition(maxima, len(maxima) - count)[len(maxima) - count])
        else:
            threshold = float(self.chunks[row].flatten().topk(count).values[-1])
        ids, values = self.at_least(row, threshold)
        return ids[:count], values[:count]


def descending(values: Floats) -> Ints:
    """Indices that sort ``values`` downwards, equal ones by index.

    Both are packed into one integer key, because NumPy sorts plain integers by vector
    instructions, several times as fast as a stable argsort of floats.
    """
    bits = (values + np.float32(0)).view(np.uint32)  # -0 becomes 0
    negative = bits >> 31 == 1
    downwards = np.where(negative, bits, ~bits & np.uint32(0x7FFFFFFF))
    keys = downwards.astype(np.uint64) << np.uint64(32) | np.arange(len(bits), dtype=np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def chunked(logits: torch.Tensor) -> torch.Tensor:
    """``[rows, vocab]`` as ``[rows, chunks, CHUNK]``; copied only if the last chunk is not full."""
    missing = -logits.shape[1] % CHUNK
    padded = F.pad(logits, (0, missing), value=-torch.inf) if missing else logits
    return padded.reshape(len(logits), -1, CHUNK)


def to_numpy(tensor: torch.Tensor) -> npt.NDArray[np.float32]:
    """The tensor's values on the host; shared memory where it is already there."""
    array: npt.NDArray[np.float32] = tensor.detach().cpu().numpy()
    return array


def select(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """The given rows, without a copy when they are all rows in order."""
    if len(rows) == logits.shape[0]:
        return logits
    return logits.index_select(0, torch.tensor(rows, device=logits.device))
