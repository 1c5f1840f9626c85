"""How a text is cut for scoring; a rule simple enough to drive any other engine by it.

A part is tokenized as one text without special tokens and cut, from its beginning, into consecutive
windows that do not overlap. If the model's tokenizer puts a beginning-of-sequence token before a
document, every window begins with it. Each window is a sequence of its own, and all of its tokens
but the first are scored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenpath.models.tokenizer import Tokenizer
from tokenpath.protocol.errors import SpecError

SHORTEST = 2
"""A window with nothing to score is none."""


def beginning(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer puts before a document: a token, or nothing."""
    with_special = tokenizer.encode("a")
    plain = tokenizer.encode("a", add_special=False)
    return with_special[: len(with_special) - len(plain)] if with_special != plain else []


def cut(
    ids: Sequence[int], *, window: int, first: Sequence[int], least_scored: int | None
) -> Iterator[list[int]]:
    """Windows of ``window`` tokens, ``first`` included; the last may be shorter.

    Ends with the window that brings the scored tokens to ``least_scored``, or with the text.
    """
    taken = window - len(first)
    scored = 0
    for start in range(0, len(ids), taken):
        tokens = [*first, *ids[start : start + taken]]
        if len(tokens) < SHORTEST or (least_scored is not None and scored >= least_scored):
            return
        scored += len(tokens) - 1
        yield tokens


def check_window(window: int, *, model: str, model_tokens: int) -> None:
    """Raise ``SpecError`` for a window that the model's context, or the KV pool, cannot hold."""
    if not 2 * SHORTEST <= window <= model_tokens:
        raise SpecError(
            f"--window must be from {2 * SHORTEST} to {model_tokens}, which is what {model} can "
            f"hold here, not {window}"
        )
