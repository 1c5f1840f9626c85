"""Tensors read from a checkpoint, under Hugging Face's names and with its numeric conventions.

With ``stored`` and ``quantized`` the part of this room that imports torch. One tensor is in memory
at a time, so that an engine can pack each as it comes, and a model that barely fits can be loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from tokenpath.models.layout import TensorInfo, layout_of
from tokenpath.models.local import LocalModel
from tokenpath.models.quantized.matrix import QuantizedMatrix
from tokenpath.models.stored import TORCH_DTYPES, bytes_at, read_stored
from tokenpath.protocol.errors import ModelUnsupportedError

Number = TypeVar("Number", bound=np.generic)

_PLAIN = frozenset({"F64", "F32", "F16", "BF16"})
"""Types of both formats that are numbers one by one."""


def read_tensor(model: LocalModel, name: str) -> torch.Tensor:
    """One tensor by its canonical name, contiguous, in memory of its own.

    From safetensors in the stored dtype; quantized matrices, and all of a GGUF, in float32, with
    what GGUF converters change undone. Raises ``KeyError`` for a name not in ``model.tensors``,
    ``ModelUnsupportedError`` for a GGUF type that the ``gguf`` library cannot dequantize, and
    ``ModelFileError`` if the file shrank since it was opened.
    """
    info = model.tensors[name]
    if info.quantized is not None:
        return QuantizedMatrix(info).tensor()
    if model.format == "safetensors":
        return read_stored(info)
    return torch.from_numpy(_as_hugging_face(model, name, _dequantized(info)))


def iter_tensors(model: LocalModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor with its canonical name, in the order of ``model.tensors``.

    Raises as ``read_tensor``.
    """
    for name in model.tensors:
        yield name, read_tensor(model, name)


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix of a checkpoint that is read some rows at a time, in Hugging Face's order."""

    info: TensorInfo
    rotary_heads: int | None
    """The file has each of so many heads' rows as rotary pairs; None: in order."""

    @property
    def gguf_type(self) -> str | None:
        """What its blocks are called; None for plain numbers."""
        return None if self.info.dtype in _PLAIN else self.info.dtype

    def stored(self, begin: int, end: int) -> npt.NDArray[np.uint8]:
        """Rows as they are stored: uint8 [rows, bytes of a row].

        Raises ``ModelFileError`` if the file shrank since it was opened.
        """
        total = self.info.shape[0]
        row_bytes = self.info.stored_bytes // total
        head = 1 if self.rotary_heads is None else total // self.rotary_heads
        first, last = begin // head * head, -(-end // head) * head
        start, count = self.info.offset + first * row_bytes, (last - first) * row_bytes
        rows = bytes_at(self.info, start, count).reshape(last - first, row_bytes)
        if self.rotary_heads is not None:
            rows = _halves(rows, (last - first) // head)
        return rows[begin - first : end - first]

    def floats(self, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Rows as float32 [rows, columns]. Raises as ``stored`` and ``read_tensor``."""
        rows = self.stored(begin, end)
        if self.gguf_type is not None:
            return _dequantized_blocks(self.info, rows)
        typed = torch.from_numpy(rows).view(TORCH_DTYPES[self.info.dtype])
        numbers: npt.NDArray[np.float32] = typed.float().numpy()
        return numbers


def open_matrix(model: LocalModel, name: str) -> StoredMatrix | QuantizedMatrix:
    """One matrix by its canonical name; nothing is read yet. Raises ``KeyError``."""
    if model.tensors[name].quantized is not None:
        return QuantizedMatrix(model.tensors[name])
    heads = None
    if layout_of(model.config.family).gguf_interleaved_rotary and model.format == "gguf":
        if ".q_proj." in name:
            heads = model.config.heads
        elif ".k_proj." in name:
            heads = model.config.kv_heads
    return StoredMatrix(model.tensors[name], heads)


def _dequantized(info: TensorInfo) -> npt.NDArray[np.float32]:
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[info.dtype]]
    rows = (*info.shape[:-1], info.shape[-1] // block * block_bytes)
    return _dequantized_blocks(info, bytes_at(info, info.offset, info.stored_bytes).reshape(rows))


def _dequantized_blocks(info: TensorInfo, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Rows of blocks as float32 [rows, columns].

    The library has code for all types that files have but two: doubles and ``Q1_0``.
    """
    if info.dtype == "F64":
        return np.ascontiguousarray(blocks).view(np.float64).astype(np.float32)
    if info.dtype == "Q1_0":
        return _signs(blocks)
    try:
        values = gguf.quants.dequantize(blocks, GGMLQuantizationType[info.dtype])
    except NotImplementedError:
        raise ModelUnsupportedError(
            f"{info.file} has tensors of type {info.dtype}, which the gguf library cannot "
            "dequantize"
        ) from None
    return np.ascontiguousarray(values, dtype=np.float32)


def _signs(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Blocks of a half-precision scale and 128 bits: the scale where a bit is set, else less it."""
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType.Q1_0]
    blocks = np.ascontiguousarray(rows).reshape(len(rows), -1, size)
    scale = blocks[..., :2].copy().view(np.float16).astype(np.float32)
    signs = np.unpackbits(blocks[..., 2:], axis=-1, bitorder="little").astype(np.float32) * 2 - 1
    values: npt.NDArray[np.float32] = (signs * scale).reshape(len(rows), -1)
    return values


def _as_hugging_face(
    model: LocalModel, name: str, values: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    layout = layout_of(model.config.family)
    if layout.gguf_norms_offset and name.endswith("norm.weight"):
        return values - np.float32(1.0)
    if layout.gguf_interleaved_rotary:
        if ".q_proj." in name:
            return _halves(values, model.config.heads)
        if ".k_proj." in name:
            return _halves(values, model.config.kv_heads)
    return values


def _halves(values: npt.NDArray[Number], heads: int) -> npt.NDArray[Number]:
    """Rows of each head from rotary pairs (0, 1), (2, 3) … to all firsts, then all seconds."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
