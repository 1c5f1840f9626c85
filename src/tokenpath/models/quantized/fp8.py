"""Weights in 8-bit floats: DeepSeek's blocks with ``weight_scale_inv``, or a scale for each row.

Whatever it is called, the stored scale is what a code is multiplied by. Modules that the
configuration leaves out (``modules_to_not_convert``) are told by their dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tokenpath.models.layout import TensorInfo
from tokenpath.models.quantized.form import Quantized, grid, logical
from tokenpath.models.quantized.parts import FLOATS, Parts, check_shape, read_settings
from tokenpath.protocol.errors import ModelFileError

FLOAT8 = frozenset({"F8_E4M3", "F8_E5M2"})
_SCALES = FLOATS | {"F8_E8M0"}
_MATRIX = 2


class Fp8Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a ``quantization_config`` of fp8 says, as far as it is needed."""

    weight_block_size: list[int] | None = None
    """Rows and columns that share a scale; None: a whole row, or the whole matrix."""


@dataclass(frozen=True, slots=True)
class Fp8:
    """A ``Method``."""

    block: tuple[int, int] | None
    source: Path

    @classmethod
    def read(cls, raw: Mapping[str, Any], source: Path) -> Fp8:
        """Raises ``ModelFileError``."""
        size = read_settings(Fp8Settings, raw, source).weight_block_size
        if size is None:
            return cls(None, source)
        if len(size) != _MATRIX or min(size) < 1:
            raise ModelFileError(
                f"{source}: weight_block_size is {size}, but should be two positive numbers"
            )
        return cls((size[0], size[1]), source)

    def assemble(self, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """See ``Method``."""
        parts = Parts(tensors, self.source)
        found = {
            f"{module}.weight": self._matrix(module, parts)
            for module in list(parts.modules("weight", FLOAT8))
        }
        return parts.rest({"weight_scale", "weight_scale_inv"}) | found

    def _matrix(self, module: str, parts: Parts) -> TensorInfo:
        codes = parts.take(module, "weight", FLOAT8)
        suffix = "weight_scale_inv"
        scales = parts.find(module, suffix, _SCALES)
        if scales is None:
            suffix = "weight_scale"
            scales = parts.take(module, suffix, _SCALES)
        return float8(module, codes, suffix, scales, self.block or shared_by(codes, scales))


def shared_by(codes: TensorInfo, scales: TensorInfo) -> tuple[int, int]:
    """The block of a checkpoint that does not say it: all of the matrix, or a row."""
    rows, columns = codes.shape[0], codes.shape[-1]
    return (rows, columns) if scales.elements == 1 else (1, columns)


def float8(
    module: str, codes: TensorInfo, suffix: str, scales: TensorInfo, block: tuple[int, int]
) -> TensorInfo:
    """A matrix of 8-bit floats and their scales. Raises ``ModelFileError``."""
    if len(codes.shape) != _MATRIX:
        raise ModelFileError(
            f"{codes.file}: tensor {module + '.weight'!r} has shape {list(codes.shape)}, but "
            "8-bit floats should be a matrix"
        )
    why = f"blocks of {block[0]} x {block[1]} of a matrix of {list(codes.shape)}"
    check_shape(module, suffix, scales, grid(codes.shape, block), why)
    return logical(
        codes.shape,
        codes.dtype,
        Quantized(layout="plain", bits=8, block=block, codes=codes, scales=scales),
    )
