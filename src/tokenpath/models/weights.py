"""Tensors read from a checkpoint, under Hugging Face's names and with its numeric conventions.

The only module of this room that imports torch. One tensor is in memory at a time, so that an
engine can pack each as it comes, and a model that barely fits can be loaded.
"""

from __future__ import annotations

from collections.abc import Iterator

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from tokenpath.models.layout import TensorInfo, layout_of
from tokenpath.models.local import LocalModel
from tokenpath.protocol.errors import ModelFileError, ModelUnsupportedError

_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def read_tensor(model: LocalModel, name: str) -> torch.Tensor:
    """One tensor by its canonical name, contiguous, in memory of its own.

    From safetensors in the stored dtype; from GGUF dequantized to float32, with what GGUF
    converters change undone. Raises ``KeyError`` for a name not in ``model.tensors``,
    ``ModelUnsupportedError`` for a GGUF type that the ``gguf`` library cannot dequantize, and
    ``ModelFileError`` if the file shrank since it was opened.
    """
    info = model.tensors[name]
    if model.format == "safetensors":
        raw = torch.from_numpy(_stored_bytes(info))
        return raw.view(_SAFETENSORS_DTYPES[info.dtype]).reshape(info.shape)
    return torch.from_numpy(_as_hugging_face(model, name, _dequantized(info)))


def iter_tensors(model: LocalModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor with its canonical name, in the order of ``model.tensors``.

    Raises as ``read_tensor``.
    """
    for name in model.tensors:
        yield name, read_tensor(model, name)


def _stored_bytes(info: TensorInfo) -> npt.NDArray[np.uint8]:
    data = np.fromfile(info.file, dtype=np.uint8, count=info.stored_bytes, offset=info.offset)
    if data.size != info.stored_bytes:
        raise ModelFileError(
            f"{info.file} is truncated: {info.stored_bytes:,} bytes should follow byte "
            f"{info.offset:,}, but {data.size:,} do"
        )
    return data


def _dequantized(info: TensorInfo) -> npt.NDArray[np.float32]:
    kind = GGMLQuantizationType[info.dtype]
    block, block_bytes = GGML_QUANT_SIZES[kind]
    rows = (*info.shape[:-1], info.shape[-1] // block * block_bytes)
    try:
        values = gguf.quants.dequantize(_stored_bytes(info).reshape(rows), kind)
    except NotImplementedError:
        raise ModelUnsupportedError(
            f"{info.file} has tensors of type {info.dtype}, which the gguf library cannot "
            "dequantize"
        ) from None
    return np.ascontiguousarray(values, dtype=np.float32)


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


def _halves(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of each head from rotary pairs (0, 1), (2, 3) … to all firsts, then all seconds."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
