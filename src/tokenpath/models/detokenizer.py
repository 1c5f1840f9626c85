"""Token ids to streamed text: never half a character, never the beginning of a stop string.

A token may end inside a character, and a stop string may begin in one token and end three tokens
later. Text whose fate is open is held back, and so are the tokens it belongs to: log-probabilities
travel with the tokens that have been released, so that a client never sees a token that a stop
string swallowed.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tokenpath.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """What became certain."""

    text: str
    """New text, to be appended to all earlier pieces."""
    released: int
    """How many of the tokens pushed and not yet released are settled now, oldest first. A token is
    released with the last of the characters that its bytes are part of."""
    matched_stop: str | None = None
    """The stop string that ended the text, which is cut before it. A token with text on both sides
    of the cut is released; tokens wholly behind it never are."""


class IncrementalDetokenizer:
    """Decodes one sequence's output.

    The stop string that is complete first wins; of several that are complete at the same
    character, the longest. So the result does not depend on how the text falls into tokens, and
    nothing is generated only to see whether a longer stop string might still come.

    Work per token grows with its characters and the number of stop strings, and memory with what
    is held back: less than the longest stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        skip_special: bool = True,
        shown: Collection[int] = (),
    ) -> None:
        """``skip_special``: control tokens have no text, but for those ``shown``.

        Empty stop strings are ignored.
        """
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids.difference(shown) if skip_special else frozenset()
        # Longest first, so that the first match found is the one that wins.
        self._matchers = [
            _Matcher(text) for text in sorted(dict.fromkeys(stop), key=len, reverse=True) if text
        ]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._decoded = 0
        """Characters decoded so far; positions below count from the sequence's first."""
        self._pending: deque[tuple[int, int]] = deque()
        """First character and end of each token not yet released."""
        self._finished = False

    def push(self, token_id: int) -> Piece:
        """Take the next token. After a match, or after ``flush``, nothing may be pushed."""
        assert not self._finished, "the text has ended"
        data = b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id)
        start = self._decoded
        new = self._decoder.decode(data)
        # Bytes that wait in the decoder will be part of exactly one more character.
        waiting = 1 if self._decoder.getstate()[0] else 0
        self._pending.append((start, start + len(new) + waiting))
        return self._take(new, final=False)

    def flush(self) -> Piece:
        """The sequence has ended: give out what was held back. Harmless after a match."""
        if self._finished:
            return Piece("", 0)
        return self._take(self._decoder.decode(b"", final=True), final=True)

    def _take(self, new: str, *, final: bool) -> Piece:
        text = self._held + new
        self._decoded += len(new)
        origin = self._decoded - len(text)
        for index in range(len(self._held), len(text)):
            for matcher in self._matched(text[index]):
                cut = index + 1 - len(matcher.stop)
                self._finished = True
                return Piece(text[:cut], self._release(origin + cut, cut=True), matcher.stop)
        hold = 0 if final else max((m.length for m in self._matchers), default=0)
        self._finished = final
        settled = len(text) - hold
        self._held = text[settled:]
        return Piece(text[:settled], self._release(origin + settled, cut=False))

    def _matched(self, character: str) -> list[_Matcher]:
        return [matcher for matcher in self._matchers if matcher.advance(character)]

    def _release(self, position: int, *, cut: bool) -> int:
        released = 0
        while self._pending:
            start, end = self._pending[0]
            if end > position and not (cut and start < position):
                break
            self._pending.popleft()
            released += 1
        return released


class _Matcher:
    """Knuth, Morris and Pratt's automaton for one stop string, fed a character at a time."""

    __slots__ = ("_fallback", "length", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        """How many characters of ``stop`` the text so far ends with."""
        self._fallback = [0]
        """For each length matched, the next shorter beginning of ``stop`` that it ends with."""
        length = 0
        for character in stop[1:]:
            while length and stop[length] != character:
                length = self._fallback[length - 1]
            length += stop[length] == character
            self._fallback.append(length)

    def advance(self, character: str) -> bool:
        """Whether ``stop`` is complete with this character."""
        stop, length = self.stop, self.length
        while length and stop[length] != character:
            length = self._fallback[length - 1]
        self.length = length + (stop[length] == character)
        return self.length == len(stop)
