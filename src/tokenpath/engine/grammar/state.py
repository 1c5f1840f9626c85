"""Where one output stands in its grammar, and which tokens may come next.

The state only follows the tokens that were sampled: preemption and recomputation do not touch it.
It can go several tokens forward and back again, so that drafted tokens can be tried.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from tokenpath.engine.grammar.faults import library_faults
from tokenpath.engine.grammar.vocabulary import Vocabulary
from tokenpath.protocol.errors import EngineError, InvalidRequestError, TokenpathError

Words = npt.NDArray[np.uint32]


class CompiledGrammar:
    """A grammar ready for any number of outputs of one model; not changed by them."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        """``matcher`` stands at the beginning and is free of errors."""
        self.matcher = matcher
        self.words = vocabulary.words
        """32-bit words of a mask."""
        self.no_ends = ~_bits(vocabulary.end_ids, vocabulary.words)
        """``[words]``: a bit for all but the tokens that the library takes for ends."""
        self.spent = False
        """Some output ran into the limit of work that all outputs of a grammar share."""

    def begin(self, end_ids: Collection[int], field: str = "grammar") -> GrammarState:
        """The state of an output that has no tokens yet.

        ``end_ids`` are the tokens that may end it, ``field`` is what errors name.
        """
        ends = _Ends(frozenset(end_ids), _bits(end_ids, self.words))
        return GrammarState(self, self.matcher.deep_copy(), ends, field)


@dataclass(frozen=True, slots=True)
class _Ends:
    """The tokens that may end an output."""

    ids: frozenset[int]
    words: Words


class GrammarState:
    """One output's place in its grammar. Used from one thread at a time."""

    def __init__(
        self,
        grammar: CompiledGrammar,
        matcher: LLMatcher,
        ends: _Ends,
        field: str,
        *,
        tokens: int = 0,
        ended: bool = False,
    ) -> None:
        """Made by ``CompiledGrammar.begin``. ``matcher`` is this state's own."""
        self.words = grammar.words
        """32-bit words of a mask: token ``i`` is bit ``i % 32`` of word ``i // 32``."""
        self.tokens = tokens
        """How many tokens it has come forward, an end included."""
        self._grammar = grammar
        self._matcher = matcher
        self._ends = ends
        self._ended = ended
        self._field = field

    def copy(self) -> GrammarState:
        """The same place, to try tokens that may not be the output's: a matter of microseconds.

        Whatever becomes of the copy, this one stays as it is.
        """
        return GrammarState(
            self._grammar,
            self._matcher.deep_copy(),
            self._ends,
            self._field,
            tokens=self.tokens,
            ended=self._ended,
        )

    def forced(self) -> bytes:
        """The text that must come next, whatever tokens it is cut into; often empty."""
        if self.finished:
            return b""
        with library_faults():
            return bytes(self._matcher.compute_ff_bytes())

    @property
    def complete(self) -> bool:
        """Whether the text satisfies the grammar as it is."""
        return self._ended or bool(self._matcher.is_accepting())

    @property
    def finished(self) -> bool:
        """Whether the text satisfies the grammar and nothing can follow but an end."""
        return self._ended or (bool(self._matcher.is_stopped()) and self.complete)

    def allow(self, words: Words) -> None:
        """Write which tokens may come next into a ``[words]`` mask: a set bit is allowed.

        Ends are allowed where the text is complete. Raises ``TokenpathError`` if no token of the
        model can go on, or the grammar takes too much work here; the state is of no use then.
        """
        matcher = self._matcher
        if self.finished:
            words[:] = self._ends.words
            return
        with library_faults():
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_stopped():
            raise self._stuck()
        words &= self._grammar.no_ends
        if matcher.is_accepting():
            words |= self._ends.words

    def advance(self, token_id: int) -> None:
        """Go forward by a token that was allowed.

        Raises ``EngineError`` if it was not, and as ``allow`` if it takes too much work.
        """
        if not self.accepts([token_id]):
            raise EngineError("a token was sampled that the grammar does not allow here")

    def accepts(self, token_ids: Sequence[int]) -> int:
        """Go forward by as many of the tokens as the grammar allows in turn; how many those are."""
        with library_faults():
            for count, token_id in enumerate(token_ids):
                if not self._step(token_id):
                    return count
        return len(token_ids)

    def rollback(self, tokens: int) -> None:
        """Go back by so many tokens, at most as many as it has come forward."""
        if not 0 <= tokens <= self.tokens:
            raise ValueError(f"cannot go back {tokens} of {self.tokens} tokens")
        self.tokens -= tokens
        if tokens and self._ended:
            self._ended = False
            tokens -= 1
        if tokens and not self._matcher.rollback(tokens):
            raise EngineError("the grammar's state could not go back")

    def _step(self, token_id: int) -> bool:
        if self._ended:
            return False
        if token_id in self._ends.ids:
            self._ended = self.complete
        else:
            taken = bool(self._matcher.try_consume_tokens([token_id]))
            if self._matcher.is_error():
                raise self._stuck()
            self.tokens += taken
            return taken
        self.tokens += self._ended
        return self._ended

    def _stuck(self) -> TokenpathError:
        why = self._matcher.stop_reason()
        if why == "NoExtensionBias":
            return InvalidRequestError(
                f"the output cannot go on under '{self._field}': no token of this model fits",
                param=self._field,
            )
        self._grammar.spent = True
        return InvalidRequestError(
            f"'{self._field}' takes more work for a token than is allowed here ({why}); make it "
            "simpler",
            param=self._field,
        )


def _bits(token_ids: Collection[int], words: int) -> Words:
    mask = np.zeros(words, np.uint32)
    for token_id in token_ids:
        if token_id < words * 32:
            mask[token_id >> 5] |= np.uint32(1 << (token_id & 31))
    return mask
