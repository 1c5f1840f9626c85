"""Texts, and pairs of texts, as a model reads them to embed or to score them.

Unlike ``tokenizer`` nothing is ever turned back into text for a client, so any vocabulary of the
``tokenizers`` library will do, WordPiece among them.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from tokenpath.protocol.errors import InvalidRequestError
from tokenpath.protocol.pooling import PoolingInput


class InputTokenizer:
    """A model's tokenizer, for inputs that it reads as a whole. Safe to use from many threads."""

    def __init__(self, backend: Backend, *, vocab_size: int) -> None:
        """Take over ``backend``; ``vocab_size`` is how many tokens the model has vectors for."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._vocab_size = vocab_size

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text, with the model's own tokens around it if ``add_special``."""
        ids: list[int] = self._checked(
            self._backend.encode(_clean(text), add_special_tokens=add_special)
        ).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids``, without special tokens."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=True)
        return text

    def single(self, text: str, *, keep: int | None = None) -> PoolingInput:
        """A text as an input, cut at its end to ``keep`` tokens with the special ones kept.

        Raises ``InvalidRequestError`` if the text spells a token that the model does not have, or
        ``keep`` leaves no room for the text.
        """
        if keep is None:
            return PoolingInput(self.encode(text))
        bare = self._bare(text)
        bare.truncate(self._room(keep, pair=False))
        return PoolingInput(self._backend.post_process(bare, None, True).ids)

    def pair(self, first: str, second: str, *, keep: int | None = None) -> PoolingInput:
        """Two texts as one input; to fit ``keep`` tokens the longer of them is cut first.

        Raises as ``single``.
        """
        one, two = self._bare(first), self._bare(second)
        if keep is not None:
            kept = fitted(len(one.ids), len(two.ids), self._room(keep, pair=True))
            one.truncate(kept[0])
            two.truncate(kept[1])
        both = self._backend.post_process(one, two, True)
        ids: list[int] = both.ids
        return PoolingInput(ids, _second(both))

    def _bare(self, text: str) -> Encoding:
        return self._checked(self._backend.encode(_clean(text), add_special_tokens=False))

    def _room(self, keep: int, *, pair: bool) -> int:
        special = self._backend.num_special_tokens_to_add(pair)
        least = special + (2 if pair else 1)
        if keep < least:
            raise InvalidRequestError(
                f"Field 'truncate_prompt_tokens' is {keep}, but this model puts {special} tokens "
                f"around an input; it must be at least {least}.",
                param="truncate_prompt_tokens",
            )
        room: int = keep - special
        return room

    def _checked(self, encoding: Encoding) -> Encoding:
        highest = max(encoding.ids, default=0)
        if highest >= self._vocab_size:
            raise InvalidRequestError(
                f"The text contains {self._backend.id_to_token(highest)!r}, a token that this "
                "model lacks."
            )
        return encoding


def fitted(first: int, second: int, room: int) -> tuple[int, int]:
    """How much of two lengths is kept so that they fit in ``room``: the longer one is cut first.

    As the ``tokenizers`` library does: an odd token goes to the longer, of equals to the second.
    """
    if first + second <= room:
        return first, second
    short = min(first, second)
    if 2 * short <= room:
        return (short, room - short) if first <= second else (room - short, short)
    half = room // 2
    return (half, room - half) if first <= second else (room - half, half)


def _second(both: Encoding) -> int:
    """Where the second text begins; where it is empty, its closing token."""
    ids: list[int | None] = both.sequence_ids
    return ids.index(1) if 1 in ids else len(ids) - 1


def _clean(text: str) -> str:
    """Lone surrogates, which no UTF-8 can hold, become U+FFFD."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
