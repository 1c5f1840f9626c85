"""Makes one rank's runner from its order; the same for rank 0 and for all others."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenpath.engine.kernels.native_module import native_module
from tokenpath.engine.loading import Progress
from tokenpath.engine.packed_cache import PackedCache
from tokenpath.engine.parallel.messages import RankOrder
from tokenpath.engine.parallel.ranks import link_ranks
from tokenpath.engine.precision import torch_dtype, weight_bits
from tokenpath.engine.runner import ModelRunner
from tokenpath.models.local import LocalModel, open_model

MEETING_BYTES = 8 << 20
"""Memory for exchanges of a stage's parts: two areas, which hold 400 rows of 2,560 numbers each.
Longer exchanges go in several turns."""


def join_ranks(
    order: RankOrder,
    *,
    model: LocalModel | None = None,
    meeting: Any = None,
    opened: Callable[[], None] = lambda: None,
    progress: Progress | None = None,
) -> ModelRunner:
    """Meet the other ranks and load this one's share.

    ``model`` and ``meeting`` are what the caller has of them already; ``opened`` is called when
    nothing but the others is waited for. Raises as ``ModelRunner`` and ``link_ranks`` do.
    """
    if model is None:
        model = open_model(Path(order.model))
    torch.set_num_threads(order.threads)
    if meeting is None:
        meeting = open_meeting(order)
    opened()
    ranks = link_ranks(
        order.share,
        device=order.device,
        folder=Path(order.folder),
        timeout_s=order.timeout_s,
        joins=meeting is None,
    )
    bits = weight_bits(order.dtype)
    return ModelRunner(
        model,
        dtype=torch_dtype(order.dtype),
        kv_dtype=order.kv_dtype,
        device=order.device,
        num_blocks=order.num_blocks,
        block_tokens=order.block_tokens,
        bits=bits,
        packed_cache=None if bits is None else PackedCache.usual(),
        progress=progress,
        ranks=ranks,
        meeting=meeting,
    )


def open_meeting(order: RankOrder) -> Any:
    """The place where the parts of this rank's stage meet; None if there is none."""
    if order.meeting is None:
        return None
    share = order.share
    memory = np.frombuffer(mmap.mmap(order.meeting, MEETING_BYTES), np.uint8)
    module: Any = native_module()
    return module.Meeting(memory, share.part, share.parts, order.timeout_s)
