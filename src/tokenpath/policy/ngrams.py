"""Prompt lookup: where a text has already stood what it ends with now, and how it went on there.

Text that is edited, quoted, summed up or filled into a form repeats itself. An index of the pairs
of tokens of one sequence finds earlier places in constant time for each new token; among the most
recent ones the place with the longest common past is the best guess of what follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_PLACES = 32
"""Earlier places of a pair that are looked at, the most recent first."""
_LONGEST = 16
"""A common past that is longer says nothing more."""
_CATCH_UP = 8192
"""Tokens indexed at a time: some two milliseconds. A longer prompt takes several steps."""
_PAIR = 2


@dataclass(frozen=True, slots=True)
class Match:
    """An earlier place that a text repeats."""

    matched: int
    """Tokens that the text has in common with its past, from 2 to 16."""
    tokens: tuple[int, ...]
    """How it went on there."""


class NgramIndex:
    """One sequence's pairs of tokens. Tokens are only ever appended."""

    __slots__ = ("_last", "_previous", "_source")

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        """Where the last place of a pair goes on."""
        self._previous: list[int] = [0, 0]
        """By the place where a pair goes on: the same of its occurrence before that, or 0."""
        self._source = 0
        """How far the end lies behind the place found last: a text that is copied goes on with
        the same source."""

    def find(self, tokens: Sequence[int], most: int) -> Match | None:
        """The best guess at up to ``most`` tokens that follow ``tokens``; None without any.

        ``tokens`` begin with those of every earlier call.
        """
        size = len(tokens)
        if size <= _PAIR or not self._index(tokens):
            return None
        best = matched = 0
        candidates = [size - self._source] if self._source else []
        place = self._last.get(tokens[-2] << 32 | tokens[-1], 0)
        while place and len(candidates) < _PLACES:
            candidates.append(place)
            place = self._previous[place]
        for candidate in candidates:
            common = _common(tokens, candidate)
            if common > matched:
                best, matched = candidate, common
            if common == _LONGEST:
                break
        if matched < _PAIR:
            self._source = 0
            return None
        period = self._source = size - best
        # Past its own end a text goes on with what it was just guessed to: a period repeats.
        return Match(matched, tuple(tokens[best + step % period] for step in range(most)))

    def _index(self, tokens: Sequence[int]) -> bool:
        """Take up new tokens; whether all of them are."""
        last, previous = self._last, self._previous
        first = len(previous)
        stop = min(len(tokens), first + _CATCH_UP)
        for place in range(first, stop):
            pair = tokens[place - 2] << 32 | tokens[place - 1]
            previous.append(last.get(pair, 0))
            last[pair] = place
        return stop == len(tokens)


def _common(tokens: Sequence[int], place: int) -> int:
    """Tokens before a place that equal those before the end, up to ``_LONGEST``."""
    size = len(tokens)
    limit = min(place, _LONGEST)
    for back in range(1, limit + 1):
        if tokens[place - back] != tokens[size - back]:
            return back - 1
    return limit
