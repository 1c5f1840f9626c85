"""AWQ checkpoints in AutoAWQ's ``gemm`` layout: eight 4-bit codes a word, along the outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tokenpath.models.layout import TensorInfo
from tokenpath.models.quantized.form import Quantized, grid, logical
from tokenpath.models.quantized.parts import (
    FLOATS,
    WORDS,
    Parts,
    check_shape,
    read_settings,
    unpacked_length,
)
from tokenpath.protocol.errors import ModelFileError, ModelUnsupportedError

BITS = 4


class AwqSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a ``quantization_config`` of AWQ says, in the key names of then and now."""

    bits: int | None = None
    w_bit: int | None = None
    group_size: int | None = None
    q_group_size: int | None = None
    zero_point: bool = True
    version: str = "gemm"


@dataclass(frozen=True, slots=True)
class Awq:
    """A ``Method``."""

    group_size: int
    """Inputs that share a scale; -1: all."""
    zero_point: bool
    source: Path

    @classmethod
    def read(cls, raw: Mapping[str, Any], source: Path) -> Awq:
        """Raises ``ModelFileError`` and ``ModelUnsupportedError``."""
        settings = read_settings(AwqSettings, raw, source)
        bits = settings.bits or settings.w_bit or BITS
        if bits != BITS or settings.version.lower() != "gemm":
            raise ModelUnsupportedError(
                f"{source} has AWQ weights of {bits} bits in the layout {settings.version!r}; "
                f"supported: {BITS} bits in 'gemm'"
            )
        size = settings.group_size or settings.q_group_size or 128
        if size != -1 and size < 1:
            raise ModelFileError(
                f"{source}: group_size is {size}, but should be positive, or -1 for one group"
            )
        return cls(size, settings.zero_point, source)

    def assemble(self, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """See ``Method``."""
        parts = Parts(tensors, self.source)
        found = {
            f"{module}.weight": self._matrix(module, parts)
            for module in list(parts.modules("qweight", WORDS))
        }
        return parts.rest({"qweight", "qzeros", "scales"}) | found

    def _matrix(self, module: str, parts: Parts) -> TensorInfo:
        codes = parts.take(module, "qweight", WORDS)
        rows = unpacked_length(module, "qweight", codes, 1, BITS)
        columns = codes.shape[0]
        group = columns if self.group_size < 0 else self.group_size
        groups = grid((rows, columns), (1, group))[1]
        why = f"groups of {group} along {columns} inputs"
        scales = parts.take(module, "scales", FLOATS)
        check_shape(module, "scales", scales, (groups, rows), why)
        if self.zero_point:
            zeros: TensorInfo | None = parts.take(module, "qzeros", WORDS)
        else:
            zeros = parts.find(module, "qzeros", WORDS)
        if zeros is not None:
            check_shape(module, "qzeros", zeros, (groups, codes.shape[1]), why)
        return logical(
            (rows, columns),
            f"AWQ {BITS}-bit",
            Quantized(
                layout="awq",
                bits=BITS,
                block=(1, group),
                codes=codes,
                scales=scales,
                zeros=zeros,
            ),
        )
