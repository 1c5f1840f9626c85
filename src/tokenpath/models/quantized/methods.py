"""Which method quantized a Hugging Face folder, by its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from tokenpath.models.layout import TensorInfo
from tokenpath.models.quantized.awq import Awq
from tokenpath.models.quantized.compressed_tensors import CompressedTensors
from tokenpath.models.quantized.fp8 import Fp8
from tokenpath.models.quantized.gptq import Gptq
from tokenpath.protocol.errors import ModelFileError, ModelUnsupportedError


class Method(Protocol):
    """One way to quantize a checkpoint."""

    def assemble(self, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """Stored tensors under their own names to logical ones, quantized matrices among them.

        Raises ``ModelFileError`` for parts that are missing, left over or of a wrong shape, and
        ``ModelUnsupportedError`` for dtypes that cannot be read.
        """
        ...


METHODS: Mapping[str, Callable[[Mapping[str, Any], Path], Method]] = {
    "awq": Awq.read,
    "compressed-tensors": CompressedTensors.read,
    "fbgemm_fp8": Fp8.read,
    "fp8": Fp8.read,
    "gptq": Gptq.read,
}
"""By ``quant_method``."""

OLD_FILES: Mapping[str, str] = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Where folders of before 2024 have what ``quantization_config`` says, and by which method."""


def read_method(config: Mapping[str, Any], source: Path) -> Method | None:
    """The method that a ``config.json`` names; None for weights that are not quantized.

    Raises ``ModelFileError`` and ``ModelUnsupportedError``.
    """
    raw = config.get("quantization_config", config.get("compression_config"))
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise ModelFileError(f"{source}: 'quantization_config' should be a JSON object")
    name = raw.get("quant_method")
    if name is None and "config_groups" in raw:
        name = "compressed-tensors"
    return method_named(name, raw, source)


def method_named(name: object, raw: Mapping[str, Any], source: Path) -> Method:
    """The method of a name, with its settings. Raises as ``read_method``."""
    read = METHODS.get(name) if isinstance(name, str) else None
    if read is None:
        raise ModelUnsupportedError(
            f"{source} describes weights quantized by {name!r}; supported: "
            f"{', '.join(sorted(METHODS))}, and GGUF of any type"
        )
    return read(raw, source)
