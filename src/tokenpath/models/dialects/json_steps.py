"""JSON recognised a character at a time, so that a wrong one is known at its first wrong character.

A recogniser is a generator that is sent characters: it returns when its value is complete and
raises ``NotACall`` as soon as no continuation could make it valid. It keeps nothing itself. Whoever
drives it appends each character to the ``tape`` before sending it, so that a member's exact text
can be cut out of there: a model's own spelling of its arguments is worth more than ours.

Strict: what is accepted here, every JSON parser accepts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import Final, TypeVar

MAX_DEPTH: Final = 64
"""Objects and lists within each other. Parsers of clients give up at some hundreds."""
MAX_SCALAR: Final = 1_000
"""Characters of one number."""

SPACE: Final = " \t\r\n"
_ESCAPES: Final = '"\\/bfnrt'
_HEX: Final = "0123456789abcdefABCDEF"
_ENDS: Final = ",]}" + SPACE
_SCALAR_CHARACTERS: Final = frozenset("0123456789+-.eEtrufalsn")
_SCALAR: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")

Result = TypeVar("Result")
Steps = Generator[None, str, Result]
"""A recogniser: it is sent characters and returns what it recognised."""
Tape = list[str]
"""The characters that were sent, one an item."""
OnMember = Callable[[str, str | None], None]
"""Told of a member's name, then of its name and its value's text; may raise ``NotACall``."""


class NotACall(Exception):  # noqa: N818 - an answer to the driver, not a failure
    """What was read cannot become a tool call any more."""


def space() -> Steps[str]:
    """Skip white space; returns the first character that is none."""
    while (char := (yield)) in SPACE:
        pass
    return char


def members(
    tape: Tape, on_member: OnMember | None = None, *, depth: int = 0
) -> Steps[dict[str, str]]:
    """The rest of an object whose brace was read: its members' names and their values' exact text.

    Of members with one name the last counts, as for every parser.
    """
    found: dict[str, str] = {}
    char = yield from space()
    while char != "}":
        if char != '"':
            raise NotACall
        start = len(tape) - 1
        yield from _string()
        name = json.loads("".join(tape[start:]))
        if on_member is not None:
            on_member(name, None)
        if (yield from space()) != ":":
            raise NotACall
        char = yield from space()
        start = len(tape) - 1
        after = yield from value(tape, char, depth=depth + 1)
        if depth == 0:
            found[name] = "".join(tape[start : len(tape) - len(after)])
            if on_member is not None:
                on_member(name, found[name])
        char = after if after and after not in SPACE else (yield from space())
        if char == ",":
            char = yield from space()
            if char == "}":
                raise NotACall
        elif char != "}":
            raise NotACall
    return found


def value(tape: Tape, first: str, *, depth: int = 0) -> Steps[str]:
    """A value that begins with ``first``, which was read.

    Returns the character after it where that had to be read to see the end (numbers, ``true``),
    else an empty string.
    """
    if depth > MAX_DEPTH:
        raise NotACall
    if first == "{":
        yield from members(tape, depth=max(1, depth))
    elif first == "[":
        yield from _elements(tape, depth)
    elif first == '"':
        yield from _string()
    else:
        return (yield from _scalar(first))
    return ""


def _elements(tape: Tape, depth: int) -> Steps[None]:
    char = yield from space()
    if char == "]":
        return
    while True:
        after = yield from value(tape, char, depth=depth + 1)
        char = after if after and after not in SPACE else (yield from space())
        if char == "]":
            return
        if char != ",":
            raise NotACall
        char = yield from space()


def _string() -> Steps[None]:
    """The rest of a string whose quote was read."""
    while (char := (yield)) != '"':
        if char < " ":
            raise NotACall
        if char != "\\":
            continue
        escape = yield
        if escape == "u":
            for _ in range(4):
                if (yield) not in _HEX:
                    raise NotACall
        elif escape not in _ESCAPES:
            raise NotACall


def _scalar(first: str) -> Steps[str]:
    text = [first]
    if first not in _SCALAR_CHARACTERS:
        raise NotACall
    while (char := (yield)) not in _ENDS:
        if char not in _SCALAR_CHARACTERS or len(text) >= MAX_SCALAR:
            raise NotACall
        text.append(char)
    if not _SCALAR.fullmatch("".join(text)):
        raise NotACall
    return char


def recognise(steps: Steps[Result], tape: Tape, text: str) -> tuple[Result, int] | None:
    """Drive a fresh recogniser over a whole text: its result and the length of what it took.

    None if the text ends too early. Raises ``NotACall`` for a wrong one.
    """
    next(steps)
    for index, char in enumerate(text):
        tape.append(char)
        try:
            steps.send(char)
        except StopIteration as done:
            return done.value, index + 1
    return None
