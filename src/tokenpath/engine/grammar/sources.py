"""What users write, as the one notation that is compiled: llguidance's dialect of Lark."""

from __future__ import annotations

import re
from typing import Final

import msgspec
from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from tokenpath.engine.grammar.calls import Refusal, accepted, calls_lark
from tokenpath.engine.grammar.notation import OPTIONS, json_of, literal
from tokenpath.engine.grammar.schema import read_schema
from tokenpath.protocol.calls import CallConstraint
from tokenpath.protocol.errors import InvalidRequestError
from tokenpath.protocol.grammar import Grammar, GrammarKind

MAX_CHOICES: Final = 10_000

_OWN_OPTIONS: Final = re.compile(r"^\s*%llguidance\b", re.MULTILINE)
_EMPTY_HEAD: Final = re.compile(r"\A\s*%llguidance\s*\{\s*\}")


def lark(grammar: Grammar, refusal: Refusal = accepted) -> str:
    """The grammar to compile. Raises ``InvalidRequestError`` that says what is wrong.

    Of several schemas in one grammar ``refusal`` is asked about each.
    """
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return _json(grammar.source) + OPTIONS
        case GrammarKind.REGEX:
            return _regex(grammar.source) + OPTIONS
        case GrammarKind.CHOICE:
            return _choice(grammar.source) + OPTIONS
        case GrammarKind.EBNF:
            return _rules(grammar.source) + OPTIONS
        case GrammarKind.CALLS:
            constraint = msgspec.json.decode(grammar.source, type=CallConstraint)
            return calls_lark(constraint, refusal) + OPTIONS


def _json(text: str) -> str:
    schema = read_schema(text)
    if schema is False:
        raise InvalidRequestError("the JSON schema is false, so no JSON satisfies it")
    return f"start: {json_of(schema)}\n"


def _regex(pattern: str) -> str:
    if not pattern:
        raise InvalidRequestError("the regular expression is empty; it must match some text")
    # Classes such as \d are ASCII's: what they match, every dialect's classes match.
    return f"start: TEXT\nTEXT: /{regex_to_lark(pattern, 'dws')}/\n"


def _choice(text: str) -> str:
    try:
        choices = msgspec.json.decode(text, type=list[str])
    except msgspec.MsgspecError as error:
        raise InvalidRequestError(f"the choice must be a list of texts: {error}") from None
    if not choices:
        raise InvalidRequestError("the choice is empty; it needs at least one text")
    if len(choices) > MAX_CHOICES:
        raise InvalidRequestError(f"the choice has more than {MAX_CHOICES} texts")
    if "" in choices:
        raise InvalidRequestError("the choice has an empty text; every text needs a character")
    return f"start: TEXT\nTEXT: {' | '.join(map(literal, dict.fromkeys(choices)))}\n"


def _rules(text: str) -> str:
    try:
        rules = any_to_lark(text)
    except GbnfToLarkError as error:
        raise InvalidRequestError(f"the grammar cannot be read: {error}") from None
    except (RecursionError, ValueError, KeyError, IndexError, AssertionError) as error:
        raise InvalidRequestError(
            f"the grammar cannot be read ({type(error).__name__}); write rules as in "
            'root ::= "a" | "b", or in Lark\'s form as in start: "a" | "b"'
        ) from None
    rules = _EMPTY_HEAD.sub("", rules)
    if _OWN_OPTIONS.search(rules):
        raise InvalidRequestError("the grammar has %llguidance options, which the engine sets")
    return rules + "\n"
