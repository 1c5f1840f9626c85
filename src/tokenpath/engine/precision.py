"""Which number type a model runs in."""

from __future__ import annotations

from typing import Literal

import torch

from tokenpath.engine.kernels.quantize import Bits
from tokenpath.models.architecture import KvDtype
from tokenpath.models.memory import Dtype
from tokenpath.protocol.errors import SpecError

DtypeName = Literal["auto", "float32", "bfloat16", "int8", "int4"]
KvDtypeName = Literal["auto", "bfloat16", "int8"]


def weight_bits(name: Dtype) -> Bits | None:
    """Bits of quantized weights; None: not quantized."""
    match name:
        case "int8":
            return 8
        case "int4":
            return 4
        case _:
            return None


def settle_dtype(name: DtypeName, device: str = "cpu", *, native: bool) -> Dtype:
    """What ``auto`` means here; every other name is itself.

    ``native`` says whether the native kernels can run the model. Then it is int8, several times
    faster than torch and less than 1 % of perplexity away from bfloat16. Otherwise it is bfloat16
    where the hardware multiplies it (AVX-512 BF16, AMX, a CUDA device of compute capability 8 or
    more), else float32: emulated bfloat16 is slower than float32.
    """
    if name != "auto":
        return name
    if native and torch.device(device).type == "cpu":
        return "int8"
    return "bfloat16" if _multiplies_bfloat16(device) else "float32"


def settle_kv_dtype(name: KvDtypeName, dtype: Dtype) -> KvDtype:
    """What ``auto`` means for the KV of a model in ``dtype``: the type of activations.

    Raises ``SpecError`` for bfloat16 KV under float32 activations, which would round for nothing.
    """
    if name == "bfloat16" and dtype == "float32":
        raise SpecError(
            "kv_dtype 'bfloat16' goes with dtype 'bfloat16', 'int8' or 'int4'; for dtype 'float32' "
            "use 'auto' or 'int8'",
            param="kv_dtype",
        )
    if name != "auto":
        return name
    return "float32" if dtype == "float32" else "bfloat16"


def torch_dtype(name: Dtype) -> torch.dtype:
    """The type of activations, and of weights that are not quantized."""
    return torch.float32 if name == "float32" else torch.bfloat16


def _multiplies_bfloat16(device: str) -> bool:
    kind = torch.device(device).type
    if kind == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if kind == "cpu":
        able = torch.cpu.get_capabilities()
        return bool(able.get("avx512_bf16") or able.get("amx_bf16"))
    return False
