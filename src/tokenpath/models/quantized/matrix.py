"""From codes to float32, some rows at a time: what every method of quantization ends in.

Everything is computed in float32 from integers and the stored scales, so each weight is rounded
once, by its own multiplication.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tokenpath.models.layout import TensorInfo
from tokenpath.models.quantized.form import AWQ_ORDER, Quantized, grid
from tokenpath.models.quantized.words import unpack
from tokenpath.models.stored import read_stored
from tokenpath.protocol.errors import ModelFileError

_WEIGHTS_AT_A_TIME = 1 << 21
"""Bounds what is in float32 beside the result."""
_SMALLEST_GROUP = 32
_MOST_BITS = 4


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A matrix' stored tensors, in memory."""

    codes: torch.Tensor
    scales: torch.Tensor
    """float32 [R, G]"""
    zeros: torch.Tensor
    """float32 [R, G]"""
    index: torch.Tensor | None
    """int64 [K]: each column's group; None if it is ``k // block columns`` in whole blocks."""


@dataclass(frozen=True, slots=True)
class CodeRows:
    """Rows of a matrix of at most 4 bits in groups, as they are stored.

    ``weight[n, k] = scale[n, g] * (codes[n, k] - zero[n, g])``, ``g = k // 32``.
    """

    codes: torch.Tensor
    """uint8 [rows, K]"""
    scale: torch.Tensor
    """float32 [rows, K / 32], not negative."""
    zero: torch.Tensor
    """float32 [rows, K / 32], not negative."""


@dataclass(slots=True)
class QuantizedMatrix:
    """A quantized matrix that is read some rows at a time, by any number of threads.

    Its stored tensors are read at the first call and held until it is dropped.
    """

    info: TensorInfo
    _form: Quantized = field(init=False)
    _loaded: _Loaded | None = None
    _loading: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        assert self.info.quantized is not None
        self._form = self.info.quantized

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """float32 [rows, columns].

        Raises ``ModelFileError`` if a file shrank since it was opened, or an index points beyond
        the groups.
        """
        loaded = self._load()
        codes = self._codes(loaded, begin, end)
        scales, zeros = (self._of_rows(part, begin, end) for part in (loaded.scales, loaded.zeros))
        if loaded.index is not None:
            return (codes - zeros[:, loaded.index]) * scales[:, loaded.index]
        grouped = codes.view(len(codes), scales.shape[1], -1)
        return ((grouped - zeros[:, :, None]) * scales[:, :, None]).flatten(1)

    def floats(self, begin: int, end: int) -> npt.NDArray[np.float32]:
        """As ``rows``, for NumPy."""
        numbers: npt.NDArray[np.float32] = self.rows(begin, end).numpy()
        return numbers

    def tensor(self) -> torch.Tensor:
        """All of it: float32 [rows, columns]. Raises as ``rows``."""
        total, columns = self.info.shape
        whole = torch.empty((total, columns))
        step = max(_SMALLEST_GROUP, _WEIGHTS_AT_A_TIME // columns)
        for begin in range(0, total, step):
            end = min(total, begin + step)
            whole[begin:end] = self.rows(begin, end)
        return whole

    def code_rows(self, begin: int, end: int) -> CodeRows | None:
        """Rows as the codes that they are stored as; None where they have another form.

        Raises as ``rows``.
        """
        form, columns = self._form, self.info.shape[1]
        if form.bits > _MOST_BITS or form.layout == "plain" or form.block[0] != 1:
            return None
        if columns % _SMALLEST_GROUP or form.block[1] % _SMALLEST_GROUP or columns % form.block[1]:
            return None
        loaded = self._load()
        if loaded.index is not None:
            return None
        scale, zero = loaded.scales[begin:end], loaded.zeros[begin:end]
        if not (scale >= 0).all() or not (zero >= 0).all():
            return None
        each = form.block[1] // _SMALLEST_GROUP
        return CodeRows(
            self._codes(loaded, begin, end).to(torch.uint8),
            scale.repeat_interleave(each, 1),
            zero.repeat_interleave(each, 1),
        )

    def _load(self) -> _Loaded:
        with self._loading:
            if self._loaded is None:
                self._loaded = self._read()
            return self._loaded

    def _read(self) -> _Loaded:
        form = self._form
        down, across = grid(self.info.shape, form.block)
        scales = read_stored(form.scales).float()
        transposed = form.layout in {"gptq", "awq"}
        scales = scales.reshape(across, down).t() if transposed else scales.reshape(down, across)
        return _Loaded(
            read_stored(form.codes), scales.contiguous(), self._zeros(down, across), self._index()
        )

    def _zeros(self, down: int, across: int) -> torch.Tensor:
        """float32 [R, G]."""
        form = self._form
        # Packed codes are counted from 0, so that half of them are meant to be negative.
        middle = 0.0 if form.layout == "plain" else float(1 << (form.bits - 1))
        if form.zeros is None:
            return torch.full((down, across), middle)
        stored = read_stored(form.zeros)
        if form.layout == "awq":
            zeros = unpack(stored, form.bits, down, axis=1, order=AWQ_ORDER).t()
        elif form.layout == "gptq":
            zeros = unpack(stored.reshape(across, -1), form.bits, down, axis=1).t()
            zeros = (zeros.int() + form.zero_shift) & ((1 << form.bits) - 1)
        elif stored.dtype == torch.int32:
            zeros = unpack(stored.reshape(-1, across), form.bits, down, axis=0)
        else:
            return stored.reshape(down, across).float() + middle
        return zeros.float().contiguous()

    def _index(self) -> torch.Tensor | None:
        form, columns = self._form, self.info.shape[1]
        step = form.block[1]
        in_order = torch.arange(columns) // step
        if form.index is None:
            return None if columns % step == 0 else in_order
        index = read_stored(form.index).flatten().long()
        groups = grid(self.info.shape, form.block)[1]
        if not ((index >= 0) & (index < groups)).all():
            raise ModelFileError(
                f"{form.index.file}: an input's group in the index of a matrix of "
                f"{list(self.info.shape)} is not among its {groups} groups"
            )
        return None if columns % step == 0 and torch.equal(index, in_order) else index

    def _codes(self, loaded: _Loaded, begin: int, end: int) -> torch.Tensor:
        """float32 [rows, columns], counted from 0 where they are packed."""
        form, columns = self._form, self.info.shape[1]
        if form.layout == "plain":
            return loaded.codes[begin:end].float()
        if form.layout == "packed":
            return unpack(loaded.codes[begin:end], form.bits, columns, axis=1).float()
        if form.layout == "gptq":
            words = loaded.codes[:, begin:end].contiguous()
            return unpack(words, form.bits, columns, axis=0).t().float().contiguous()
        each = len(AWQ_ORDER)
        first = begin // each
        words = loaded.codes[:, first : -(-end // each)].contiguous()
        held = unpack(words, form.bits, words.shape[1] * each, axis=1, order=AWQ_ORDER)
        return held[:, begin - first * each : end - first * each].t().float().contiguous()

    def _of_rows(self, part: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """The scales or zeros of rows, one each."""
        step = self._form.block[0]
        if step == 1:
            return part[begin:end]
        return part[torch.arange(begin, end) // step]
