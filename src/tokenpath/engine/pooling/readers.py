"""What reads a step's inputs: an encoder, an encoder with a head, or a decoder.

Each is a ``Reader``: inputs in, one float32 row for each out, in the order given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from tokenpath.engine.batch import StepBatch
from tokenpath.engine.kernels.torch_backend import TorchBackend
from tokenpath.engine.kv_cache import KvCache, KvLayer
from tokenpath.engine.layers import Decoder, Step
from tokenpath.engine.pooling.bert import Bert
from tokenpath.engine.pooling.pooled import pool
from tokenpath.engine.pooling.ragged import Layout, lay_out
from tokenpath.engine.rotary import rotaries
from tokenpath.models.architecture import ModelConfig
from tokenpath.models.encoder import Scoring
from tokenpath.models.pooling import SettledPooling
from tokenpath.protocol.pooling import PoolingInput

Vectors = npt.NDArray[np.float32]


class Reader(Protocol):
    """A loaded model. Not thread-safe: one step at a time."""

    @property
    def width(self) -> int:
        """Entries of a row."""
        ...

    def read(self, inputs: Sequence[PoolingInput]) -> Vectors:
        """[inputs, width] for at least one input of at least one token each."""
        ...


class EncoderReader:
    """Embeddings of an encoder."""

    def __init__(self, bert: Bert, pooling: SettledPooling) -> None:
        self._bert = bert
        self._pooling = pooling
        self.width = bert.config.hidden_size

    @torch.inference_mode()
    def read(self, inputs: Sequence[PoolingInput]) -> Vectors:
        """See ``Reader``."""
        layout = lay_out(inputs)
        return _in_order(pool(self._bert.hidden(layout), layout, self._pooling), layout)


class ClassifierReader:
    """Scores or class probabilities of an encoder with a head."""

    def __init__(self, bert: Bert) -> None:
        assert bert.head is not None
        self._bert = bert
        self._head = bert.head
        self.width = len(bert.config.labels)

    @torch.inference_mode()
    def read(self, inputs: Sequence[PoolingInput]) -> Vectors:
        """See ``Reader``."""
        layout = lay_out(inputs)
        hidden = self._bert.hidden(layout)
        first = hidden.index_select(0, torch.from_numpy(layout.starts).to(hidden.device))
        return _in_order(_scored(self._head(first), self._bert.config.scoring), layout)


class DecoderReader:
    """Embeddings of a decoder: the last layer's vectors, normed as before its head.

    Inputs are read whole, so the keys and values of a layer are of no use after it: one pool of a
    step's size serves all layers in turn.
    """

    def __init__(
        self,
        decoder: Decoder,
        config: ModelConfig,
        pooling: SettledPooling,
        *,
        backend: TorchBackend,
        max_tokens: int,
    ) -> None:
        """``max_tokens`` are those of the largest step."""
        self._decoder = decoder
        self._pooling = pooling
        self._backend = backend
        self._rotaries = rotaries(config, backend.device)
        shape = (max_tokens, 1, config.kv_heads, config.head_dim)
        keys, values = (
            torch.zeros(shape, dtype=backend.dtype, device=backend.device) for _ in range(2)
        )
        self._cache = KvCache((KvLayer(keys, values),) * config.layers)
        self.width = config.hidden_size

    @torch.inference_mode()
    def read(self, inputs: Sequence[PoolingInput]) -> Vectors:
        """See ``Reader``."""
        layout = lay_out(inputs, longest_first=False)
        batch = _whole_inputs(layout)
        device = self._backend.device
        positions = torch.from_numpy(batch.positions).to(device)
        step = Step(
            token_ids=torch.from_numpy(batch.token_ids).to(device),
            slots=torch.from_numpy(batch.slots).to(device),
            angles={kind: rotary.angles(positions) for kind, rotary in self._rotaries.items()},
            attention=self._backend.plan_attention(batch, self._decoder.attention_specs),
            cache=self._cache,
        )
        assert self._decoder.norm is not None, "a whole model is read"
        hidden = self._decoder.norm(self._decoder.hidden(step))
        return _in_order(pool(hidden, layout, self._pooling), layout)


def _whole_inputs(layout: Layout) -> StepBatch:
    """A step of the decoder in which every sequence is read from its beginning to its end.

    The pool's blocks hold one token each, and a sequence has those of its own rows.
    """
    rows = np.arange(len(layout.token_ids))
    longest = int(layout.lengths[-1])
    tables = np.minimum(layout.starts[:, None] + np.arange(longest), layout.last_rows[:, None])
    return StepBatch(
        token_ids=layout.token_ids,
        positions=layout.positions,
        slots=rows,
        row_starts=np.append(layout.starts, len(rows)),
        context_tokens=layout.lengths,
        block_tables=tables,
        single_token_chunks=int(np.count_nonzero(layout.lengths == 1)),
        sampled_rows=layout.last_rows,
        block_tokens=1,
    )


def _scored(logits: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    match scoring:
        case "identity":
            return logits
        case "sigmoid":
            return logits.sigmoid()
        case "softmax":
            return logits.softmax(-1)


def _in_order(rows: torch.Tensor, layout: Layout) -> Vectors:
    """The rows in the order in which the inputs were given."""
    vectors = np.empty(tuple(rows.shape), dtype=np.float32)
    vectors[layout.order] = rows.cpu().numpy()
    return vectors
