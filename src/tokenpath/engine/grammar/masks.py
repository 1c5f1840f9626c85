"""Makes impossible, over a whole batch, every token that a row's grammar does not allow.

One pass before sampling: the masks of all rows with a grammar are gathered as bits, then applied to
their logits. Rows without one are not touched.
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
    rows = [row for row, grammar in enumerate(grammars) if grammar is not None]
    if not rows:
        return {}
    errors: dict[int, TokenpathError] = {}
    words = np.empty((len(rows), max(g.words for g in grammars if g is not None)), np.uint32)
    for place, row in enumerate(rows):
        grammar = grammars[row]
        assert grammar is not None
        try:
            grammar.allow(words[place])
        except TokenpathError as error:
            errors[row] = error
            words[place] = 0xFFFF_FFFF
    allowed: Bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    allowed = allowed[:, : logits.shape[1]]
    for place, row in enumerate(rows):
        ids = unwanted[row]
        if ids is not None and row not in errors:
            _without(allowed[place], ids)
    forbidden = torch.from_numpy(np.ascontiguousarray(allowed ^ 1).view(np.bool_)).to(logits.device)
    if len(rows) == len(logits):
        logits.masked_fill_(forbidden, -torch.inf)
    else:
        for place, row in enumerate(rows):
            logits[row].masked_fill_(forbidden[place], -torch.inf)
    return errors


def _without(allowed: Bits, ids: npt.NDArray[np.int64]) -> None:
    """Forbid ids in one row, unless nothing would be left."""
    kept = allowed[ids]
    allowed[ids] = 0
    if not allowed.any():
        allowed[ids] = kept
