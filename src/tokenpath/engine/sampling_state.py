"""What sampling remembers of one sequence between steps, kept up to date token by token.

Nothing is rebuilt per step, and nothing is lost by a preemption: the scheduler may recompute keys
and values, but the state here only ever moves forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

import numpy as np

from tokenpath.engine.rows import Floats, Ints
from tokenpath.protocol.errors import TokenpathError
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

    def copy(self) -> SamplingState:
        """The same state, to be taken further on its own."""
        other = copy(self)
        other.grammar = None if self.grammar is None else self.grammar.copy()
        other.counts = self.counts.copy() if self.penalized else self.counts
        return other

    def record(self, token_id: int) -> None:
        """The sequence has grown by this token.

        Raises ``EngineError`` if its grammar forbids it.
        """
        self.generated += 1
        if self.grammar is not None:
            self.grammar.advance(token_id)
        if self.penalized:
            self.counts.add(token_id)


def states_along(state: SamplingState, drafted: Sequence[int]) -> list[SamplingState]:
    """The states before each of the drafted tokens and after the last one; ``state`` is the first.

    None of them changes ``state``. Behind a token that the grammar forbids the state is the one
    before it: nothing that is drawn there counts, since the token itself cannot be drawn.
    """
    states = [state]
    for token_id in drafted:
        ahead = states[-1].copy()
        try:
            ahead.record(token_id)
        except TokenpathError:
            ahead = states[-1]
        states.append(ahead)
    return states


class TokenCounts:
    """How often each token was generated, as arrays that grow in place.

    Prompt tokens are listed with a count of 0: the repetition penalty touches them, the others
    do not.
    """

    __slots__ = ("_counts", "_ids", "_places")

    def __init__(self, prompt: Sequence[int], counts: Floats | None = None) -> None:
        """``counts`` are those of ``prompt``, which then has every id once."""
        unique = list(dict.fromkeys(prompt))
        self._places = {token: place for place, token in enumerate(unique)}
        self._ids: Ints = np.array(unique, dtype=np.int64)
        self._counts: Floats = (
            np.zeros(len(unique), dtype=np.float32) if counts is None else counts.copy()
        )

    @property
    def ids(self) -> Ints:
        """Distinct token ids."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> Floats:
        """Times generated, one per id."""
        return self._counts[: len(self._places)]

    def copy(self) -> TokenCounts:
        """The same counts, to be taken further on their own."""
        return TokenCounts(self.ids.tolist(), self.counts)

    def add(self, token_id: int) -> None:
        """Count one more generated token; amortized constant time."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            room = max(64, place)
            self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.float32)])
        self._ids[place] = token_id
        self._counts[place] += 1
