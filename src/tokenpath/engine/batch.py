"""From a scheduler's plan to the index arrays of one forward pass.

All chunks of a step, prefill and decode, are computed as one list of tokens; only attention knows
where a sequence begins. This module lays that list out and says, for each token, what it is, where
it stands in its sequence and which place of the KV pool it writes. It is plain NumPy, with work per
chunk but none per token in Python, so that a step's overhead does not grow with its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from tokenpath.policy.sequence import Chunk, StepPlan

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step's tokens, laid out row after row.

    Rows of chunks of one token come first, those with the longest context before the others, so
    that decodes of similar length are neighbours and can be attended to together without moving
    anything; longer chunks follow in the plan's order. ``T`` is the step's tokens, ``N`` its
    chunks. Everything is int64 on the host.
    """

    token_ids: IntArray
    """[T]"""
    positions: IntArray
    """[T] place of each token in its own sequence, from 0."""
    slots: IntArray
    """[T] where each token's keys and values are written: ``block * block_tokens + offset``."""
    row_starts: IntArray
    """[N + 1] chunk ``i`` has the rows from ``row_starts[i]`` to before ``row_starts[i + 1]``."""
    context_tokens: IntArray
    """[N] tokens that the chunk's last token may see, itself included."""
    block_tables: IntArray
    """[N, most blocks of any chunk] physical blocks in order; what lies past a chunk's own
    blocks repeats its last one, so that padding never points into another sequence."""
    single_token_chunks: int
    """The first so many chunks have one token each."""
    sampled_rows: IntArray
    """[rows that are sampled] whose logits are wanted: in the plan's order of chunks, the last one
    of each that samples, and before it those after which drafted tokens stand."""
    block_tokens: int

    def slots_at(self, chunks: IntArray, positions: IntArray) -> IntArray:
        """Places in the KV pool of given positions of given chunks (broadcast together)."""
        blocks = self.block_tables[chunks, positions // self.block_tokens]
        return blocks * self.block_tokens + positions % self.block_tokens


def build_batch(plan: StepPlan, block_tokens: int) -> StepBatch:
    """Lay out a plan of at least one chunk.

    Every chunk must have a length of at least 1 and blocks for all its tokens, as the scheduler
    guarantees.
    """
    order = _row_order(plan.chunks)
    chunks = [plan.chunks[i] for i in order]
    lengths = np.array([chunk.length for chunk in chunks], dtype=np.int64)
    context = np.array([chunk.start for chunk in chunks], dtype=np.int64) + lengths
    row_starts = np.zeros(len(chunks) + 1, dtype=np.int64)
    np.cumsum(lengths, out=row_starts[1:])
    total = int(row_starts[-1])

    token_ids = np.fromiter(
        chain.from_iterable(chunk.token_ids for chunk in chunks),
        dtype=np.int64,
        count=total,
    )
    chunk_of_row = np.repeat(np.arange(len(chunks)), lengths)
    # A chunk ends where its context ends, so the distance to the chunk's end gives the position.
    positions = np.arange(total) - row_starts[1:][chunk_of_row] + context[chunk_of_row]
    tables = _block_tables(chunks, context, block_tokens)
    slots = tables[chunk_of_row, positions // block_tokens] * block_tokens
    slots += positions % block_tokens

    place = np.empty(len(chunks), dtype=np.int64)
    place[order] = np.arange(len(chunks))
    ends = row_starts[1:][place]
    wanted = np.array([chunk.sampled_rows for chunk in plan.chunks], dtype=np.int64)
    # Of a chunk that samples n rows: its end less n, less n - 1, … less 1.
    last = np.repeat(wanted.cumsum(), wanted)
    sampled: IntArray = np.repeat(ends, wanted) - last + np.arange(len(last))
    return StepBatch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        row_starts=row_starts,
        context_tokens=context,
        block_tables=tables,
        single_token_chunks=int(np.count_nonzero(lengths == 1)),
        sampled_rows=sampled,
        block_tokens=block_tokens,
    )


def _row_order(chunks: Seq[Chunk]) -> list[int]:
    """Indices of the plan's chunks in the order of their rows."""

    def key(index: int) -> tuple[bool, int, int]:
        chunk = chunks[index]
        return chunk.length > 1, -chunk.start if chunk.length == 1 else 0, index

    return sorted(range(len(chunks)), key=key)


def _block_tables(chunks: Seq[Chunk], context: IntArray, block_tokens: int) -> IntArray:
    """Each chunk's blocks up to its context's end, padded with the last of them."""
    needed = -(-context // block_tokens)
    tables = np.empty((len(chunks), int(needed.max())), dtype=np.int64)
    for row, chunk, count in zip(tables, chunks, needed.tolist(), strict=True):
        blocks = chunk.sequence.blocks
        row[:count] = blocks[:count]
        row[count:] = blocks[count - 1]
    return tables
