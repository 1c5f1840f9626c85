"""A model's tokens as the grammar library needs them: the exact bytes of each, and the ends.

Made once for an engine, when the first grammar asks for it: it takes about a second. Control tokens
and ends of text are no text, so that none of them can stand within an output.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Protocol

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

LIMITS: Final = LLParserLimits(
    max_items_in_row=10_000, max_lexer_states=40_000, verbose_errors=False
)
"""Of one grammar's work: as the library's own, which bound compiling and each mask in operations,
but for two. More items at one place than its 2,000, for an object of so many optional properties;
fewer states of the lexer, which take one to two kilobytes each and are shared by all outputs."""


class TokenSource(Protocol):
    """The part of ``models.tokenizer.Tokenizer`` that is needed here."""

    @property
    def special_ids(self) -> Collection[int]:
        """Control tokens."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token; empty where there is none of that id."""
        ...

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text."""
        ...


class Vocabulary:
    """The tokens of one model."""

    def __init__(self, tokenizer: TokenSource, *, size: int, end_ids: Collection[int]) -> None:
        """``size`` is the model's own: tokens beyond the tokenizer's have no text."""
        self.end_ids = tuple(end_ids)
        """The model's own ends."""
        wrapped = _Wrapped(tokenizer, size, end_ids)
        self._tokenizer = LLTokenizer(wrapped)  # type: ignore[arg-type]  # it asks for the attributes, not for a class
        self.words: int = -(-self._tokenizer.vocab_size // 32)
        """32-bit words of a mask."""

    def matcher(self, lark: str) -> LLMatcher:
        """A matcher at its beginning; without the GIL. It says itself if it is in error."""
        return LLMatcher(self._tokenizer, lark, log_level=0, limits=LIMITS)


class _Wrapped:
    """What the library reads of a tokenizer, under the names that it expects."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: TokenSource, size: int, end_ids: Collection[int]) -> None:
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(size)]
        self.eos_token_id = min(end_ids, default=None)
        """One is enough: ``GrammarState`` allows the others where this one is allowed."""
        self.special_token_ids = sorted(
            {*(i for i in tokenizer.special_ids if i < size), *(i for i in end_ids if i < size)}
        )
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False)
