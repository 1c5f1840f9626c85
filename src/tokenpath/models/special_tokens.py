"""Which token ids end an answer.

Checkpoints are often converted with one end token named, while the model was trained to end with
another. Generation that misses one goes on talking to itself, so the known ones are looked up in
the vocabulary too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

DOCUMENT_ENDS = ("<|endoftext|>", "<|end_of_text|>")
"""End of a document: ends an answer whatever the model is used for."""
TURN_ENDS = ("<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|eom_id|>")
"""End of a chat turn: counted only for models that have a chat template, since a base model may
have such a token in its vocabulary without ever having learnt it."""


def end_ids(
    named: Iterable[int | None], vocabulary: Mapping[str, int], *, chat: bool, vocab_size: int
) -> tuple[int, ...]:
    """End-of-sequence ids: those that the checkpoint names, first, then those found by text.

    ``vocabulary`` need only hold the special tokens. Ids from ``vocab_size`` on, which the model
    cannot produce, are left out.
    """
    texts = DOCUMENT_ENDS + (TURN_ENDS if chat else ())
    found = [*named, *(vocabulary.get(text) for text in texts)]
    ids = [token for token in found if token is not None and 0 <= token < vocab_size]
    return tuple(dict.fromkeys(ids))
