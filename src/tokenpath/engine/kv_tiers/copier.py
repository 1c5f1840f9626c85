"""Copies whole blocks between the KV pool and plain memory, as bytes.

A block's bytes are its part of each of the pool's tensors, layer by layer: keys, values and, in
int8, their scales. What order the kernels keep within a block is none of our business, as long as
the same kernels read it again; ``layout`` names all that the bytes depend on besides the model
itself. This is the one place that takes a block apart, also for whoever sends blocks elsewhere.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tokenpath.engine.kv_cache import KV_LAYOUT, KvCache

Bytes = npt.NDArray[np.uint8]


class BlockCopier:
    """Reads and writes blocks of one pool."""

    def __init__(self, cache: KvCache, *, kernels: str) -> None:
        """``kernels`` is what computes, and so orders what is within a block."""
        pieces = [
            tensor.view(tensor.shape[0], -1).view(torch.uint8)
            for layer in cache.layers
            for tensor in (layer.keys, layer.values, layer.key_scales, layer.value_scales)
            if tensor is not None
        ]
        self._pieces: list[tuple[int, int, torch.Tensor]] = []
        end = 0
        for piece in pieces:
            start, end = end, end + piece.shape[1]
            self._pieces.append((start, end, piece))
        # Two pieces a layer, of a few kB each: NumPy's calls take a third of the time of torch's.
        self._in_memory: list[tuple[int, int, Bytes]] | None = None
        if cache.layers[0].keys.device.type == "cpu":
            self._in_memory = [(start, end, piece.numpy()) for start, end, piece in self._pieces]
        self.block_bytes = end
        """Bytes of one block over all layers."""
        first = cache.layers[0].keys
        self.layout = (
            f"{KV_LAYOUT} {kernels} {first.dtype} {tuple(first.shape[1:])} of {len(cache.layers)}"
        )
        """Equal for pools whose blocks can be exchanged, if their models are the same."""

    def read(self, block: int, to: Bytes) -> None:
        """Copy a block's contents to ``to`` [block_bytes]."""
        if self._in_memory is not None:
            for start, end, place in self._in_memory:
                to[start:end] = place[block]
            return
        row = torch.from_numpy(to)
        for start, end, piece in self._pieces:
            row[start:end].copy_(piece[block])

    def write(self, block: int, source: Bytes) -> None:
        """Overwrite a block with what ``read`` gave."""
        if self._in_memory is not None:
            for start, end, place in self._in_memory:
                place[block] = source[start:end]
            return
        row = torch.from_numpy(source)
        for start, end, piece in self._pieces:
            piece[block].copy_(row[start:end])
