"""Which number type a model runs in."""

from __future__ import annotations

from typing import Literal

import torch

from tokenpath.engine.kernels.quantize import Bits

DtypeName = Literal["auto", "float32", "bfloat16", "int8", "int4"]


def weight_bits(name: DtypeName) -> Bits | None:
    """Bits of quantized weights; None: not quantized."""
    match name:
        case "int8":
            return 8
        case "int4":
            return 4
        case _:
            return None


def choose_dtype(name: DtypeName, device: str = "cpu") -> torch.dtype:
    """The torch dtype for activations and KV, and for weights that are not quantized.

    ``auto`` is bfloat16 where the hardware multiplies it (AVX-512 BF16, AMX, a CUDA device of
    compute capability 8 or more), else float32: emulated bfloat16 is slower than float32.
    """
    if name == "float32":
        return torch.float32
    if name in {"bfloat16", "int8", "int4"} or _multiplies_bfloat16(device):
        return torch.bfloat16
    return torch.float32


def _multiplies_bfloat16(device: str) -> bool:
    kind = torch.device(device).type
    if kind == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if kind == "cpu":
        able = torch.cpu.get_capabilities()
        return bool(able.get("avx512_bf16") or able.get("amx_bf16"))
    return False
