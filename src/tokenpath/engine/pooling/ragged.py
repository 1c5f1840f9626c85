"""A step's inputs as one list of tokens, and how attention finds them in it.

All products and norms see only the tokens there are, row after row, without padding. Attention
alone needs to know which rows belong together: inputs of similar length are gathered into a padded
tensor, so that it takes a few calls a layer, with little padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from tokenpath.protocol.pooling import PoolingInput

IntArray = NDArray[np.int64]

_SHORTEST = 0.75
"""Inputs share a call if the shortest has at least this part of the longest one's tokens …"""
_FEW_TOKENS = 8
"""… or lacks no more than so many: for short ones a call costs more than padding."""


@dataclass(frozen=True, slots=True)
class Layout:
    """``N`` inputs of ``T`` tokens in all, ordered by length. Arrays are int64, on the host."""

    order: IntArray
    """[N] which of the given inputs each one is."""
    lengths: IntArray
    """[N]"""
    starts: IntArray
    """[N] row of each input's first token."""
    token_ids: IntArray
    """[T]"""
    positions: IntArray
    """[T] place of each token in its input, from 0."""
    seconds: IntArray
    """[T] 1 for a token of a pair's second text, else 0."""

    @property
    def last_rows(self) -> IntArray:
        """[N] row of each input's last token."""
        return self.starts + self.lengths - 1


def lay_out(inputs: Sequence[PoolingInput], *, longest_first: bool = True) -> Layout:
    """Lay out inputs of at least one token each."""
    given = np.array([len(each.token_ids) for each in inputs], dtype=np.int64)
    order = np.argsort(-given if longest_first else given, kind="stable")
    lengths = given[order]
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
    ordered = [inputs[i] for i in order]
    seconds_from = np.array(
        [len(each.token_ids) if each.second is None else each.second for each in ordered],
        dtype=np.int64,
    )
    return Layout(
        order=order,
        lengths=lengths,
        starts=starts,
        token_ids=np.concatenate([np.asarray(each.token_ids, np.int64) for each in ordered]),
        positions=positions,
        seconds=(positions >= np.repeat(seconds_from, lengths)).astype(np.int64),
    )


@dataclass(frozen=True, slots=True)
class _Group:
    """Neighbouring inputs that are attended to in one call."""

    rows: slice
    inputs: int
    longest: int
    gather: torch.Tensor | None
    """int64 [inputs * longest]: rows of the padded places; padding repeats an input's last row.
    None where all have the same length: the rows are in place as they are."""
    mask: torch.Tensor | None
    """[inputs, 1, 1, longest], minus infinity on padding."""
    scatter: torch.Tensor | None
    """int64 [rows]: where in the padded places each row is."""


@dataclass(frozen=True, slots=True)
class RaggedAttention:
    """Attention both ways within each input of one step."""

    groups: tuple[_Group, ...]

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values [T, 3, heads, head_dim] to [T, heads * head_dim]."""
        parts = [_attend(group, qkv[group.rows]) for group in self.groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def plan_attention(layout: Layout, *, dtype: torch.dtype, device: str) -> RaggedAttention:
    """Index arrays and masks of a step, laid out longest first; all layers share them."""
    return RaggedAttention(
        tuple(
            _group(layout, begin, end, dtype=dtype, device=device)
            for begin, end in groups_of(layout.lengths)
        )
    )


def groups_of(lengths: IntArray) -> Iterator[tuple[int, int]]:
    """Cut lengths, which fall, into runs [begin, end) of similar ones."""
    begin = 0
    while begin < len(lengths):
        longest = int(lengths[begin])
        least = min(longest * _SHORTEST, longest - _FEW_TOKENS)
        end = begin + int(np.count_nonzero(lengths[begin:] >= least))
        yield begin, end
        begin = end


def _group(layout: Layout, begin: int, end: int, *, dtype: torch.dtype, device: str) -> _Group:
    lengths = layout.lengths[begin:end]
    first = int(layout.starts[begin])
    longest = int(lengths[0])
    rows = slice(first, first + int(lengths.sum()))
    if lengths[-1] == longest:
        return _Group(rows, end - begin, longest, None, None, None)
    places = np.arange(longest)
    starts = layout.starts[begin:end, None] - first
    gather = starts + np.minimum(places, lengths[:, None] - 1)
    hidden = torch.from_numpy(places >= lengths[:, None])
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    scatter = np.flatnonzero(places < lengths[:, None])
    return _Group(
        rows=rows,
        inputs=end - begin,
        longest=longest,
        gather=torch.from_numpy(gather.reshape(-1)).to(device),
        mask=mask[:, None, None, :].to(device),
        scatter=torch.from_numpy(scatter).to(device),
    )


def _attend(group: _Group, qkv: torch.Tensor) -> torch.Tensor:
    padded = qkv if group.gather is None else qkv.index_select(0, group.gather)
    heads, head_dim = qkv.shape[2:]
    # Three of [inputs, heads, longest, head_dim]: queries, keys and values.
    split = padded.view(group.inputs, group.longest, 3, heads, head_dim).permute(2, 0, 3, 1, 4)
    attended = functional.scaled_dot_product_attention(
        split[0], split[1], split[2], attn_mask=group.mask
    )
    rows = attended.transpose(1, 2).reshape(-1, heads * head_dim)
    return rows if group.scatter is None else rows.index_select(0, group.scatter)
