"""Plain PyTorch kernels: correct on every device, and the reference for faster backends."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from tokenpath.engine.batch import StepBatch
from tokenpath.engine.kernels.base import Activation, AttentionSpec, AttentionStep
from tokenpath.engine.kernels.quantize import Bits, to_int8
from tokenpath.engine.kernels.torch_attention import plan_torch_attention
from tokenpath.engine.kernels.torch_kv import write_pool
from tokenpath.engine.kernels.torch_quantized import QuantizedLinear, quantized_linear
from tokenpath.engine.kv_cache import KvLayer
from tokenpath.engine.parallel.ranks import ALONE, Ranks
from tokenpath.engine.parallel.share import Share
from tokenpath.engine.rotary import Angles


@dataclass(frozen=True, slots=True)
class TorchLinear:
    """The weights as they came; what it eats is a tensor [T, in] in their dtype."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def weight_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class TorchBackend:
    """A ``KernelBackend`` of torch calls."""

    dtype: torch.dtype
    """Of activations, and weights that are not quantized."""
    device: str
    bits: Bits | None = None
    """Of quantized weights. None: weights as they come."""
    ranks: Ranks = ALONE
    """Those that have the rest of the model."""

    @property
    def share(self) -> Share:
        return self.ranks.share

    def join(self, x: torch.Tensor) -> torch.Tensor:
        return self.ranks.join(x)

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> TorchLinear | QuantizedLinear:
        if self.bits is not None:
            return quantized_linear(weight, bias, self.bits, self.dtype)
        return TorchLinear(weight, bias)

    def tied(self, table: torch.Tensor) -> TorchLinear | QuantizedLinear:
        # Whatever the other weights have, an embedding table keeps 8 bits.
        return (
            TorchLinear(table, None)
            if self.bits is None
            else quantized_linear(table, None, 8, self.dtype)
        )

    def table(self, table: torch.Tensor) -> torch.Tensor:
        if self.bits is not None:
            table = to_int8(table).dequantize()
        return table.to(self.dtype)

    def embed(self, table: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        if self.share.parts == 1:
            return functional.embedding(token_ids, table)
        # Every part looks up something for every token; what the token's own part found counts.
        owners = token_ids // len(table)
        own = (token_ids - self.share.part * len(table)).clamp(0, len(table) - 1)
        return self.ranks.pick(functional.embedding(own, table), owners)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if weight.dim() == 1:
            return functional.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
        return functional.rms_norm(x.float(), x.shape[-1:], None, eps).mul_(weight).to(x.dtype)

    def norm_input(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self.norm(x, weight, eps)

    def gated_input(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == "silu":
            return functional.silu(gate).mul_(up)
        return functional.gelu(gate, approximate="tanh").mul_(up)

    def rotate(self, x: torch.Tensor, angles: Angles) -> torch.Tensor:
        wide = x.float()
        swapped = wide.roll(x.shape[-1] // 2, dims=-1)
        return torch.addcmul(wide * angles.cos, swapped, angles.sin).to(x.dtype)

    def write_kv(
        self, kv: KvLayer, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> None:
        write_pool(kv.keys, kv.key_scales, keys, slots)
        write_pool(kv.values, kv.value_scales, values, slots)

    def plan_attention(
        self, batch: StepBatch, specs: Collection[AttentionSpec]
    ) -> Mapping[AttentionSpec, AttentionStep]:
        return plan_torch_attention(batch, specs, dtype=self.dtype, device=self.device)
