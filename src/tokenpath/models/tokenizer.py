"""One tokenizer for all models: text to ids, and ids back to exact bytes.

``tokenizers`` does the encoding. Decoding is our own, over bytes: a model's tokens are pieces of
UTF-8, and only bytes can be streamed, cut and reported with log-probabilities without loss.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Literal

from tokenizers import Tokenizer as Backend

from tokenpath.protocol.errors import InvalidRequestError, ModelUnsupportedError

Kind = Literal["byte_level", "sentencepiece"]

_SPACE_MARK = "▁"  # U+2581, which is not an underscore
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters: character to byte.

    Printable Latin-1 stands for itself; the other bytes are shifted, in order, to U+0100 and up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


class Tokenizer:
    """A model's tokenizer.

    Special tokens in a text are recognised: that is how a rendered chat template becomes control
    tokens, and what vLLM does for ``/v1/completions`` too. It means that whoever writes a message
    can write ``<|im_end|>`` in it and end the turn; a deployment where that matters must clean
    messages before they are rendered.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos_id: int | None,
        eos_ids: Iterable[int],
        model_vocab_size: int | None = None,
    ) -> None:
        """Take over ``backend``. Raises ``ModelUnsupportedError`` if its tokens have no bytes.

        ``model_vocab_size`` is how many tokens the model has embeddings for, where that may be
        fewer than the tokenizer knows (text models that share a multi-modal tokenizer).
        """
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
        self._backend = backend
        self._id_limit = model_vocab_size
        self._kind, self._strips_leading_space = _decoding(backend)
        self._added = {
            token_id: token.content
            for token_id, token in backend.get_added_tokens_decoder().items()
        }
        self.bos_id = bos_id
        """The token that begins a document, if the model has one."""
        self.eos_ids = tuple(eos_ids)
        """The tokens that end an answer."""
        self.special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        """Control tokens, whose text is no part of an answer."""
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        """Tokens that have a text. The model's own vocabulary may be padded beyond it."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text.

        ``add_special`` adds what the model wants around a document (Llama and Gemma: their
        beginning-of-sequence token; Qwen: nothing). Encode a rendered chat template with
        ``add_special=False``: templates write those tokens themselves. Lone surrogates, which no
        UTF-8 can hold, become U+FFFD. Raises ``InvalidRequestError`` if the text spells a token
        that the model does not have.
        """
        clean = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        ids: list[int] = self._backend.encode(clean, add_special_tokens=add_special).ids
        if self._id_limit is not None and max(ids, default=0) >= self._id_limit:
            raise InvalidRequestError(
                f"the text contains {self.token_text(max(ids))!r}, a token that this model lacks"
            )
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of a whole document's ids; bytes that are no UTF-8 become U+FFFD.

        SentencePiece models that put a space before every document lose it again here; an
        ``IncrementalDetokenizer``, which continues a prompt, keeps it. Unknown ids have no text.
        """
        kept = (i for i in ids if not (skip_special and i in self.special_ids))
        text = b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._strips_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token; empty for an id that is not in the vocabulary."""
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if self._kind == "byte_level":
            return bytes(BYTE_ALPHABET[character] for character in token)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.replace(_SPACE_MARK, " ").encode()

    def token_text(self, token_id: int) -> str:
        """One token as text, U+FFFD in place of bytes that are no whole character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def first_difference(self, other: Tokenizer) -> int | None:
        """The first id that both have and that stands for different tokens; None if there is none.

        Either may have tokens beyond the other's last.
        """
        mine, theirs = (
            {token_id: token for token, token_id in one._backend.get_vocab(True).items()}  # noqa: SLF001 - of the same class
            for one in (self, other)
        )
        return min((i for i in mine.keys() & theirs.keys() if mine[i] != theirs[i]), default=None)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its text in the vocabulary, such as ``<|im_end|>``."""
        found: int | None = self._backend.token_to_id(token)
        return found


def _decoding(backend: Backend) -> tuple[Kind, bool]:
    """How a backend spells bytes, and whether a document's first space is to be dropped."""
    decoder = backend.decoder
    # A decoder shows itself only as JSON.
    state = json.loads(decoder.__getstate__()) if decoder is not None else {"type": None}
    steps = state.get("decoders", [state])
    types = {step["type"] for step in steps}
    if "ByteLevel" in types:
        return "byte_level", False
    if "Metaspace" in types:
        return "sentencepiece", any(step.get("prepend_scheme") != "never" for step in steps)
    if "ByteFallback" in types:
        return "sentencepiece", any(
            step["type"] == "Strip" and step.get("start", 0) > 0 for step in steps
        )
    raise ModelUnsupportedError(
        f"the tokenizer decodes by {sorted(map(str, types))}; supported: byte-level BPE and "
        "SentencePiece"
    )
