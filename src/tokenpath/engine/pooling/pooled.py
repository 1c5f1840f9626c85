"""From the vectors of an input's tokens to the one vector of the input."""

from __future__ import annotations

import torch
from torch.nn import functional

from tokenpath.engine.pooling.ragged import Layout
from tokenpath.models.pooling import Pooling, SettledPooling


def pool(hidden: torch.Tensor, layout: Layout, settled: SettledPooling) -> torch.Tensor:
    """[T, width] to float32 [N, width], in the layout's order, normalised where it says so."""
    vectors = _pool(hidden, layout, settled.pooling)
    return functional.normalize(vectors, dim=-1) if settled.normalize else vectors


def _pool(hidden: torch.Tensor, layout: Layout, pooling: Pooling) -> torch.Tensor:
    match pooling:
        case "cls":
            return hidden.index_select(0, _rows(layout.starts, hidden)).float()
        case "last":
            return hidden.index_select(0, _rows(layout.last_rows, hidden)).float()
        case "mean":
            lengths = _rows(layout.lengths, hidden)
            return torch.segment_reduce(hidden.float(), "mean", lengths=lengths, axis=0)


def _rows(index: object, like: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(index, device=like.device)
