"""Turns a loaded decoder into one native program.

A decoder with quantized weights is read once, block by block, and becomes a list of operations with
their weights packed for the processor. A step is then a single call without Python in between. The
module behind it is ``native/``; its ``program.h`` says how a program runs.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import torch

from tokenpath.engine.batch import StepBatch
from tokenpath.engine.kernels.base import AttentionSpec
from tokenpath.engine.kernels.quantize import Int8Weight, to_int8
from tokenpath.engine.kernels.torch_quantized import QuantizedLinear
from tokenpath.engine.kv_cache import KvCache
from tokenpath.engine.layers import Attention, Decoder, RMSNorm
from tokenpath.engine.rotary import Rotary
from tokenpath.models.architecture import LayerKind, ModelConfig

_ALIGNED = 32
"""What the kernels want sizes to be multiples of."""
_KV_GROUP = 16
"""Tokens whose keys are interleaved."""


def obstacle(config: ModelConfig, block_tokens: int) -> str | None:
    """Why a model cannot run natively; None if it can."""
    sizes = {
        "hidden size": config.hidden_size,
        "feed-forward size": config.intermediate_size,
        "head size": config.head_dim,
    }
    for name, size in sizes.items():
        if size % _ALIGNED:
            return f"its {name} {size} is no multiple of {_ALIGNED}"
    if config.head_dim > 256:  # noqa: PLR2004 - MAX_HEAD_DIM of attention.h
        return f"its head size {config.head_dim} is above 256"
    if config.heads // config.kv_heads > 48:  # noqa: PLR2004 - UNIT_ROWS of attention.h
        return "more than 48 query heads share a KV head"
    if block_tokens % _KV_GROUP:
        return f"block_tokens is {block_tokens}, no multiple of {_KV_GROUP}"
    return None


class NativeProgram:
    """A decoder's forward pass. Not thread-safe: one step at a time."""

    def __init__(
        self,
        native: Any,
        kernels: str,
        decoder: Decoder,
        *,
        cache: KvCache,
        rotaries: dict[LayerKind, Rotary],
        block_tokens: int,
        threads: int,
    ) -> None:
        """Pack the decoder's weights and write the program; the decoder is not needed after."""
        self.kernels = kernels
        """Name of the instruction set."""
        self._native = native
        self._team = native.Team(threads)
        self._program = native.Program(self._team, kernels)
        self._kept: list[object] = [cache]
        """What the program holds addresses of."""
        self._buffers: dict[str, int] = {}
        self._block_tokens = block_tokens
        self._softcap = decoder.logit_softcap
        self._vocab = decoder.embedding.shape[0]
        self._cache = cache
        self.weight_bytes = 0
        """Memory of the packed weights."""
        indices: dict[int, int] = {}
        self._rotary: dict[LayerKind, int] = {}
        for kind, rotary in rotaries.items():
            if id(rotary) not in indices:
                frequencies = rotary.inverse_frequencies.tolist()
                indices[id(rotary)] = self._program.rotary(frequencies, rotary.magnitude)
            self._rotary[kind] = indices[id(rotary)]
        self._write(decoder)

    def run(self, batch: StepBatch) -> torch.Tensor:
        """float32 [sampled rows, vocab]; keys and values of the step are in the pool after."""
        logits = torch.empty(len(batch.sampled_rows), self._vocab)
        self._program.run(
            batch.token_ids,
            batch.positions,
            batch.slots,
            batch.row_starts,
            batch.context_tokens,
            batch.block_tables,
            batch.sampled_rows,
            logits.numpy(),
        )
        if self._softcap is not None:
            logits.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits

    def _write(self, decoder: Decoder) -> None:
        hidden = decoder.embedding.shape[1]
        program = self._program
        residual = self._buffer("residual", hidden)
        normed = self._buffer("normed", hidden, quantized=True)
        head = _weight(decoder.head)
        packed_head = self._pack(head)
        tied = isinstance(head.weight, Int8Weight) and decoder.tied
        table = packed_head if tied else self._pack(_table(decoder.embedding))
        scale = 1.0 if decoder.embedding_scale is None else decoder.embedding_scale
        program.embed(residual, table, scale)
        for block in decoder.blocks:
            out_norms = (
                getattr(block, "attention_out_norm", None),
                getattr(block, "mlp_out_norm", None),
            )
            self._norm_quantize(block.attention_norm, residual, normed)
            attended = self._attention(block.attention, normed)
            self._project(_weight(block.attention.out), attended, residual, out_norms[0])
            self._norm_quantize(block.mlp_norm, residual, normed)
            gate_up = _weight(block.mlp.gate_up)
            width = gate_up.weight.codes.shape[0] // 2
            joined = self._buffer("joined", width)
            rounded = self._buffer("joined, rounded", width, quantized=True)
            matrix = self._pack(_interleaved(gate_up))
            program.matmul(normed, joined, matrix, False, block.mlp.activation, False)
            program.quantize(joined, rounded, width)
            self._project(_weight(block.mlp.down), rounded, residual, out_norms[1])
        last = self._buffer("last", hidden)
        ready = self._buffer("ready", hidden, quantized=True)
        program.gather(residual, last, hidden)
        self._norm_quantize(decoder.norm, last, ready, sampled=True)
        program.matmul(ready, -1, packed_head, False, "", True)

    def _buffer(self, role: str, columns: int, *, quantized: bool = False) -> int:
        """The buffer of a role, which all layers share: each is done with it before the next."""
        name = f"{role} {columns}"
        if name not in self._buffers:
            self._buffers[name] = int(self._program.buffer(columns, quantized))
        return self._buffers[name]

    def _norm_quantize(self, norm: RMSNorm, source: int, to: int, *, sampled: bool = False) -> None:
        size = norm.weight.shape[-1]
        self._program.norm_quantize(source, to, size, self._address(norm.weight), norm.eps, sampled)

    def _attention(self, attention: Attention, source: int) -> int:
        """Write everything from the normed input to the attended, rounded output."""
        program, spec = self._program, attention.spec
        rows = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        projected = self._buffer("projected", rows)
        program.matmul(source, projected, self._pack(_weight(attention.qkv)), False, "", False)
        shape = self._shape(spec)
        layer = self._cache.layers[attention.layer]
        keys, values = layer.keys.data_ptr(), layer.values.data_ptr()
        norm = attention.query_key_norm
        program.split(
            projected,
            shape,
            keys,
            values,
            self._block_tokens,
            0 if norm is None else self._address(norm.weight),
            0.0 if norm is None else norm.eps,
            self._rotary[attention.kind],
        )
        width = spec.heads * spec.head_dim
        attended = self._buffer("attended", width)
        rounded = self._buffer("attended, rounded", width, quantized=True)
        program.attend(attended, shape, keys, values, self._block_tokens)
        program.quantize(attended, rounded, width)
        return rounded

    def _project(
        self, linear: QuantizedLinear, source: int, residual: int, norm: RMSNorm | None
    ) -> None:
        """Add a product to the residual, normed first where the family does that."""
        matrix = self._pack(linear)
        if norm is None:
            self._program.matmul(source, residual, matrix, True, "", False)
            return
        size = norm.weight.shape[-1]
        made = self._buffer("made", size)
        self._program.matmul(source, made, matrix, False, "", False)
        self._program.norm(made, residual, size, self._address(norm.weight), norm.eps, True, False)

    def _shape(self, spec: AttentionSpec) -> Any:
        return self._native.AttentionShape(
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            spec.scale,
            spec.window or 0,
            spec.softcap or 0.0,
        )

    def _address(self, tensor: torch.Tensor) -> int:
        held = tensor.float().contiguous()
        self._kept.append(held)
        return held.data_ptr()

    def _pack(self, linear: QuantizedLinear) -> Any:
        weight = linear.weight
        rows, columns = weight.codes.shape
        panels = -(-rows // self._native.PANEL)
        bits = 8 if isinstance(weight, Int8Weight) else 4
        data = _huge(panels * self._native.panel_bytes(bits, columns))
        scale = np.zeros(panels * self._native.PANEL, np.float32)
        if isinstance(weight, Int8Weight):
            self._native.pack_int8(weight.codes.numpy(), data)
            scale[:rows] = weight.scale.numpy()
        else:
            units = (t.view(torch.uint16).numpy() for t in (weight.unit, weight.low_unit))
            wholes = (t.numpy() for t in (weight.codes, weight.scale, weight.minimum))
            self._native.pack_int4(*wholes, *units, data)
        bias = 0
        if linear.bias is not None:
            padded = np.zeros(panels * self._native.PANEL, np.float32)
            padded[:rows] = linear.bias.numpy()
            self._kept.append(padded)
            bias = padded.ctypes.data
        self._kept += [data, scale]
        self.weight_bytes += data.nbytes + scale.nbytes
        return self._native.weights(bits, rows, columns, data, scale, bias)


def _weight(linear: object) -> QuantizedLinear:
    assert isinstance(linear, QuantizedLinear), "a decoder with quantized weights"
    return linear


def _table(embedding: torch.Tensor) -> QuantizedLinear:
    return QuantizedLinear(to_int8(embedding), None, torch.float32)


def _interleaved(linear: QuantizedLinear) -> QuantizedLinear:
    """Gate's and up's rows alternate, 16 by 16, so that one panel has both of its channels."""
    count = linear.weight.codes.shape[0]
    order = torch.arange(count).view(2, -1, 16).transpose(0, 1).reshape(-1)
    bias = None if linear.bias is None else linear.bias[order]
    return QuantizedLinear(linear.weight.rows(order), bias, linear.dtype)


def _huge(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Memory on huge pages, where the system has them: weights are read end to end every step."""
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, size)
