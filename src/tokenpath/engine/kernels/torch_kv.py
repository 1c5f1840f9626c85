"""Reads and writes places of the KV pool in torch, rounding to int8 where the pool is int8."""

from __future__ import annotations

import torch

from tokenpath.engine.kernels.quantize import quantize_rows


def write_pool(
    pool: torch.Tensor, scales: torch.Tensor | None, heads: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store [T, kv_heads, head_dim] at int64 ``slots`` [T] of one of a ``KvLayer``'s tensors."""
    if scales is not None:
        codes, scale = quantize_rows(heads.flatten(0, 1))
        scales.flatten(0, 1).index_copy_(0, slots, scale.view(heads.shape[:-1]))
        heads = codes.view(heads.shape)
    pool.flatten(0, 1).index_copy_(0, slots, heads)


def read_pool(
    pool: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """``dtype`` [T, kv_heads, head_dim] from int64 ``slots`` [T], which may repeat."""
    heads = pool.flatten(0, 1).index_select(0, slots)
    if scales is None:
        return heads
    return (heads * scales.flatten(0, 1).index_select(0, slots).unsqueeze(-1)).to(dtype)
