"""Edits of single logits before sampling: bias, penalties and masks.

They touch a few entries of a few rows, so each is one gather and one scatter over the entries of
all rows together, in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from tokenpath.engine.grammar.masks import forbid
from tokenpath.engine.rows import Ints
from tokenpath.engine.sampling_state import SamplingState
from tokenpath.protocol.errors import TokenpathError

_LEAST_REPETITION = 1e-6
"""A smaller repetition penalty can overflow float32 and changes nothing any more: a logit that is
raised a millionfold outweighs every other."""


def add_bias(logits: torch.Tensor, states: Sequence[SamplingState]) -> None:
    """Add every row's ``logit_bias`` to float32 ``[rows, vocab]`` logits, in place."""
    rows = [row for row, state in enumerate(states) if len(state.bias_ids)]
    if not rows:
        return
    where = _places(logits, rows, [states[row].bias_ids for row in rows])
    values = np.concatenate([states[row].bias_values for row in rows])
    logits[where] += torch.from_numpy(values).to(logits.device)


def penalize(logits: torch.Tensor, states: Sequence[SamplingState]) -> None:
    """Apply the repetition, frequency and presence penalties, in place.

    The repetition penalty divides a positive logit and multiplies a negative one; the other two
    are then subtracted.
    """
    rows = [row for row, state in enumerate(states) if state.penalized]
    ids = [states[row].counts.ids for row in rows]
    if not any(map(len, ids)):
        return
    where = _places(logits, rows, ids)
    counts = torch.from_numpy(np.concatenate([states[row].counts.counts for row in rows]))
    counts = counts.to(logits.device)
    lengths = torch.tensor([len(i) for i in ids])

    def per_entry(penalty: Callable[[SamplingState], float]) -> torch.Tensor:
        values = torch.tensor([penalty(states[row]) for row in rows], dtype=torch.float32)
        return values.repeat_interleave(lengths).to(logits.device)

    repetition = per_entry(lambda state: max(_LEAST_REPETITION, state.params.repetition_penalty))
    values = logits[where]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= counts * per_entry(lambda state: state.params.frequency_penalty)
    values -= (counts > 0) * per_entry(lambda state: state.params.presence_penalty)
    logits[where] = values


def mask_ends(logits: torch.Tensor, states: Sequence[SamplingState]) -> None:
    """Make end tokens impossible in rows that have not reached ``min_tokens``, in place.

    Not in rows with a grammar, which may leave nothing else: see ``mask_grammars``.
    """
    rows = [row for row, state in enumerate(states) if state.ends_masked and state.grammar is None]
    if rows:
        logits[_places(logits, rows, [states[row].end_ids for row in rows])] = -torch.inf


def mask_grammars(
    logits: torch.Tensor, states: Sequence[SamplingState]
) -> dict[int, TokenpathError]:
    """Make impossible what the rows' grammars do not allow, in place; the rows that cannot go on.

    End tokens are masked until ``min_tokens`` here too, unless the grammar allows only them.
    """
    return forbid(
        logits,
        [state.grammar for state in states],
        [state.end_ids if state.ends_masked else None for state in states],
    )


def _places(
    logits: torch.Tensor, rows: Sequence[int], ids: Sequence[Ints]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of the entries ``(rows[i], each of ids[i])``."""
    row_index = np.repeat(rows, [len(i) for i in ids])
    return (
        torch.from_numpy(row_index).to(logits.device),
        torch.from_numpy(np.concatenate(ids)).to(logits.device),
    )
