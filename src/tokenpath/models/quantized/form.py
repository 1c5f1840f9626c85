"""How one matrix is stored as codes: the form that all methods of quantization are brought into.

``weight[n, k] = scale[r, g] * (code[n, k] - zero[r, g])`` with ``r = n // block rows`` and
``g = k // block columns``, or ``g = index[k]`` where a checkpoint orders input channels by
activation. Methods differ in where the numbers lie, which ``Layout`` names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tokenpath.models.layout import Shape, TensorInfo

Layout = Literal["plain", "packed", "gptq", "awq"]
"""Where codes, scales and zeros of a matrix [N, K] lie; G groups.

``plain``
    Codes int8 or 8-bit float [N, K]; scales and zeros [R, G].
``packed``
    Codes packed along K into int32 [N, words]; scales [R, G]; zeros [R, G], or packed along R.
``gptq``
    Codes packed along K into int32 [words, N]; scales [G, N]; zeros packed along N [G, words].
``awq``
    Codes packed along N, eight a word in an order of their own, int32 [K, N / 8]; scales [G, N];
    zeros packed as codes [G, N / 8].
"""

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word of ``awq`` the first column's four bits are, the second's, and so on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """The stored tensors that one matrix is made of, and how."""

    layout: Layout
    bits: int
    """Of a code."""
    block: tuple[int, int]
    """Rows and columns that share a scale and a zero."""
    codes: TensorInfo
    scales: TensorInfo
    zeros: TensorInfo | None = None
    index: TensorInfo | None = None
    """The group of each column; None: in order."""
    zero_shift: int = 0
    """Added to stored zeros, modulo ``2 ** bits``."""

    @property
    def recipe(self) -> tuple[object, ...]:
        """All that tells what the stored numbers mean, wherever they are."""
        return self.layout, self.bits, self.block, self.zero_shift

    @property
    def parts(self) -> tuple[TensorInfo, ...]:
        """All stored tensors of it."""
        found = (self.codes, self.scales, self.zeros, self.index)
        return tuple(part for part in found if part is not None)


def grid(shape: Shape, block: tuple[int, int]) -> tuple[int, int]:
    """How many scales a matrix has, down and across."""
    rows, columns = (-(-size // step) for size, step in zip(shape, block, strict=True))
    return rows, columns


def logical(shape: Shape, kind: str, quantized: Quantized) -> TensorInfo:
    """The matrix as the rest of tokenpath sees it; ``kind`` is what people are told it is."""
    return TensorInfo(
        shape=shape,
        dtype=kind,
        stored_bytes=sum(part.stored_bytes for part in quantized.parts),
        file=quantized.codes.file,
        offset=quantized.codes.offset,
        quantized=quantized,
    )
