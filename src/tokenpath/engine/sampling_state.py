"""What sampling remembers of one sequence between steps, kept up to date token by token.

Nothing is rebuilt per step, and nothing is lost by a preemption: the scheduler may recompute keys
and values, but the state here only ever moves forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tokenpath.engine.rows import Floats, Ints
from tokenpath.protocol.request import SamplingParams

if TYPE_CHECKING:
    from tokenpath.engine.grammar.state import GrammarState


class SamplingState:
    """One sequence's sampling parameters, seed and token counts."""

    __slots__ = (
        "bias_ids",
        "bias_values",
        "counts",
        "end_ids",
        "generated",
        "grammar",
        "params",
        "seed",
    )

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt: Sequence[int],
        seed: int,
        end_ids: Sequence[int] = (),
        grammar: GrammarState | None = None,
    ) -> None:
        """``end_ids`` are the tokens that end this sequence: masked until ``min_tokens``.

        ``grammar`` stands at its beginning.
        """
        self.params = params
        self.seed = seed
        self.generated = 0
        """Output tokens recorded so far: the position of the next draw."""
        self.grammar = grammar
        self.end_ids: Ints = np.array(sorted(set(end_ids)), dtype=np.int64)
        self.bias_ids: Ints = np.array(list(params.logit_bias), dtype=np.int64)
        self.bias_values: Floats = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self.counts = TokenCounts(prompt if params.repetition_penalty != 1 else ())
        """Of the tokens that a penalty may touch."""

    @property
    def penalized(self) -> bool:
        """Whether any penalty is on."""
        params = self.params
        return (
            params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
        )

    @property
    def ends_masked(self) -> bool:
        """Whether the next token must not be an end."""
        return self.generated < self.params.min_tokens and len(self.end_ids) > 0

    @property
    def edits(self) -> bool:
        """Whether logits are changed after log probabilities are taken."""
        return self.penalized or self.ends_masked or self.grammar is not None

    def record(self, token_id: int) -> None:
        """The sequence has grown by this token.

        Raises ``EngineError`` if its grammar forbids it.
        """
        self.generated += 1
        if self.grammar is not None:
            self.grammar.advance(token_id)
        if self.penalized:
            self.counts.add(token_id)


class TokenCounts:
    """How often each token was generated, as arrays that grow in place.

    Prompt tokens are listed with a count of 0: the repetition penalty touches them, the others
    do not.
    """

    __slots__ = ("_counts", "_ids", "_places")

    def __init__(self, prompt: Sequence[int]) -> None:
        unique = list(dict.fromkeys(prompt))
        self._places = {token: place for place, token in enumerate(unique)}
        self._ids: Ints = np.array(unique, dtype=np.int64)
        self._counts: Floats = np.zeros(len(unique), dtype=np.float32)

    @property
    def ids(self) -> Ints:
        """Distinct token ids."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> Floats:
        """Times generated, one per id."""
        return self._counts[: len(self._places)]

    def add(self, token_id: int) -> None:
        """Count one more generated token; amortized constant time."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            room = max(64, place)
            self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.float32)])
        self._ids[place] = token_id
        self._counts[place] += 1
