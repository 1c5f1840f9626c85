"""Compiles one grammar, and puts what the library says against it into a sentence."""

from __future__ import annotations

import re
from functools import partial
from typing import Final

import numpy as np

from tokenpath.engine.grammar.faults import library_faults
from tokenpath.engine.grammar.sources import lark
from tokenpath.engine.grammar.state import CompiledGrammar
from tokenpath.engine.grammar.vocabulary import Vocabulary
from tokenpath.protocol.errors import InvalidRequestError
from tokenpath.protocol.grammar import Grammar, GrammarKind

_NAMES: Final = {
    GrammarKind.JSON_SCHEMA: "the JSON schema",
    GrammarKind.REGEX: "the regular expression",
    GrammarKind.CHOICE: "the choice",
    GrammarKind.EBNF: "the grammar",
    GrammarKind.CALLS: "the form of the tool calls",
}
_MOST_CHARACTERS: Final = 300
_NOISE: Final = re.compile(r"\d+ \|.*|[\^~\s-]+")
"""Lines of the source, and marks below them."""
_PLACE: Final = re.compile(r"^(at )?\d+\(\d+\): ")
"""In what was made of the user's source; rules are compiled as they are."""
_FOR_DEVELOPERS: Final = re.compile(
    r"failed to compile JSON schema: |regex parse error: |; following special tokens are .*"
)


def compile_grammar(grammar: Grammar, vocabulary: Vocabulary) -> CompiledGrammar:
    """Compile a grammar and try its first tokens.

    Raises ``InvalidRequestError`` (or its ``UnsupportedError``) that says what is wrong with it;
    ``param`` is left to the caller.
    """
    name = _NAMES[grammar.kind]
    with library_faults():
        matcher = vocabulary.matcher(lark(grammar))
        if matcher.is_error() and grammar.kind is GrammarKind.CALLS:
            matcher = vocabulary.matcher(lark(grammar, partial(_refusal, vocabulary)))
    if matcher.is_error():
        raise InvalidRequestError(
            f"{name} cannot be used: {_sentence(matcher.get_error(), grammar.kind)}"
        )
    compiled = CompiledGrammar(matcher, vocabulary)
    try:
        begins = _try_beginning(compiled)
    except InvalidRequestError:
        raise InvalidRequestError(
            f"{name} allows no output that begins with a token of this model, or takes more work "
            "for one token than is allowed"
        ) from None
    if not begins:
        raise InvalidRequestError(f"{name} allows the empty text only")
    return compiled


def _refusal(vocabulary: Vocabulary, rules: str) -> str | None:
    """Why one schema of several cannot be used."""
    matcher = vocabulary.matcher(rules)
    if not matcher.is_error():
        return None
    return _sentence(matcher.get_error(), GrammarKind.JSON_SCHEMA)


def _try_beginning(compiled: CompiledGrammar) -> bool:
    """Look for a first and a second token; False if there is no first. Raises as ``allow``."""
    state = compiled.begin(())
    words = np.zeros(state.words, np.uint32)
    state.allow(words)
    allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    if not len(allowed):
        return False
    state.advance(int(allowed[0]))
    state.allow(words)
    return True


def _sentence(error: str, kind: GrammarKind) -> str:
    """The library's message on one line, without what it adds for its own developers."""
    lines = [line.strip() for line in error.splitlines()]
    joined = " ".join(line for line in lines if line and not _NOISE.fullmatch(line))
    joined = _PLACE.sub("", joined) if kind is not GrammarKind.EBNF else joined
    joined = _FOR_DEVELOPERS.sub("", joined).strip().rstrip(".")
    return joined if len(joined) <= _MOST_CHARACTERS else f"{joined[:_MOST_CHARACTERS]}…"
