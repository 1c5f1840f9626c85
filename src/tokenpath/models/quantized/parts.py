"""A quantized checkpoint's stored tensors, taken part by part and each checked as it is taken."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tokenpath.models.layout import Shape, TensorInfo
from tokenpath.protocol.errors import ModelFileError, ModelUnsupportedError

Settings = TypeVar("Settings", bound=msgspec.Struct)

FLOATS = frozenset({"F16", "BF16", "F32"})
INTEGERS = frozenset({"I32", "I64"})
WORDS = frozenset({"I32"})

_ACTIVATIONS = frozenset(
    {
        "input_scale",
        "input_zero_point",
        "input_scale_ub",
        "activation_scale",
        "output_scale",
        "output_zero_point",
        "k_scale",
        "v_scale",
        "q_scale",
        "k_zero_point",
        "v_zero_point",
    }
)
"""Scales of activations, keys and values, which tokenpath rounds by scales of its own."""


class Parts:
    """Stored tensors by module and suffix; what is taken is gone."""

    def __init__(self, tensors: Mapping[str, TensorInfo], source: Path) -> None:
        self._left = {
            name: info
            for name, info in tensors.items()
            if name.rpartition(".")[2] not in _ACTIVATIONS
        }
        self._source = source

    def modules(self, suffix: str, dtypes: Collection[str]) -> Iterator[str]:
        """Names of the modules that have a tensor of this suffix and of one of these dtypes."""
        found = [n for n, info in self._left.items() if info.dtype in dtypes]
        for name in found:
            module, _, last = name.rpartition(".")
            if last == suffix:
                yield module

    def find(self, module: str, suffix: str, dtypes: Collection[str]) -> TensorInfo | None:
        """Take a part; None if it is not there. Raises ``ModelUnsupportedError`` for its dtype."""
        name = f"{module}.{suffix}"
        info = self._left.pop(name, None)
        if info is not None and info.dtype not in dtypes:
            raise ModelUnsupportedError(
                f"{info.file}: tensor {name!r} is stored as {info.dtype}, but should be "
                f"{' or '.join(sorted(dtypes))}"
            )
        return info

    def take(self, module: str, suffix: str, dtypes: Collection[str]) -> TensorInfo:
        """As ``find``. Raises ``ModelFileError`` if it is not there."""
        info = self.find(module, suffix, dtypes)
        if info is None:
            raise ModelFileError(
                f"{self._source} lacks the tensor {module + '.' + suffix!r}, which the quantized "
                f"weights of {module!r} need"
            )
        return info

    def rest(self, suffixes: Collection[str]) -> dict[str, TensorInfo]:
        """What nobody took: tensors that are not quantized.

        Raises ``ModelFileError`` for one of ``suffixes``, which belongs to a matrix that is not
        there.
        """
        for name, info in self._left.items():
            if name.rpartition(".")[2] in suffixes:
                raise ModelFileError(
                    f"{info.file}: tensor {name!r} belongs to quantized weights that are not there"
                )
        return self._left


def check_shape(module: str, suffix: str, info: TensorInfo, wanted: Shape, why: str) -> None:
    """Raise ``ModelFileError`` unless a part has a shape; sizes of 1 may be left out of it."""
    if _without_ones(info.shape) != _without_ones(wanted):
        raise ModelFileError(
            f"{info.file}: tensor {module + '.' + suffix!r} has shape {list(info.shape)}, but "
            f"{why} call for {list(wanted)}"
        )


def _without_ones(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


def unpacked_length(module: str, suffix: str, info: TensorInfo, axis: int, bits: int) -> int:
    """How many codes of so many bits the words along an axis hold. Raises ``ModelFileError``."""
    matrix = 2
    if len(info.shape) != matrix or info.shape[axis] * 32 % bits:
        raise ModelFileError(
            f"{info.file}: tensor {module + '.' + suffix!r} has shape {list(info.shape)}, which "
            f"does not hold whole codes of {bits} bits in words of 32"
        )
    return info.shape[axis] * 32 // bits


def read_settings(kind: type[Settings], raw: Mapping[str, Any], source: Path) -> Settings:
    """A method's part of the configuration. Raises ``ModelFileError`` naming the bad value."""
    try:
        return msgspec.convert(dict(raw), kind)
    except msgspec.ValidationError as error:
        raise ModelFileError(f"{source}: its quantization_config is wrong: {error}") from None
