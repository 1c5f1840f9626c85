"""Reads a text with a model and notes what the input channels of each matrix do.

The mean products of channels' activations are what an error of the weights costs in the product of
the two: the Hessian that quantization to few bits goes by. Of wide matrices only its diagonal is
noted, the mean squares. The model runs through its own family and plain torch kernels; only what
stands before each product is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from tokenpath.engine.batch import build_batch
from tokenpath.engine.families.registry import find_family
from tokenpath.engine.kernels.base import KernelBackend, Linear, LinearInput, Table
from tokenpath.engine.kernels.torch_backend import TorchBackend
from tokenpath.engine.kv_cache import allocate_kv_cache
from tokenpath.engine.layers import Step
from tokenpath.engine.loading import CheckpointLoader, Progress
from tokenpath.engine.rotary import rotaries
from tokenpath.models.architecture import KvDtype
from tokenpath.models.local import LocalModel
from tokenpath.policy.sequence import Chunk, StepPlan
from tokenpath.policy.sequence import Sequence as TokenSequence

_BLOCK_TOKENS = 16
PRODUCTS_BYTES = 2 << 30
"""Most memory for products of channels. What they would take beyond it is noted as squares."""
WIDEST = 4096
"""Input channels, of which all products are noted; more cost more time than they are worth."""


@dataclass(slots=True)
class Moments:
    """Products of a matrix' input channels, summed over tokens; or their squares only."""

    sums: torch.Tensor
    """float32 [K, K], or [K] of squares."""
    tokens: int = 0

    def add(self, x: torch.Tensor) -> None:
        """Note activations [T, K]."""
        wide = x.float()
        if self.sums.dim() == 1:
            self.sums += wide.square().sum(0)
        else:
            self.sums.addmm_(wide.t(), wide)
        self.tokens += len(x)

    def mean(self) -> torch.Tensor:
        """float32, of the sums' shape and in their place; nothing can be added after it."""
        return self.sums.div_(max(self.tokens, 1))


@dataclass(frozen=True, slots=True)
class _Watched:
    """A ``Linear`` that notes what it is given."""

    inner: Linear
    moments: Moments

    @property
    def weight_bytes(self) -> int:
        return self.inner.weight_bytes

    def __call__(self, x: LinearInput) -> torch.Tensor:
        self.moments.add(x)
        return self.inner(x)


@dataclass(frozen=True, slots=True)
class _WatchingLoader:
    """A ``WeightLoader`` whose matrices note what they are given."""

    loader: CheckpointLoader
    widest: int
    found: dict[str, Moments] = field(default_factory=dict)

    @property
    def backend(self) -> KernelBackend:
        return self.loader.backend

    @property
    def dtype(self) -> torch.dtype:
        return self.loader.dtype

    def linear(self, names: Seq[str], rows: Seq[int], columns: int, *, bias: bool) -> Linear:
        noted = sum(moments.sums.nbytes for moments in self._moments().values())
        fits = noted + 4 * columns * columns <= PRODUCTS_BYTES
        shape = (columns, columns) if columns <= self.widest and fits else (columns,)
        moments = Moments(torch.zeros(shape))
        self.found.update(dict.fromkeys(names, moments))
        return _Watched(self.loader.linear(names, rows, columns, bias=bias), moments)

    def gate_up(self, names: tuple[str, str], rows: int, columns: int, *, bias: bool) -> Linear:
        return self.linear(names, (rows, rows), columns, bias=bias)

    def activity(self) -> dict[str, torch.Tensor]:
        """What was noted, by module; modules with one input share a tensor."""
        means = {key: moments.mean() for key, moments in self._moments().items()}
        return {name: means[id(moments)] for name, moments in self.found.items()}

    def _moments(self) -> dict[int, Moments]:
        return {id(moments): moments for moments in self.found.values()}

    def table(self, name: str, rows: int, columns: int) -> Table:
        return self.loader.table(name, rows, columns)

    def tied(self, table: Table) -> Linear:
        return self.loader.tied(table)

    def norm(self, name: str, size: int, *, offset: float = 0.0) -> torch.Tensor:
        return self.loader.norm(name, size, offset=offset)


@torch.inference_mode()
def channel_activity(
    model: LocalModel,
    windows: Iterable[Sequence[int]],
    *,
    dtype: torch.dtype,
    widest: int = WIDEST,
    loading: Progress | None = None,
    reading: Callable[[int], None] = lambda _number: None,
) -> dict[str, torch.Tensor]:
    """What the input channels of every matrix do, by its module's name.

    Float32 mean products [K, K] of matrices of at most ``widest`` channels, mean squares [K] of
    the others; modules with one input share a tensor. Each window of token ids is read as a text
    of its own, in one step; ``reading`` is called with its number before. Raises
    ``ModelFileError`` and ``ModelUnsupportedError`` as loading does.
    """
    texts = [list(window) for window in windows]
    backend = TorchBackend(dtype, "cpu")
    checkpoint = CheckpointLoader(model, backend, dtype, "cpu", loading)
    loader = _WatchingLoader(checkpoint, widest)
    decoder = find_family(model.config).build(model.config, loader)
    checkpoint.finish()
    angles = rotaries(model.config, "cpu")
    blocks = -(-max(map(len, texts), default=1) // _BLOCK_TOKENS)
    kv_dtype: KvDtype = "float32" if dtype == torch.float32 else "bfloat16"
    cache = allocate_kv_cache(
        model.config, num_blocks=blocks, block_tokens=_BLOCK_TOKENS, dtype=kv_dtype, device="cpu"
    )
    for number, text in enumerate(texts, 1):
        reading(number)
        sequence = TokenSequence("calibration", text, len(text), max_tokens=0)
        sequence.blocks = list(range(blocks))
        batch = build_batch(StepPlan((Chunk(sequence, 0, len(text)),)), _BLOCK_TOKENS)
        positions = torch.from_numpy(batch.positions)
        decoder.hidden(
            Step(
                token_ids=torch.from_numpy(batch.token_ids),
                slots=torch.from_numpy(batch.slots),
                angles={kind: rotary.angles(positions) for kind, rotary in angles.items()},
                attention=backend.plan_attention(batch, decoder.attention_specs),
                cache=cache,
            )
        )
    return loader.activity()
