"""Log probabilities of the chosen token and of the likeliest ones at its place.

They describe the model, not the sampler: taken after ``logit_bias``, which is part of the request's
idea of the model, and before penalties, masks and temperature.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tokenpath.engine.rows import Reducer, Rows, select
from tokenpath.engine.sampling_state import SamplingState
from tokenpath.protocol.events import TokenLogprob


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Natural-log probabilities at one place of the output, as numbers."""

    logprob: float
    """Of the chosen token."""
    top: tuple[tuple[int, float], ...]
    """(token id, logprob) of the likeliest; on a tie the lower id first."""


class ScoreTable:
    """Log probabilities of those rows of a batch whose requests want them."""

    def __init__(
        self, logits: torch.Tensor, states: Sequence[SamplingState], reducer: Reducer
    ) -> None:
        """``logits`` is float32 ``[rows, vocab]``; it may be edited afterwards."""
        wanted = [row for row, state in enumerate(states) if state.params.logprobs is not None]
        self._scores: dict[int, _Row] = {}
        if not wanted:
            return
        chosen = select(logits, wanted)
        rows = Rows(chosen, reducer)
        masses = rows.sums(range(len(wanted)), [1.0] * len(wanted)).sum(-1).tolist()
        for place, (row, total) in enumerate(zip(wanted, masses, strict=True)):
            state = states[row]
            base = float(rows.best[place]) + math.log(total)
            ids, values = rows.largest(place, state.params.logprobs or 0)
            self._scores[row] = _Row(
                logits=chosen[place].clone() if state.edits else chosen[place],
                base=base,
                top=tuple(
                    (token_id, value - base)
                    for token_id, value in zip(ids.tolist(), values.tolist(), strict=True)
                ),
            )

    def of(self, row: int, token_id: int) -> TokenScores | None:
        """Scores of the token chosen in a row; None if the row's request wants none."""
        scores = self._scores.get(row)
        if scores is None:
            return None
        return TokenScores(float(scores.logits[token_id]) - scores.base, scores.top)


@dataclass(frozen=True, slots=True)
class _Row:
    logits: torch.Tensor
    """``[vocab]``; a copy where penalties or masks are about to change the row."""
    base: float
    """Logit of a probability of 1."""
    top: tuple[tuple[int, float], ...]


class TokenBytes(Protocol):
    """The part of a tokenizer that is needed here."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token's text."""
        ...


def spell(token_id: int, scores: TokenScores, tokenizer: TokenBytes) -> TokenLogprob:
    """The scores as they travel, with every token's text and bytes."""
    data = tokenizer.token_bytes(token_id)
    return TokenLogprob(
        token_id=token_id,
        logprob=scores.logprob,
        token=_text(data),
        token_bytes=data,
        top=[
            (other, logprob, _text(tokenizer.token_bytes(other)), tokenizer.token_bytes(other))
            for other, logprob in scores.top
        ],
    )


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")
