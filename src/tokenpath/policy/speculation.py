"""Whether to guess a sequence's next tokens, how many, and what came of it.

A drafted token is computed in the same step as the token before it, and is worth its row if the
model then chooses the very same token. How likely that is, is learnt from what became of earlier
guesses of the same kind; what a row costs, from the steps' times. The lengths that are chosen
promise the most tokens a second over the whole batch; where no draft pays, there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Protocol

from tokenpath.policy.sequence import Sequence

MARGIN = 0.05
"""Gain that drafts must promise: what is promised is an estimate, and guessing costs a little."""
_OWN_MEMORY = 0.9
"""Weight of a sequence's earlier guess beside the next one: about ten count."""
_SHARED_MEMORY = 0.99
"""The same over all sequences: about a hundred."""
_TRUST = 2.0
"""As many guesses of its own as a sequence has the experience of all others count."""


class Drafts(Protocol):
    """Guesses how sequences go on, for a scheduler."""

    def guess(self, sequences: Seq[Sequence], rows: int, budget: int) -> Mapping[str, Seq[int]]:
        """Drafted tokens by request id, at most ``budget`` in all, for decoding sequences.

        The step computes ``rows`` tokens without them.
        """
        ...


@dataclass(frozen=True, slots=True)
class Offer:
    """Tokens that could be drafted for a sequence."""

    request_id: str
    length: int
    """At most so many."""
    chance: float
    """Of each, that it is confirmed if those before it are."""


class Acceptance:
    """How likely drafted tokens are confirmed, by sequence and kind of guess."""

    def __init__(self, expected: Seq[float]) -> None:
        """``expected`` is the chance of each kind before anything is known."""
        self._shared = [_Record(10.0, 10.0 * chance) for chance in expected]
        self._own: dict[str, list[_Record]] = {}

    def chance(self, request_id: str, kind: int) -> float:
        """That the next guess of a kind is confirmed."""
        shared = self._shared[kind]
        mean = shared.hits / shared.weight
        own = self._own.get(request_id)
        if own is None:
            return mean
        return (own[kind].hits + _TRUST * mean) / (own[kind].weight + _TRUST)

    def tried(self, request_id: str, kind: int, *, confirmed: bool) -> None:
        """A guess of a kind was compared with what the model chose."""
        self._shared[kind].add(_SHARED_MEMORY, confirmed)
        own = self._own.setdefault(request_id, [_Record() for _ in self._shared])
        own[kind].add(_OWN_MEMORY, confirmed)

    def forget(self, request_id: str) -> None:
        """A sequence has ended."""
        self._own.pop(request_id, None)


@dataclass(slots=True)
class _Record:
    weight: float = 0.0
    hits: float = 0.0

    def add(self, memory: float, hit: bool) -> None:
        self.weight = self.weight * memory + 1
        self.hits = self.hits * memory + hit


def choose_lengths(
    offers: Seq[Offer],
    *,
    rows: int,
    sampling: int,
    budget: int,
    seconds: Callable[[int], float],
    depth_s: float = 0.0,
    margin: float = MARGIN,
) -> dict[str, int]:
    """How many tokens of each offer to draft, so that the step makes most tokens a second.

    The step computes ``rows`` tokens and samples ``sampling`` sequences without drafts; ``seconds``
    is what a number of rows takes, ``depth_s`` what each token of the longest draft takes to make.
    Drafts of no token are left out; there are none if all together do not promise a gain of
    ``margin``.
    """
    lengths: dict[str, int] = {}
    best: dict[str, int] = {}
    tokens, drafted, deepest = float(sampling), 0, 0
    best_rate = tokens / seconds(rows) * (1 + margin)
    # The likeliest next token of any sequence is always the best one to add.
    waiting = [(-offer.chance, index) for index, offer in enumerate(offers) if offer.length > 0]
    heapify(waiting)
    while waiting and drafted < budget:
        gain, index = waiting[0]
        if not gain:
            break
        offer = offers[index]
        length = lengths[offer.request_id] = lengths.get(offer.request_id, 0) + 1
        drafted += 1
        tokens -= gain
        deepest = max(deepest, length)
        heapreplace(waiting, (gain * offer.chance if length < offer.length else 0.0, index))
        rate = tokens / (seconds(rows + drafted) + deepest * depth_s)
        if rate > best_rate:
            best_rate, best = rate, dict(lengths)
    return best
