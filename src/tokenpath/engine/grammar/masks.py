"""Makes impossible, over a whole batch, every token that a row's grammar does not allow.

One pass before sampling: each row's mask is computed as bits and applied to its logits. Rows
without a grammar are not touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from tokenpath.protocol.errors import TokenpathError

if TYPE_CHECKING:
    from tokenpath.engine.grammar.state import GrammarState

Bits = npt.NDArray[np.uint8]


def forbid(
    logits: torch.Tensor,
    grammars: Sequence[GrammarState | None],
    unwanted: Sequence[npt.NDArray[np.int64] | None],
) -> dict[int, TokenpathError]:
    """Set what must not come next to -inf in float32 ``[rows, vocab]`` logits, in place.

    ``unwanted`` are ids that a row should not take now (ends before ``min_tokens``): they are
    forbidden as well, unless they are all that its grammar leaves. Returns the rows that cannot go
    on, each with its error; their logits are left as they are.
    """
    errors: dict[int, TokenpathError] = {}
    vocab = logits.shape[1]
    for row, grammar in enumerate(grammars):
        if grammar is None:
            continue
        words = np.empty(grammar.words, np.uint32)
        try:
            grammar.allow(words)
        except TokenpathError as error:
            errors[row] = error
            continue
        # A row at a time: its mask as bytes stays in the cache, that of a batch would not.
        allowed: Bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab]
        ids = unwanted[row]
        if ids is not None:
            _without(allowed, ids)
        logits[row].masked_fill_(torch.from_numpy(allowed == 0).to(logits.device), -torch.inf)
    return errors


def _without(allowed: Bits, ids: npt.NDArray[np.int64]) -> None:
    """Forbid ids in one row, unless nothing would be left."""
    kept = allowed[ids]
    allowed[ids] = 0
    if not allowed.any():
        allowed[ids] = kept
