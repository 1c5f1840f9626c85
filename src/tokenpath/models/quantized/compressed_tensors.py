"""compressed-tensors checkpoints: integers and 8-bit floats by channel, group, block or tensor.

``config_groups`` gives schemes to modules by name, by regular expression (``re:…``) or by class
(``Linear``); ``ignore`` takes modules out. What is read is the weights: activations are rounded as
this engine does it, whatever the checkpoint says of them.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from tokenpath.models.layout import TensorInfo
from tokenpath.models.quantized.form import Quantized, grid, logical
from tokenpath.models.quantized.fp8 import FLOAT8, float8
from tokenpath.models.quantized.parts import (
    FLOATS,
    INTEGERS,
    WORDS,
    Parts,
    check_shape,
    read_settings,
    unpacked_length,
)
from tokenpath.protocol.errors import ModelFileError, ModelUnsupportedError

_FORMATS = frozenset(
    {
        "dense",
        "fakequant",
        "int-quantized",
        "float-quantized",
        "naive-quantized",
        "pack-quantized",
        "mixed-precision",
    }
)
_INT8 = frozenset({"I8"})
_MOST_BITS = 8
_EMBEDDING = "embed_tokens"
_MATRIX = 2
_PRESETS: Mapping[str, dict[str, Any]] = {
    "W8A8": {"num_bits": 8, "strategy": "channel"},
    "INT8": {"num_bits": 8, "strategy": "channel"},
    "W4A16": {"num_bits": 4, "strategy": "group", "group_size": 128},
    "W8A16": {"num_bits": 8, "strategy": "group", "group_size": 128},
    "W4A16_ASYM": {
        "num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": False,
    },
    "FP8": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "FP8_DYNAMIC": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "FP8_BLOCK": {
        "num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128],
    },
}  # fmt: skip
"""Schemes that a group's name alone may stand for."""


class WeightSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a scheme's weights are stored."""

    num_bits: int = 8
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    strategy: Literal["tensor", "channel", "group", "block", "tensor_group"] | None = None
    group_size: int | None = None
    block_structure: list[int] | str | None = None


class SchemeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One of ``config_groups``."""

    targets: list[str] = []
    weights: WeightSettings | None = None
    format: str | None = None


class CompressedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a ``quantization_config`` of compressed-tensors says, as far as it is needed."""

    config_groups: dict[str, SchemeSettings | list[str]] = {}
    format: str = "dense"
    ignore: list[str] | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """A ``Method``."""

    schemes: tuple[SchemeSettings, ...]
    ignore: tuple[str, ...]
    source: Path

    @classmethod
    def read(cls, raw: Mapping[str, Any], source: Path) -> CompressedTensors:
        """Raises ``ModelFileError`` and ``ModelUnsupportedError``."""
        settings = read_settings(CompressedSettings, raw, source)
        schemes = tuple(
            _scheme(name, group, source) for name, group in settings.config_groups.items()
        )
        for stored in (settings.format, *(scheme.format for scheme in schemes)):
            if stored is not None and stored not in _FORMATS:
                raise ModelUnsupportedError(
                    f"{source} has compressed-tensors weights in the format {stored!r}; supported: "
                    "int-quantized, float-quantized, naive-quantized, pack-quantized"
                )
        sparsity = (settings.sparsity_config or {}).get("format", "dense")
        if sparsity != "dense":
            raise ModelUnsupportedError(
                f"{source} has sparse weights ({sparsity!r}), which are not read here; supported: "
                "dense ones"
            )
        if (settings.transform_config or {}).get("config_groups"):
            raise ModelUnsupportedError(
                f"{source} has a transform_config: its activations must be rotated while it runs, "
                "which this engine does not do"
            )
        _check_patterns(
            (*(t for s in schemes for t in s.targets), *(settings.ignore or ())), source
        )
        return cls(schemes, tuple(settings.ignore or ()), source)

    def assemble(self, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """See ``Method``."""
        parts = Parts(tensors, self.source)
        packed = list(parts.modules("weight_packed", WORDS))
        plain = list(parts.modules("weight", _INT8 | FLOAT8))
        found = {f"{m}.weight": self._packed(m, parts) for m in packed}
        found |= {f"{m}.weight": self._plain(m, parts) for m in plain}
        rest = parts.rest({"weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"})
        return rest | found

    def _packed(self, module: str, parts: Parts) -> TensorInfo:
        weights = self._weights_of(module)
        bits = weights.num_bits
        codes = parts.take(module, "weight_packed", WORDS)
        words = unpacked_length(module, "weight_packed", codes, 1, 1)
        shape_info = parts.find(module, "weight_shape", INTEGERS)
        rows, columns = codes.shape[0], words // bits
        if shape_info is not None:
            rows, columns = _two_numbers(module, shape_info)
            if (rows, -(-columns * bits // 32)) != codes.shape:
                raise ModelFileError(
                    f"{codes.file}: tensor {module + '.weight_packed'!r} has shape "
                    f"{list(codes.shape)}, but a matrix of {[rows, columns]} in {bits} bits calls "
                    f"for {[rows, -(-columns * bits // 32)]}"
                )
        block = _block(weights, rows, columns, module, self.source)
        down, across = grid((rows, columns), block)
        why = f"blocks of {block[0]} x {block[1]} of a matrix of {[rows, columns]}"
        scales = parts.take(module, "weight_scale", FLOATS)
        check_shape(module, "weight_scale", scales, (down, across), why)
        zeros = None
        if not weights.symmetric:
            zeros = parts.take(module, "weight_zero_point", WORDS | _INT8)
            packed = zeros.dtype in WORDS
            stored = (-(-down * bits // 32) if packed else down, across)
            check_shape(module, "weight_zero_point", zeros, stored, why)
        else:
            parts.find(module, "weight_zero_point", WORDS | _INT8)
        index = parts.find(module, "weight_g_idx", INTEGERS)
        if index is not None:
            check_shape(module, "weight_g_idx", index, (columns,), why)
        return logical(
            (rows, columns),
            f"packed {bits}-bit",
            Quantized(
                layout="packed",
                bits=bits,
                block=block,
                codes=codes,
                scales=scales,
                zeros=zeros,
                index=index,
            ),
        )

    def _plain(self, module: str, parts: Parts) -> TensorInfo:
        weights = self._weights_of(module)
        codes = parts.take(module, "weight", _INT8 | FLOAT8)
        if len(codes.shape) != _MATRIX:
            raise ModelFileError(
                f"{codes.file}: tensor {module + '.weight'!r} has shape {list(codes.shape)}, but "
                "quantized weights should be a matrix"
            )
        rows, columns = codes.shape
        block = _block(weights, rows, columns, module, self.source)
        scales = parts.take(module, "weight_scale", FLOATS)
        if (weights.type == "float") != (codes.dtype in FLOAT8):
            raise ModelFileError(
                f"{codes.file}: tensor {module + '.weight'!r} is stored as {codes.dtype}, but its "
                f"config group says {weights.type} of {weights.num_bits} bits"
            )
        if weights.type == "float":
            parts.find(module, "weight_zero_point", FLOAT8 | _INT8)  # zeros; floats have no need
            return float8(module, codes, "weight_scale", scales, block)
        why = f"blocks of {block[0]} x {block[1]} of a matrix of {[rows, columns]}"
        check_shape(module, "weight_scale", scales, grid((rows, columns), block), why)
        zeros = parts.find(module, "weight_zero_point", _INT8)
        if zeros is None and not weights.symmetric:
            parts.take(module, "weight_zero_point", _INT8)  # raises, naming it
        if zeros is not None:
            check_shape(module, "weight_zero_point", zeros, grid((rows, columns), block), why)
        index = parts.find(module, "weight_g_idx", INTEGERS)
        if index is not None:
            check_shape(module, "weight_g_idx", index, (columns,), why)
        return logical(
            (rows, columns),
            f"int{weights.num_bits}",
            Quantized(
                layout="plain",
                bits=weights.num_bits,
                block=block,
                codes=codes,
                scales=scales,
                zeros=zeros if not weights.symmetric else None,
                index=index,
            ),
        )

    def _weights_of(self, module: str) -> WeightSettings:
        """The weights' settings in the scheme that a module falls under, by the closest match."""
        if not any(_matches(module, target) for target in self.ignore):
            for kind in (_is_name, _is_pattern, _is_class):
                for scheme in self.schemes:
                    if any(kind(t) and _matches(module, t) for t in scheme.targets):
                        if scheme.weights is not None:
                            return scheme.weights
                        break
        raise ModelFileError(
            f"{self.source}: the weights of {module!r} are quantized, but no group of "
            "'config_groups' says how"
        )


def _scheme(name: str, group: SchemeSettings | list[str], source: Path) -> SchemeSettings:
    if isinstance(group, list):
        preset = _PRESETS.get(name.upper())
        if preset is None:
            raise ModelUnsupportedError(
                f"{source} names the scheme {name!r}; supported by name: {', '.join(_PRESETS)}"
            )
        group = SchemeSettings(targets=group, weights=msgspec.convert(preset, WeightSettings))
    weights = group.weights
    if weights is not None:
        known = weights.num_bits == _MOST_BITS or weights.type == "int"
        if not known or not 1 <= weights.num_bits <= _MOST_BITS:
            raise ModelUnsupportedError(
                f"{source}: config group {name!r} has weights of type {weights.type} in "
                f"{weights.num_bits} bits; supported: int in 1 to 8 bits, float in 8"
            )
        if weights.strategy == "tensor_group":
            raise ModelUnsupportedError(
                f"{source}: config group {name!r} has scales of scales (tensor_group); supported: "
                "tensor, channel, group, block"
            )
    return group


def _is_pattern(target: str) -> bool:
    return target.startswith("re:")


def _is_class(target: str) -> bool:
    return target.isidentifier() and target[:1].isupper()


def _is_name(target: str) -> bool:
    return not _is_pattern(target) and not _is_class(target)


def _matches(module: str, target: str) -> bool:
    if _is_pattern(target):
        return re.match(target.removeprefix("re:"), module) is not None
    embedding = module.rpartition(".")[2] == _EMBEDDING
    return target in {module, "Embedding" if embedding else "Linear"}


def _check_patterns(targets: Iterable[str], source: Path) -> None:
    for target in targets:
        try:
            re.compile(target.removeprefix("re:") if _is_pattern(target) else "")
        except re.error as error:
            raise ModelFileError(
                f"{source}: {target!r} is no regular expression ({error})"
            ) from None


def _block(
    weights: WeightSettings, rows: int, columns: int, module: str, source: Path
) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    size, strategy = weights.group_size, weights.strategy
    if strategy is None:
        strategy = "tensor" if size is None else "group" if size > 0 else "channel"
    if strategy == "tensor":
        return rows, columns
    if strategy == "channel":
        return 1, columns
    if strategy == "group":
        if size is None or size < 1:
            raise ModelFileError(
                f"{source}: group_size of {module!r} is {size}, but the strategy 'group' needs a "
                "positive one"
            )
        return 1, size
    structure = weights.block_structure
    if isinstance(structure, str):  # older files: "128x128"
        numbers = structure.lower().split("x")
        structure = [int(n) if n.isdecimal() else 0 for n in numbers]
    if structure is None or len(structure) != _MATRIX or min(structure) < 1:
        raise ModelFileError(
            f"{source}: block_structure of {module!r} is {weights.block_structure!r}, but should "
            "be two positive numbers"
        )
    return structure[0], structure[1]


def _two_numbers(module: str, info: TensorInfo) -> tuple[int, int]:
    """The matrix' shape, which is stored as a tensor."""
    if info.elements != _MATRIX:
        raise ModelFileError(
            f"{info.file}: tensor {module + '.weight_shape'!r} has {info.elements} numbers "
            "instead of 2"
        )
    with info.file.open("rb") as file:
        file.seek(info.offset)
        data = file.read(info.stored_bytes)
    rows, columns = struct.unpack("<2i" if info.dtype == "I32" else "<2q", data)
    if rows < 1 or columns < 1:
        raise ModelFileError(
            f"{info.file}: tensor {module + '.weight_shape'!r} is {[rows, columns]}, but a shape "
            "is positive"
        )
    return rows, columns
