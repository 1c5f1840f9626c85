"""The paged keys and values: one pair of tensors a layer, cut into blocks of equal size.

Which block belongs to whom is the scheduler's business; this module owns the memory and knows how
much of it a model takes.

Layers with a sliding window keep the keys and values of *all* tokens, like the others, and the
window is applied when attention reads. It costs memory, but a block then always holds everything
about its tokens, so that a prefix found in the cache is right whatever the layer's kind and
however far beyond the window the prefix reaches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tokenpath.engine.kernels.packed import huge_memory
from tokenpath.models.architecture import KvDtype, ModelConfig
from tokenpath.protocol.errors import SpecError

KV_LAYOUT = 1
"""Version of the order within a block, in torch and in the native kernels. To be raised with every
change of it, or blocks on disk would be read as something else."""
TORCH_TYPES: dict[KvDtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}


@dataclass(frozen=True, slots=True)
class KvLayer:
    """One layer's pool: two tensors [num_blocks, block_tokens, kv_heads, head_dim].

    In int8 they are codes, and each token and KV head has a float32 scale: x = code * scale. The
    native kernels order what is within a block in their own way (``native/kv.h``).
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    """[num_blocks, block_tokens, kv_heads], of int8."""
    value_scales: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class KvCache:
    """All layers' pools, on one device in one dtype."""

    layers: tuple[KvLayer, ...]


def allocate_kv_cache(
    config: ModelConfig, *, num_blocks: int, block_tokens: int, dtype: KvDtype, device: str
) -> KvCache:
    """Zeroed pools for ``num_blocks`` blocks of ``block_tokens`` tokens.

    They are zeroed rather than left uninitialised so that the memory is really there: a machine
    without enough of it fails at the start, not in the middle of somebody's request. On a CPU they
    lie on huge pages, where there are some: attention jumps from block to block.
    """
    shape = (num_blocks, block_tokens, config.kv_heads, config.head_dim)

    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if torch.device(device).type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        memory = huge_memory(math.prod(shape) * dtype.itemsize)
        return torch.from_numpy(memory).view(dtype).view(shape).zero_()

    def layer() -> KvLayer:
        keys, values = zeros(shape, TORCH_TYPES[dtype]), zeros(shape, TORCH_TYPES[dtype])
        if dtype != "int8":
            return KvLayer(keys, values)
        return KvLayer(
            keys, values, zeros(shape[:-1], torch.float32), zeros(shape[:-1], torch.float32)
        )

    return KvCache(tuple(layer() for _ in range(config.layers)))


def kv_blocks_for(
    config: ModelConfig,
    dtype: KvDtype,
    *,
    block_tokens: int,
    kv_cache_bytes: int,
    kv_cache_tokens: int | None = None,
    max_context_tokens: int | None = None,
) -> int:
    """How many blocks the pool gets.

    ``kv_cache_tokens``, when given, decides (rounded up to whole blocks); otherwise as many blocks
    as fit into ``kv_cache_bytes``. Raises ``SpecError`` if that is not even one block, or less
    than one sequence of ``max_context_tokens``, where the operator asked for that.
    """
    per_token = config.kv_bytes_per_token(dtype)
    if kv_cache_tokens is not None:
        blocks = -(-kv_cache_tokens // block_tokens)
    else:
        blocks = kv_cache_bytes // (per_token * block_tokens)
    if blocks < 1:
        raise SpecError(
            f"kv_cache_bytes is {kv_cache_bytes}, but one block of {block_tokens} tokens takes "
            f"{per_token * block_tokens} bytes; give at least that much",
            param="kv_cache_bytes",
        )
    held = blocks * block_tokens
    if max_context_tokens is not None and held < max_context_tokens:
        raise SpecError(
            f"max_context_tokens is {max_context_tokens}, but the KV cache holds {held} tokens "
            f"({per_token} bytes each); raise kv_cache_bytes or lower max_context_tokens",
            param="max_context_tokens",
        )
    return blocks
