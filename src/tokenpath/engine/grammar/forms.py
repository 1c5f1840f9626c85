"""The grammars of the sequences that are being generated, as speculation asks about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from tokenpath.protocol.errors import TokenpathError

if TYPE_CHECKING:
    from tokenpath.engine.grammar.state import GrammarState

_FORCED_BYTES = 256
"""Of forced text so much is cut into tokens: more than a draft holds."""


class Cutter(Protocol):
    """The tokenizer's side that is needed here."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token."""
        ...


class LiveForms:
    """A ``policy.speculator.Forms``. Asking leaves the states as they are."""

    def __init__(self, tokenizer: Cutter) -> None:
        self._tokenizer = tokenizer
        self._states: dict[str, GrammarState] = {}

    def begin(self, request_id: str, state: GrammarState) -> None:
        """A sequence follows a grammar from now on; ``state`` moves as its output grows."""
        self._states[request_id] = state

    def forget(self, request_id: str) -> None:
        """A sequence has ended."""
        self._states.pop(request_id, None)

    def forced(self, request_id: str) -> list[int]:
        """Tokens of the text that must come next, as the tokenizer cuts it."""
        state = self._states.get(request_id)
        if state is None:
            return []
        try:
            data = state.copy().forced()[:_FORCED_BYTES]
        except TokenpathError:
            return []
        text = data.decode("utf-8", "ignore")
        if not text:
            return []
        tokens = self._tokenizer.encode(text, add_special=False)
        # Some tokenizers put a space before every text.
        spelled = b"".join(map(self._tokenizer.token_bytes, tokens))
        if not data.startswith(spelled):
            return []
        return tokens[: self.allowed(request_id, tokens)]

    def allowed(self, request_id: str, tokens: Sequence[int]) -> int:
        """How many of the tokens may come next, one after the other; all without a grammar."""
        state = self._states.get(request_id)
        if state is None:
            return len(tokens)
        ahead = state.copy()
        for count, token_id in enumerate(tokens):
            try:
                if not ahead.accepts([token_id]):
                    return count
            except TokenpathError:
                return count
        return len(tokens)
