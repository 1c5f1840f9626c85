"""Bytes of a stored tensor, and safetensors' numbers from them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tokenpath.models.layout import TensorInfo
from tokenpath.protocol.errors import ModelFileError

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
}
"""By safetensors' names, as far as weights are stored in them."""


def read_stored(info: TensorInfo) -> torch.Tensor:
    """A safetensors' tensor in the stored dtype, in memory of its own.

    Raises ``ModelFileError`` if the file shrank since it was opened.
    """
    raw = torch.from_numpy(bytes_at(info, info.offset, info.stored_bytes))
    return raw.view(TORCH_DTYPES[info.dtype]).reshape(info.shape)


def bytes_at(info: TensorInfo, offset: int, count: int) -> npt.NDArray[np.uint8]:
    """Bytes of the tensor's file. Raises ``ModelFileError`` if the file is too short for them."""
    data = np.fromfile(info.file, dtype=np.uint8, count=count, offset=offset)
    if data.size != count:
        raise ModelFileError(
            f"{info.file} is truncated: {count:,} bytes should follow byte "
            f"{offset:,}, but {data.size:,} do"
        )
    return data
