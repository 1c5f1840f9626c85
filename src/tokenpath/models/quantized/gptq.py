"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them: ``qweight``, ``qzeros``, ``scales``.

Codes of 2, 3, 4 or 8 bits are packed along the inputs. The first version of the format stores each
zero less one, and a zero of 0 as the largest code; ``checkpoint_format: gptq_v2`` stores it as it
is. ``g_idx`` tells each input's group, where inputs were put in the order of their activations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from tokenpath.models.layout import TensorInfo
from tokenpath.models.quantized.form import Quantized, grid, logical
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


class GptqSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a ``quantization_config`` of GPTQ says, as far as it is needed."""

    bits: Literal[2, 3, 4, 8]
    group_size: int = 128
    """Inputs that share a scale; -1: all."""
    sym: bool = True
    desc_act: bool = False
    checkpoint_format: str = "gptq"
    is_marlin_format: bool = False
    dynamic: dict[str, dict[str, Any]] | None = None
    """Other settings for the modules that a regular expression matches (``-:`` for none)."""


@dataclass(frozen=True, slots=True)
class Gptq:
    """A ``Method``."""

    settings: GptqSettings
    source: Path

    @classmethod
    def read(cls, raw: Mapping[str, Any], source: Path) -> Gptq:
        """Raises ``ModelFileError`` and ``ModelUnsupportedError``."""
        settings = read_settings(GptqSettings, raw, source)
        _check_group(settings.group_size, source)
        stored = "marlin" if settings.is_marlin_format else settings.checkpoint_format
        if stored not in {"gptq", "gptq_v2"}:
            raise ModelUnsupportedError(
                f"{source} has GPTQ weights in the format {stored!r}, which one kernel alone "
                "reads; supported: gptq, gptq_v2"
            )
        return cls(settings, source)

    def assemble(self, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """See ``Method``."""
        parts = Parts(tensors, self.source)
        found = {
            f"{module}.weight": self._matrix(module, parts)
            for module in list(parts.modules("qweight", WORDS))
        }
        return parts.rest({"qweight", "qzeros", "scales", "g_idx"}) | found

    def _matrix(self, module: str, parts: Parts) -> TensorInfo:
        settings = self._settings_of(module)
        bits = settings.bits
        codes = parts.take(module, "qweight", WORDS)
        columns = unpacked_length(module, "qweight", codes, 0, bits)
        rows = codes.shape[1]
        group = columns if settings.group_size < 0 else settings.group_size
        groups = grid((rows, columns), (1, group))[1]
        why = f"groups of {group} along {columns} inputs"
        scales = parts.take(module, "scales", FLOATS)
        check_shape(module, "scales", scales, (groups, rows), why)
        zeros = parts.find(module, "qzeros", WORDS)
        if zeros is None and not settings.sym:
            parts.take(module, "qzeros", WORDS)  # raises, naming it
        if zeros is not None:
            check_shape(module, "qzeros", zeros, (groups, -(-rows * bits // 32)), why)
        index = parts.find(module, "g_idx", INTEGERS)
        if index is None and settings.desc_act:
            parts.take(module, "g_idx", INTEGERS)  # raises, naming it
        if index is not None:
            check_shape(module, "g_idx", index, (columns,), why)
        return logical(
            (rows, columns),
            f"GPTQ {bits}-bit",
            Quantized(
                layout="gptq",
                bits=bits,
                block=(1, group),
                codes=codes,
                scales=scales,
                zeros=zeros,
                index=index,
                zero_shift=1 if settings.checkpoint_format == "gptq" else 0,
            ),
        )

    def _settings_of(self, module: str) -> GptqSettings:
        """The settings of one module: those of the first pattern that matches, else the common."""
        for pattern, changes in (self.settings.dynamic or {}).items():
            expression = pattern.removeprefix("+:").removeprefix("-:")
            try:
                matches = re.match(expression, module)
            except re.error as error:
                raise ModelFileError(
                    f"{self.source}: 'dynamic' has {pattern!r}, which is no regular expression "
                    f"({error})"
                ) from None
            if matches:
                common = msgspec.structs.asdict(self.settings)
                changed = read_settings(GptqSettings, common | changes, self.source)
                _check_group(changed.group_size, self.source)
                return changed
        return self.settings


def _check_group(size: int, source: Path) -> None:
    if size != -1 and size < 1:
        raise ModelFileError(
            f"{source}: group_size is {size}, but should be positive, or -1 for one group"
        )
