"""Small models written in the formats of quantized checkpoints, by packers of our tests' own.

The packers follow the formats' public descriptions and share no code with the readers: codes are
laid out bit by bit. They were compared once, by hand, with the packers of compressed-tensors 0.20
(``pack_to_int32``) and with its reading of AutoAWQ's files (``AutoAWQConverter``).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

AWQ_PACKING = [0, 2, 4, 6, 1, 3, 5, 7]
"""AutoAWQ puts the column at each of these places into the next four bits of a word."""

Tensors = dict[str, torch.Tensor]
Quantizer = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
"""A module's name and weight to its stored tensors, by suffix, and what they mean in float32."""


def pack_rows(codes: np.ndarray, bits: int) -> torch.Tensor:
    """Unsigned codes [R, C] as a stream of bits, lowest first, in int32 words [R, words]."""
    stream = (codes[..., None].astype(np.int64) >> np.arange(bits)) & 1
    stream = stream.reshape(len(codes), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32))).astype(np.uint8)
    packed_bits = np.ascontiguousarray(np.packbits(stream, axis=1, bitorder="little"))
    return torch.from_numpy(packed_bits.view("<i4").copy())


def by_groups(
    weight: torch.Tensor,
    bits: int,
    group: int,
    *,
    symmetric: bool,
    index: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float16,
) -> tuple[np.ndarray, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unsigned codes [N, K], scales [N, G] in ``dtype``, zeros [N, G], and the weight they mean."""
    columns = weight.shape[1]
    if index is None:
        index = torch.arange(columns) // group
    groups = int(index.max()) + 1
    top = (1 << bits) - 1
    scales, zeros = [], []
    for g in range(groups):
        part = weight[:, index == g]
        if symmetric:
            scales.append(part.abs().amax(1) / (1 << (bits - 1)))
            zeros.append(torch.full((len(weight),), float(1 << (bits - 1))))
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales.append((high - low) / top)
            zeros.append((-low / scales[-1]).round().clamp(0, top))
    scale, zero = torch.stack(scales, 1).to(dtype), torch.stack(zeros, 1)
    wide, shift = scale.float()[:, index], zero[:, index]
    codes = (weight / wide + shift).round().clamp(0, top)
    return codes.numpy().astype(np.int64), scale, zero, (codes - shift) * wide


def gptq(bits: int, group: int, *, symmetric: bool, ordered: bool, version: int) -> Quantizer:
    """AutoGPTQ's format; ``ordered`` gives inputs' groups in a scrambled order (desc_act)."""

    def quantize(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        columns = weight.shape[1]
        index = torch.arange(columns) // (columns if group == -1 else group)
        if ordered:
            generator = torch.Generator().manual_seed(len(name))
            index = index[torch.randperm(columns, generator=generator)]
        codes, scale, zero, meant = by_groups(weight, bits, group, symmetric=symmetric, index=index)
        stored = (zero.numpy().astype(np.int64) - (version == 1)) % (1 << bits)
        return {
            "qweight": pack_rows(codes, bits).t().contiguous(),
            "qzeros": pack_rows(stored.T, bits),
            "scales": scale.t().contiguous(),
            "g_idx": index.int(),
        }, meant

    return quantize


def awq(group: int, *, zero_point: bool = True) -> Quantizer:
    """AutoAWQ's ``gemm``."""

    def quantize(_name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scale, zero, meant = by_groups(
            weight, 4, weight.shape[1] if group == -1 else group, symmetric=not zero_point
        )

        def packed(numbers: np.ndarray) -> torch.Tensor:
            words = numbers.T.reshape(numbers.shape[1], -1, 8)[:, :, AWQ_PACKING]
            return pack_rows(words.reshape(numbers.shape[1], -1), 4)

        tensors = {"qweight": packed(codes), "scales": scale.t().contiguous()}
        if zero_point:
            tensors["qzeros"] = packed(zero.numpy().astype(np.int64))
        return tensors, meant

    return quantize


def packed(
    bits: int,
    group: int | None,
    *,
    symmetric: bool,
    ordered: bool = False,
    plain_zeros: bool = False,
) -> Quantizer:
    """compressed-tensors' ``pack-quantized``; a group of None is a channel."""

    def quantize(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        columns = weight.shape[1]
        index = torch.arange(columns) // (group or columns)
        if ordered:
            generator = torch.Generator().manual_seed(len(name))
            index = index[torch.randperm(columns, generator=generator)]
        codes, scale, zero, meant = by_groups(
            weight, bits, group or columns, symmetric=symmetric, index=index, dtype=torch.bfloat16
        )
        tensors = {
            "weight_packed": pack_rows(codes, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            unsigned = zero.numpy().astype(np.int64)
            if plain_zeros:
                tensors["weight_zero_point"] = (zero - (1 << (bits - 1))).to(torch.int8)
            else:
                tensors["weight_zero_point"] = pack_rows(unsigned.T, bits).t().contiguous()
        if ordered:
            tensors["weight_g_idx"] = index.int()
        return tensors, meant

    return quantize


def int8(group: int | None = None, *, symmetric: bool = True) -> Quantizer:
    """compressed-tensors' ``int-quantized``; a group of None is a channel."""

    def quantize(_name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scale, zero, meant = by_groups(
            weight, 8, group or weight.shape[1], symmetric=symmetric, dtype=torch.float32
        )
        tensors = {
            "weight": torch.from_numpy((codes - 128).astype(np.int8)),
            "weight_scale": scale,
        }
        if not symmetric:
            tensors["weight_zero_point"] = (zero - 128).to(torch.int8)
        return tensors, meant

    return quantize


def float8(
    block: tuple[int, int] | None, *, suffix: str, dtype: torch.dtype = torch.float32
) -> Quantizer:
    """8-bit floats: by blocks, by channel for (1, 0), by tensor for None."""

    def quantize(_name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        down, across = (rows, columns) if block is None else (block[0], block[1] or columns)
        scales = torch.stack(
            [
                torch.stack([p.abs().amax() / 448 for p in band.split(across, 1)])
                for band in weight.split(down)
            ]
        ).to(dtype)
        wide = scales.float().repeat_interleave(down, 0).repeat_interleave(across, 1)
        wide = wide[:rows, :columns]
        codes = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored = scales.reshape(()) if block is None else scales
        tensors = {"weight": codes, suffix: stored}
        if block is None:
            tensors["input_scale"] = torch.tensor(0.5)  # of activations, which is not for us
        return tensors, codes.float() * wide

    return quantize


@dataclass(frozen=True)
class Format:
    """One way to write a checkpoint: its configuration and its modules' tensors."""

    config: dict[str, Any]
    quantize: Quantizer
    skipped: tuple[str, ...] = ()
    """Parts of the names of modules that are not quantized."""


def compressed(quantize: Quantizer, *, form: str, weights: dict[str, Any], **more: Any) -> Format:
    """A compressed-tensors format of one config group for all linear modules."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", **weights}}
    ignore = more.pop("ignore", ["lm_head"])
    return Format(
        {
            "quant_method": "compressed-tensors",
            "format": form,
            "config_groups": {"group_0": group},
            "ignore": ignore,
            **more,
        },
        quantize,
        skipped=("lm_head", *(name.removeprefix("re:.*") for name in ignore)),
    )


def write(model: PreTrainedModel, folder: Path, form: Format) -> PreTrainedModel:
    """Write the model quantized; returns a copy of it with the weights that were meant."""
    meant = copy.deepcopy(model)
    modules = dict(meant.named_modules())
    tied = model.config.tie_word_embeddings
    stored: Tensors = {}
    for name, tensor in model.state_dict().items():
        module, _, leaf = name.rpartition(".")
        if tied and module == "lm_head":
            continue
        linear = isinstance(modules[module], torch.nn.Linear)
        if leaf != "weight" or not linear or any(part in module for part in form.skipped):
            stored[name] = tensor.clone().contiguous()
            continue
        parts, weight = form.quantize(module, tensor)
        stored |= {f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()}
        with torch.no_grad():
            modules[module].weight.copy_(weight)
    model.config.save_pretrained(folder)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, quantization_config=form.config)
    return meant


def change_config(folder: Path, **changes: Any) -> None:
    """Set keys of a folder's ``config.json``."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
