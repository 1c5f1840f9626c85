"""A sitting: every contender in every round, one at a time, in an order that rotates.

The machine's speed drifts over minutes. Alternating contenders gives each its share of the slow and
the fast ones, and rotating the order keeps one from always running after the same other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from bench.peers.child import PERPLEXITY, Answer
from bench.peers.journal import Entry, Journal
from bench.peers.rivals import Entrant

ONCE = 0
"""The round of what is measured once."""
E = TypeVar("E", bound=Entrant)


@dataclass(frozen=True, slots=True)
class Turn(Generic[E]):
    """One contender's turn in a round, with the works that it still owes."""

    contender: E
    round: int
    works: tuple[str, ...]


def rotated(contenders: Sequence[E], round_number: int) -> list[E]:
    """The order of a round, which begins one further each time."""
    first = (round_number - 1) % len(contenders) if contenders else 0
    return [*contenders[first:], *contenders[:first]]


def turns(
    contenders: Sequence[E],
    works: Sequence[str],
    rounds: int,
    journal: Journal,
    *,
    perplexity: bool,
) -> Iterator[Turn[E]]:
    """What is left to do, in order; nothing that the journal has already.

    Qualities do not drift: they are measured once, after the rounds.
    """
    for number in range(1, rounds + 1):
        for contender in rotated(contenders, number):
            left = tuple(w for w in works if not journal.has(contender.name, number, w))
            if left:
                yield Turn(contender, number, left)
    for contender in contenders if perplexity else ():
        if not journal.has(contender.name, ONCE, PERPLEXITY):
            yield Turn(contender, ONCE, (PERPLEXITY,))


def run(
    todo: Iterable[Turn[E]],
    measure: Callable[[Turn[E]], Iterable[Answer]],
    journal: Journal,
    *,
    now: Callable[[], str],
) -> None:
    """Take every turn and keep each answer as it comes."""
    for turn in todo:
        for answer in measure(turn):
            journal.add(
                Entry(
                    contender=turn.contender.name,
                    round=turn.round,
                    work=answer.work,
                    value=answer.value,
                    error=answer.error,
                    at=now(),
                )
            )
