"""Grammar states driven by random tokens: what ends is right, and going back is exact."""

from __future__ import annotations

import json
import random

import jsonschema_rs
import numpy as np
import pytest
from grammar_cases import (
    CHOICES,
    ENDS,
    REGEXES,
    RULES,
    SCHEMAS,
    ByteTokens,
    byte_vocabulary,
    matches,
)
from hypothesis import given
from hypothesis import strategies as st

from tokenpath.engine.grammar.compile import compile_grammar
from tokenpath.engine.grammar.state import CompiledGrammar, GrammarState
from tokenpath.protocol.errors import EngineError
from tokenpath.protocol.grammar import Grammar

TOKENS = ByteTokens()
CLOSERS = [*map(ord, '"}] '), *(256 + ByteTokens.pieces.index(p) for p in (b'"}', b"}", b"]"))]


def compiled(grammar: Grammar) -> CompiledGrammar:
    return compile_grammar(grammar, byte_vocabulary())


def allowed(state: GrammarState) -> set[int]:
    words = np.zeros(state.words, np.uint32)
    state.allow(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def walk(state: GrammarState, seed: int, steps: int = 600) -> tuple[bytes, bool]:
    """Random allowed tokens, closing ones preferred; the bytes, and whether it ended by itself."""
    choose = random.Random(seed)
    data = b""
    for _ in range(steps):
        options = sorted(allowed(state))
        ends = [token for token in options if token in ENDS]
        if ends and choose.random() < 0.3:
            state.advance(choose.choice(ends))
            return data, True
        closing = [token for token in options if token in CLOSERS]
        texts = [token for token in options if token not in ENDS]
        token = choose.choice(closing if closing and choose.random() < 0.4 else texts or options)
        state.advance(token)
        if token in ENDS:
            return data, True
        data += TOKENS.token_bytes(token)
        if state.finished:
            return data, True
    return data, False


@pytest.mark.parametrize("name", SCHEMAS)
def test_json_that_ends_satisfies_its_schema(name):
    schema = SCHEMAS[name]
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    grammar = compiled(Grammar.json_schema(schema))
    ended = 0
    for seed in range(25):
        data, complete = walk(grammar.begin(ENDS), seed)
        if not complete:
            continue
        ended += 1
        value = json.loads(data.decode())
        validator.validate(value)
    assert ended >= 5, "hardly any walk came to an end"


@pytest.mark.parametrize("pattern", REGEXES)
def test_text_that_ends_matches_its_expression(pattern):
    grammar = compiled(Grammar.regex(pattern))
    texts = [
        data.decode() for data, ended in (walk(grammar.begin(ENDS), s) for s in range(25)) if ended
    ]
    assert texts
    assert all(matches(pattern, text) for text in texts), texts


@pytest.mark.parametrize("choices", CHOICES)
def test_every_choice_can_be_made_and_nothing_else(choices):
    grammar = compiled(Grammar.choice(choices))
    made = {walk(grammar.begin(ENDS), seed)[0].decode() for seed in range(60)}
    assert made == set(choices)


@pytest.mark.parametrize("rules", RULES)
def test_rules_in_two_notations(rules):
    grammar = compiled(Grammar.ebnf(rules))
    texts = [
        data.decode() for data, ended in (walk(grammar.begin(ENDS), s) for s in range(25)) if ended
    ]
    assert texts
    same = RULES[rules]
    for text in texts:
        if same is None:
            eval(text, {"__builtins__": {}})
        else:
            assert matches(same, text), text


def test_an_end_is_allowed_where_the_text_is_complete_and_only_there():
    state = compiled(Grammar.regex("ab?")).begin(ENDS)
    assert allowed(state) == {ord("a")}
    assert not state.complete
    state.advance(ord("a"))
    assert allowed(state) == {ord("b"), *ENDS}
    assert (state.complete, state.finished) == (True, False)
    state.advance(ord("b"))
    assert state.finished
    assert allowed(state) == set(ENDS)


def test_control_tokens_and_padding_are_never_text():
    state = compiled(Grammar.regex("(?s:.*)")).begin(ENDS)
    free = allowed(state)
    assert ByteTokens.control not in free
    assert not {token for token in free if token > ByteTokens.second_end}
    assert ByteTokens.end in free  # as an end
    state.advance(ord("<"))
    assert state.accepts([ByteTokens.control]) == 0


def test_tokens_of_equal_bytes_are_all_allowed():
    first, second = (256 + i for i, piece in enumerate(ByteTokens.pieces) if piece == b"name")
    state = compiled(Grammar.choice(["name"])).begin(ENDS)
    assert {first, second, ord("n")} <= allowed(state)


def test_a_token_that_is_not_allowed_changes_nothing():
    state = compiled(Grammar.choice(["yes", "no"])).begin(ENDS)
    before = allowed(state)
    with pytest.raises(EngineError, match="does not allow"):
        state.advance(ord("x"))
    assert allowed(state) == before
    assert state.accepts(list(b"yet")) == 2
    assert (state.tokens, allowed(state)) == (2, {ord("s")})


def test_going_back_further_than_it_came_is_refused():
    state = compiled(Grammar.choice(["yes"])).begin(ENDS)
    state.advance(ord("y"))
    with pytest.raises(ValueError, match="cannot go back 2 of 1"):
        state.rollback(2)


@given(
    name=st.sampled_from(sorted(SCHEMAS)),
    seed=st.integers(0, 2**32),
    steps=st.integers(1, 60),
    data=st.data(),
)
def test_going_back_is_as_if_it_had_never_come(name, seed, steps, data):
    """Random walks with detours: after each, the state allows what a fresh one at its place does."""
    grammar = _cached(name)
    state = grammar.begin(ENDS)
    choose = random.Random(seed)
    path: list[int] = []
    for _ in range(steps):
        if state.finished:
            break
        token = choose.choice(sorted(allowed(state)))
        state.advance(token)
        path.append(token)
        if choose.random() < 0.3:
            back = data.draw(st.integers(0, len(path)))
            state.rollback(back)
            del path[len(path) - back :]
            assert state.tokens == len(path)
    fresh = grammar.begin(ENDS)
    assert fresh.accepts(path) == len(path)
    assert (fresh.complete, fresh.finished) == (state.complete, state.finished)
    assert allowed(fresh) == allowed(state)


_COMPILED: dict[str, CompiledGrammar] = {}


def _cached(name: str) -> CompiledGrammar:
    if name not in _COMPILED:
        _COMPILED[name] = compiled(Grammar.json_schema(SCHEMAS[name]))
    return _COMPILED[name]
