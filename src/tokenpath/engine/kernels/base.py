"""The contract between the model families and whatever computes for them.

A backend is chosen once, when a model is loaded; families and layers call it through these
protocols and never look at what it returns more closely than the protocols say. In particular the
values that flow *into* a matrix product are opaque: one backend hands over plain activations,
another hands over int8 values with a scale per token, made in the same pass as the norm before it.

Common to all calls: activations have one row per token of the step, in the backend's own dtype;
norms, rotary angles, softmax and soft limits are computed in float32 whatever that dtype is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import torch

from tokenpath.engine.batch import StepBatch
from tokenpath.engine.kv_cache import KvLayer
from tokenpath.engine.parallel.share import Share
from tokenpath.engine.rotary import Angles

LinearInput: TypeAlias = Any
"""What a backend's ``Linear`` eats: made by ``norm_input``, ``gated_input`` or an attention step of
the same backend, and good for nothing else."""

Table: TypeAlias = Any
"""An embedding table as a backend holds it: what its ``embed`` reads."""

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The arithmetic of one kind of attention layer; layers with equal specs share their plan."""

    heads: int
    kv_heads: int
    """Divides ``heads``; query head ``h`` reads KV head ``h // (heads / kv_heads)``."""
    head_dim: int
    scale: float
    """Factor on the products of queries and keys."""
    window: int | None = None
    """A token sees itself and the ``window - 1`` tokens before it; None: all before it."""
    softcap: float | None = None
    """``c * tanh(x / c)`` on the scaled products."""


class Linear(Protocol):
    """A weight matrix as the backend holds it, with its bias if it has one."""

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights as held."""
        ...

    def __call__(self, x: LinearInput) -> torch.Tensor:
        """[T, in] to [T, out]."""
        ...


class AttentionStep(Protocol):
    """Attention of one spec, planned for one step; called once per layer."""

    def __call__(self, queries: torch.Tensor, kv: KvLayer) -> LinearInput:
        """Attend to the pool: queries [T, heads, head_dim] to [T, heads * head_dim].

        The step's own keys and values are already written. Reads no place of the pool that does
        not belong to the row's own sequence, so that a neighbour's NaN stays the neighbour's.
        """
        ...


class KernelBackend(Protocol):
    """Everything a model family needs computed."""

    @property
    def share(self) -> Share:
        """Which part of a model this rank has: the rows of its weights are that part's alone."""
        ...

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """[T, n] of each part to [T, parts * n] of all: activations, or a ``LinearInput``."""
        ...

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Take over a weight [out, in] and a bias [out], packing them as the backend likes.

        The backend may keep the tensors themselves, or drop them.
        """
        ...

    def tied(self, table: torch.Tensor) -> Linear:
        """The product that makes logits with an embedding table [vocab, hidden]."""
        ...

    def table(self, table: torch.Tensor) -> Table:
        """Take over an embedding table [vocab, hidden]."""
        ...

    def embed(self, table: Table, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of ``table`` [vocab, hidden] for int64 ids [T], whichever part has them."""
        ...

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMS norm over the last dimension times a float32 weight.

        ``weight`` has the shape of the last dimension or of the last two.
        """
        ...

    def norm_input(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> LinearInput:
        """``norm`` of [T, in], prepared for a ``Linear``."""
        ...

    def gated_input(self, gate_up: torch.Tensor, activation: Activation) -> LinearInput:
        """``activation(gate) * up`` of [T, 2 * n], gate first, prepared for a ``Linear``."""
        ...

    def rotate(self, x: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Rotary embedding of [T, any heads, head_dim]."""
        ...

    def write_kv(
        self, kv: KvLayer, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Store [T, kv_heads, head_dim] at int64 ``slots`` [T], which are distinct.

        Writing the same step again changes nothing.
        """
        ...

    def plan_attention(
        self, batch: StepBatch, specs: Collection[AttentionSpec]
    ) -> Mapping[AttentionSpec, AttentionStep]:
        """Work out, once per step, what every layer's attention will need."""
        ...
