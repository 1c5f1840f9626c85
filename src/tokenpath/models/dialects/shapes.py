"""What a tool call looks like in a model's text, and its recogniser.

A shape is data: marks around a call, and where the tool's name and arguments are between them. The
families differ in little else, so one recogniser reads all shapes, the same data is written down as
a grammar (``constraint``), and a shape can be derived from a template (``derive``).

Whether something is a call is decided when it is complete, and as a whole: valid JSON with a
name of a tool that was offered, and an object of arguments. Everything else is text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal

from tokenpath.models.dialects.json_steps import (
    SPACE,
    NotACall,
    Steps,
    Tape,
    members,
    recognise,
    space,
)

ARGUMENT_KEYS: Final = ("arguments", "parameters")
_OTHER_KEYS: Final = frozenset({"id", "type", "function"})
"""What may stand beside a name and arguments in a call that no mark announces."""
_NAME_CHARACTERS: Final = frozenset(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-."
)
_MAX_NAME: Final = 256

Payload = Literal["json", "named", "mistral", "code"]


@dataclass(frozen=True, slots=True)
class Call:
    """A complete tool call."""

    name: str
    arguments: str
    """The text of a JSON object, in the model's own spelling where it wrote JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One way to write calls. White space around the marks is free."""

    open: str = ""
    """The mark that announces a call. Empty: none, the call is at the beginning of the answer."""
    payload: Payload = "json"
    """``json``: an object with name and arguments, or a list of such. ``named``: the name, then
    ``between``, then an object of arguments. ``mistral``: either of them, as Mistral's versions
    have it. ``code``: JSON as before, or calls written as Python."""
    between: str = ""
    """Between name and arguments, for ``named``."""
    join: str = ""
    """Between one call and the next of the same block."""
    close: str = ""
    """The mark that ends a block. Empty: the last brace ends it."""
    name_key: str = "name"
    argument_keys: tuple[str, ...] = ARGUMENT_KEYS
    sure: bool = True
    """Whether nothing but a call begins so. If not, as for bare JSON, an object with other members
    than a call's is text, which is known at the first of them."""


def calls(shape: Shape, tape: Tape, tools: Collection[str]) -> Steps[list[Call]]:
    """Recognise what follows a shape's opening mark, to the end of its closing mark.

    A character is sent only after it was appended to ``tape``. Raises ``NotACall``.
    """
    found: list[Call] = []
    first = yield from space()
    while True:
        found += yield from _payload(shape, tape, tools, first)
        if not shape.close:
            return found
        mark = yield from _one_of((shape.close, shape.join) if shape.join else (shape.close,))
        if mark == shape.close:
            return found
        first = yield from space()


def _payload(shape: Shape, tape: Tape, tools: Collection[str], first: str) -> Steps[list[Call]]:
    if shape.payload == "named":
        return [(yield from _named(shape, tape, tools, first))]
    if first == "{":
        return [(yield from _object(shape, tape, tools))]
    if shape.payload == "code" and first not in "{[":
        return (yield from _code(tape, tools, first))
    if first == "[":
        return (yield from _list(shape, tape, tools))
    if shape.payload == "mistral":
        return [(yield from _mistral_named(tape, tools, first))]
    raise NotACall


def _list(shape: Shape, tape: Tape, tools: Collection[str]) -> Steps[list[Call]]:
    found: list[Call] = []
    while True:
        if (yield from space()) != "{":
            raise NotACall
        found.append((yield from _object(shape, tape, tools)))
        char = yield from space()
        if char == "]":
            return found
        if char != ",":
            raise NotACall


def _object(shape: Shape, tape: Tape, tools: Collection[str]) -> Steps[Call]:
    known = {shape.name_key, *shape.argument_keys, *_OTHER_KEYS}

    def judge(key: str, text: str | None) -> None:
        if text is None:
            if not shape.sure and key not in known:
                raise NotACall
        elif key == shape.name_key:
            _check_name(text, tools)

    found = yield from members(tape, judge)
    if shape.name_key not in found and "function" in found:
        inner = found["function"]
        if not inner.startswith("{"):
            raise NotACall
        inner_tape: Tape = ["{"]
        read = recognise(members(inner_tape, judge), inner_tape, inner[1:])
        found = read[0] if read is not None else {}
    if shape.name_key not in found:
        raise NotACall
    name = _check_name(found[shape.name_key], tools)
    written = [found[key] for key in shape.argument_keys if key in found]
    if not written and not shape.sure:
        raise NotACall
    return Call(name, _arguments(written[0] if written else "{}"))


def _check_name(text: str, tools: Collection[str]) -> str:
    name = json.loads(text)
    if not isinstance(name, str) or name not in tools:
        raise NotACall
    return name


def _arguments(text: str) -> str:
    """The object of arguments; a string that holds one is what templates taught some models."""
    if text.startswith('"'):
        text = json.loads(text).strip(SPACE)
        tape: Tape = ["{"]
        read = recognise(members(tape), tape, text[1:]) if text.startswith("{") else None
        if read is None or read[1] != len(text) - 1:
            raise NotACall
        _check_unicode(text)
    if not text.startswith("{"):
        raise NotACall
    return text


def _check_unicode(text: str) -> None:
    """Refuse halves of characters, which escapes can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise NotACall from None


def _object_text(tape: Tape) -> Steps[str]:
    """The rest of an object whose brace was read, as text."""
    start = len(tape) - 1
    yield from members(tape)
    return "".join(tape[start:])


def _named(shape: Shape, tape: Tape, tools: Collection[str], first: str) -> Steps[Call]:
    name, char = yield from _name(first)
    if name not in tools:
        raise NotACall
    if shape.between:
        yield from _literal(shape.between, char)
        char = yield from space()
    elif char in SPACE:
        char = yield from space()
    if char != "{":
        raise NotACall
    return Call(name, (yield from _object_text(tape)))


def _mistral_named(tape: Tape, tools: Collection[str], first: str) -> Steps[Call]:
    """``name{…}``, ``name[ARGS]{…}`` or ``name[CALL_ID]id[ARGS]{…}``."""
    name, char = yield from _name(first)
    if name not in tools:
        raise NotACall
    if char in SPACE:
        char = yield from space()
    if char == "[":
        following = yield
        if following == "C":
            yield from _literal("CALL_ID]", following)
            _, char = yield from _name((yield))
            yield from _literal("[ARGS]", char)
        else:
            yield from _literal("ARGS]", following)
        char = yield from space()
    if char != "{":
        raise NotACall
    return Call(name, (yield from _object_text(tape)))


def _name(first: str) -> Steps[tuple[str, str]]:
    """A word that begins with ``first``, and the character after it."""
    text, char = "", first
    while char in _NAME_CHARACTERS:
        if len(text) >= _MAX_NAME:
            raise NotACall
        text += char
        char = yield
    if not text:
        raise NotACall
    return text, char


def _literal(text: str, first: str) -> Steps[None]:
    """``text``, of which ``first`` was read; white space may come before it."""
    char = first
    if char in SPACE and text[0] not in SPACE:
        char = yield from space()
    for place, wanted in enumerate(text):
        if (char if place == 0 else (yield)) != wanted:
            raise NotACall


def _one_of(marks: tuple[str, ...]) -> Steps[str]:
    """The mark that comes next, after white space."""
    read = yield from space()
    while read not in marks:
        if not any(mark.startswith(read) for mark in marks):
            raise NotACall
        read += yield
    return read


def _code(tape: Tape, tools: Collection[str], first: str) -> Steps[list[Call]]:
    """Python between fences: one call with constants by keyword, alone or printed.

    Its last bracket ends it; quotes are followed, so that one in a string does not.
    """
    start, depth, quote = len(tape) - 1, 0, ""
    char = first
    while True:
        if quote:
            if char == "\\":
                yield
            elif char == quote:
                quote = ""
            elif char == "\n":
                raise NotACall
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth == 0:
                return _python_calls("".join(tape[start:]), tools)
        elif depth == 0 and not (char.isalnum() or char in "_."):
            raise NotACall
        if depth < 0:
            raise NotACall
        char = yield


_PRINTED: Final = re.compile(r"\A\s*print\(\s*(?P<inside>.*)\)\s*\Z", re.DOTALL)


def _python_calls(source: str, tools: Collection[str]) -> list[Call]:
    printed = _PRINTED.match(source)
    try:
        tree = ast.parse((printed["inside"] if printed else source).strip(), mode="eval")
        return [_python_call(tree.body, tools)]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise NotACall from None


def _python_call(node: ast.expr, tools: Collection[str]) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise NotACall
    name = ast.unparse(node.func)
    if name not in tools:
        raise NotACall
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise NotACall
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    _check_unicode(text)
    return Call(name, text)
