"""Paged attention over a ragged batch, in a few torch calls per layer.

Decodes (chunks of one token) of similar context length are attended to together: their keys and
values are gathered into one padded tensor and each KV head's group of query heads is treated as a
row of queries, so that nothing is repeated per query head. Longer chunks are attended to one by
one. Indices and masks depend only on the step and the window, so they are made once per step and
shared by all layers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from tokenpath.engine.batch import IntArray, StepBatch
from tokenpath.engine.kernels.base import AttentionSpec
from tokenpath.engine.kernels.torch_kv import read_pool
from tokenpath.engine.kv_cache import KvLayer

_MOST_PADDING = 2
"""Decodes share a call as long as the longest context is at most so many times the shortest."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Chunks of equal length attended to in one call: ``sequences`` times ``queries`` rows."""

    rows: slice
    sequences: int
    queries: int
    """Query tokens per sequence; 1 for decodes, else ``sequences`` is 1."""
    slots: torch.Tensor
    """int64 [sequences * keys] places of the keys to read; padding repeats the sequence's own."""
    mask: torch.Tensor | None
    """[sequences, 1, queries, keys] added to the products, 0 or minus infinity. None: nothing is
    hidden, or only what ``causal`` says."""
    causal: bool
    """Query ``i`` sees keys ``0 … i``; there are as many keys as queries."""


@dataclass(frozen=True, slots=True)
class TorchAttention:
    """An ``AttentionStep``."""

    spec: AttentionSpec
    groups: tuple[_Group, ...]

    def __call__(self, queries: torch.Tensor, kv: KvLayer) -> torch.Tensor:
        """Attend; see ``AttentionStep``."""
        parts = [self._attend(group, queries[group.rows], kv) for group in self.groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(self, group: _Group, queries: torch.Tensor, kv: KvLayer) -> torch.Tensor:
        spec = self.spec
        shape = (group.sequences, -1, spec.kv_heads, spec.head_dim)
        # [sequences, kv_heads, keys, head_dim], without copying beyond the gather itself
        dtype = queries.dtype
        keys = read_pool(kv.keys, kv.key_scales, group.slots, dtype).view(shape).transpose(1, 2)
        values = read_pool(kv.values, kv.value_scales, group.slots, dtype)
        values = values.view(shape).transpose(1, 2)
        grouped = queries.view(
            group.sequences,
            group.queries,
            spec.kv_heads,
            spec.heads // spec.kv_heads,
            spec.head_dim,
        )
        # [sequences, kv_heads, query heads per KV head, queries, head_dim]
        grouped = grouped.permute(0, 2, 3, 1, 4)
        if spec.softcap is not None:
            attended = _softcapped(grouped, keys, values, group.mask, spec)
        elif group.queries == 1:
            attended = functional.scaled_dot_product_attention(
                grouped.squeeze(3), keys, values, attn_mask=group.mask, scale=spec.scale
            ).unsqueeze(3)
        else:
            per_head = grouped.shape[2]
            attended = functional.scaled_dot_product_attention(
                grouped.squeeze(0),
                keys.transpose(0, 1).expand(-1, per_head, -1, -1),
                values.transpose(0, 1).expand(-1, per_head, -1, -1),
                attn_mask=group.mask,
                is_causal=group.causal,
                scale=spec.scale,
            ).unsqueeze(0)
        return attended.permute(0, 3, 1, 2, 4).reshape(
            group.sequences * group.queries, spec.heads * spec.head_dim
        )


def _softcapped(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    spec: AttentionSpec,
) -> torch.Tensor:
    """Attention with a soft limit on the products, which the fused torch kernels do not offer."""
    assert spec.softcap is not None
    sequences, kv_heads, per_head, count, head_dim = queries.shape
    rows = queries.reshape(sequences, kv_heads, per_head * count, head_dim)
    products = torch.matmul(rows, keys.transpose(-1, -2)).float() * spec.scale
    products = torch.tanh(products / spec.softcap) * spec.softcap
    products = products.view(sequences, kv_heads, per_head, count, -1)
    if mask is not None:
        products = products + mask.unsqueeze(1)
    weights = products.softmax(dim=-1).to(values.dtype)
    weights = weights.view(sequences, kv_heads, per_head * count, -1)
    return torch.matmul(weights, values).view(queries.shape)


def plan_torch_attention(
    batch: StepBatch,
    specs: Collection[AttentionSpec],
    *,
    dtype: torch.dtype,
    device: str,
) -> Mapping[AttentionSpec, TorchAttention]:
    """Gather indices and masks for each distinct window; specs that share one share them."""
    groups: dict[tuple[int | None, bool], tuple[_Group, ...]] = {}
    for spec in specs:
        key = (spec.window, spec.softcap is not None)
        if key not in groups:
            planner = _Planner(batch, *key, dtype, device)
            groups[key] = (*planner.decodes(), *planner.prefills())
    return {
        spec: TorchAttention(spec, groups[spec.window, spec.softcap is not None]) for spec in specs
    }


@dataclass(frozen=True, slots=True)
class _Planner:
    batch: StepBatch
    window: int | None
    explicit_masks: bool
    """The kernel takes no ``causal`` flag."""
    dtype: torch.dtype
    device: str

    def decodes(self) -> Iterator[_Group]:
        """Groups over the leading chunks of one token, whose contexts fall along the rows."""
        singles = self.batch.single_token_chunks
        context = self.batch.context_tokens[:singles]
        first = context - (context if self.window is None else np.minimum(context, self.window))
        begin = 0
        while begin < singles:
            seen = (context - first)[begin:]
            end = begin + int(np.count_nonzero(seen * _MOST_PADDING >= seen[0]))
            yield self._decode_group(begin, end, first[begin:end], context[begin:end])
            begin = end

    def _decode_group(self, begin: int, end: int, first: IntArray, stop: IntArray) -> _Group:
        keys = int((stop - first).max())
        positions = first[:, None] + np.arange(keys)
        hidden = positions >= stop[:, None]
        chunks = np.arange(begin, end)[:, None]
        slots = self.batch.slots_at(chunks, np.minimum(positions, stop[:, None] - 1))
        return _Group(
            rows=slice(begin, end),
            sequences=end - begin,
            queries=1,
            slots=self._index(slots),
            mask=self._mask(hidden[:, None, None, :]) if hidden.any() else None,
            causal=False,
        )

    def prefills(self) -> Iterator[_Group]:
        """One group for each longer chunk."""
        starts, context = self.batch.row_starts, self.batch.context_tokens
        for chunk in range(self.batch.single_token_chunks, len(context)):
            begin, end = int(starts[chunk]), int(starts[chunk + 1])
            stop = int(context[chunk])
            start = stop - (end - begin)
            first = 0 if self.window is None else max(0, start - self.window + 1)
            positions = np.arange(first, stop)
            within_window = self.window is None or stop - first <= self.window
            causal = first == start and within_window and not self.explicit_masks
            yield _Group(
                rows=slice(begin, end),
                sequences=1,
                queries=end - begin,
                slots=self._index(self.batch.slots_at(np.array(chunk), positions)),
                mask=None if causal else self._prefill_mask(start, positions),
                causal=causal,
            )

    def _prefill_mask(self, start: int, positions: IntArray) -> torch.Tensor:
        queries = np.arange(start, int(positions[-1]) + 1)[:, None]
        hidden = positions > queries
        if self.window is not None:
            hidden |= positions <= queries - self.window
        return self._mask(hidden[None, None])

    def _index(self, slots: IntArray) -> torch.Tensor:
        return torch.from_numpy(slots.reshape(-1)).to(self.device)

    def _mask(self, hidden: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self.dtype)
        return mask.masked_fill_(torch.from_numpy(hidden), float("-inf")).to(self.device)
