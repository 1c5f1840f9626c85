"""From sampled tokens to what the client sees, and the end of a sequence.

A token's id and logprob leave together with the last of its text: the detokenizer holds back half
characters and possible beginnings of stop strings, and says which tokens it let go. A token that
fell to a stop string as a whole is never shown, though it was generated and counts as such.

What ends a sequence, in order of precedence:

* the model's end token (unless ``ignore_eos``) or a token of ``stop_token_ids``: ``stop``. Neither
  its text nor its id is shown;
* a stop string: ``stop``. The text ends before it. Stop strings are looked for in the text after
  that of the first ``min_tokens`` tokens;
* a grammar that nothing can follow any more (``last``): ``stop``. All of the text is shown;
* ``max_tokens``, or the end of the context: ``length``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tokenpath.engine.logprobs import TokenBytes, TokenScores, spell
from tokenpath.protocol.events import FinishReason, TokenLogprob
from tokenpath.protocol.request import SamplingParams


class Piece(Protocol):
    """What a detokenizer lets go."""

    @property
    def text(self) -> str:
        """New text."""
        ...

    @property
    def released(self) -> int:
        """How many of the tokens still held are settled by it, oldest first."""
        ...

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text."""
        ...


class Detokenizer(Protocol):
    """Turns one sequence's tokens into text; see ``models.detokenizer``."""

    def push(self, token_id: int) -> Piece:
        """Take the next token."""
        ...

    def flush(self) -> Piece:
        """The end: let everything go."""
        ...


MakeDetokenizer = Callable[[Sequence[str]], Detokenizer]
"""A fresh detokenizer that looks for the given stop strings."""


@dataclass(frozen=True, slots=True)
class End:
    """Why a sequence ended."""

    reason: FinishReason
    matched_stop: str | int | None = None


@dataclass(slots=True)
class Output:
    """What a sampled token, or several, made visible."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    end: End | None = None

    def then(self, following: Output) -> Output:
        """What this and the next token's output make visible together."""
        logprobs = None
        if following.logprobs is not None:
            logprobs = [*(self.logprobs or ()), *following.logprobs]
        return Output(
            [*self.token_ids, *following.token_ids],
            self.text + following.text,
            logprobs,
            following.end,
        )


class OutputStream:
    """One sequence's way out; fed every sampled token in order until one has an ``end``."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        make_detokenizer: MakeDetokenizer,
        tokenizer: TokenBytes,
        eos_ids: Collection[int],
        max_tokens: int,
    ) -> None:
        """``max_tokens`` is what the context leaves of the request's own."""
        self.generated = 0
        """Tokens sampled: the shown ones, the swallowed ones and the end token."""
        self._params = params
        self._make_detokenizer = make_detokenizer
        self._tokenizer = tokenizer
        self._eos_ids = frozenset() if params.ignore_eos else frozenset(eos_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._max_tokens = max_tokens
        self._searches = params.min_tokens == 0
        self._detokenizer = make_detokenizer(params.stop if self._searches else ())
        self._held: deque[tuple[int, TokenScores | None]] = deque()
        """Tokens that the detokenizer has not let go."""

    def push(self, token_id: int, scores: TokenScores | None, *, last: bool = False) -> Output:
        """Take the next sampled token; ``scores`` only if the request asked for logprobs.

        ``last``: the sequence ends with this token, which is shown.
        """
        self.generated += 1
        output = Output(logprobs=None if self._params.logprobs is None else [])
        output.end = self._end_token(token_id)
        if output.end is None:
            self._begin_search()
            self._held.append((token_id, scores))
            piece = self._detokenizer.push(token_id)
            self._show(piece, output)
            if piece.matched_stop is not None:
                return output
            if last:
                output.end = End(FinishReason.STOP)
            elif self.generated >= self._max_tokens:
                output.end = End(FinishReason.LENGTH)
            else:
                return output
        self._show(self._detokenizer.flush(), output)
        return output

    def _end_token(self, token_id: int) -> End | None:
        if token_id in self._eos_ids:
            return End(FinishReason.STOP)
        if token_id in self._stop_ids:
            return End(FinishReason.STOP, token_id)
        return None

    def _begin_search(self) -> None:
        """Look for stop strings once ``min_tokens`` are past, unless that would cut a character."""
        if not self._searches and not self._held and self.generated > self._params.min_tokens:
            self._searches = True
            self._detokenizer = self._make_detokenizer(self._params.stop)

    def _show(self, piece: Piece, output: Output) -> None:
        output.text += piece.text
        for _ in range(piece.released):
            token_id, scores = self._held.popleft()
            output.token_ids.append(token_id)
            if output.logprobs is not None and scores is not None:
                output.logprobs.append(spell(token_id, scores, self._tokenizer))
        if piece.matched_stop is not None:
            output.end = End(FinishReason.STOP, piece.matched_stop)
