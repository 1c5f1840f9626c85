"""Tool calls as a grammar: thoughts if there are any, then calls, or text and then calls.

Text is free until a mark of calls begins; from there on only a call can follow, and after the calls
nothing. A text that could be taken for a call without a mark, because it begins with a brace or a
bracket, is not free. Control tokens are no text: where a mark is one, the token itself is named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec

from tokenpath.engine.grammar.notation import OPTIONS, json_of, literal
from tokenpath.engine.grammar.schema import read_schema
from tokenpath.protocol.calls import CallConstraint, CallFrame, CallRule, ThoughtFrame
from tokenpath.protocol.errors import InvalidRequestError

_ANY_OBJECT: Final[dict[str, Any]] = {"type": "object"}
_TERMINALS: Final = r"""
ANY: /(?s:.*)/
BLANK: /[\s\x1c-\x1f]*/
GAP: /[ \n]{1,4}/
BARE: BLANK /[{\[]/ ANY
"""
"""``BLANK`` is white space as Python has it, since the reader of the answer is Python."""


Refusal = Callable[[str], str | None]
"""Why the rules of one schema cannot be compiled, as a sentence; None if they can."""


def accepted(_: str) -> str | None:
    """The refusal that trusts every schema."""
    return None


def calls_lark(constraint: CallConstraint, refusal: Refusal = accepted) -> str:
    """The rules of a constraint; ``refusal`` is asked about each schema by itself.

    Raises ``InvalidRequestError``, whose ``param`` is the field of a strict tool with a schema that
    cannot be enforced.
    """
    return "\n".join(_lines(constraint, refusal)) + _TERMINALS


def _lines(constraint: CallConstraint, refusal: Refusal) -> Iterator[str]:
    yield from _start(constraint)
    if constraint.thoughts is not None:
        yield from _thought(constraint.thoughts, constraint.controls)
    for place, frame in enumerate(constraint.frames):
        if constraint.required:
            yield f"calls_{place}: {_symbols(frame.open, constraint.controls)} rest_{place}"
        else:
            yield from _begun(place, frame, constraint.controls)
        yield from _rest(place, frame, constraint, refusal)
    if not constraint.required:
        yield from _free(constraint)


def _start(constraint: CallConstraint) -> Iterator[str]:
    ways = [f"calls_{place}" for place in range(len(constraint.frames))]
    gap = ""
    if constraint.required:
        gap = " GAP?"
    else:
        ways.append("FREE")
    before = ""
    if constraint.thoughts is not None:
        before = f"(thought{gap})" if constraint.thoughts.begun else f"(thought{gap})?"
    yield f"start: {before} ({' | '.join(ways)})"


def _free(constraint: CallConstraint) -> Iterator[str]:
    """The terminal of free text: what no reader could take for a call or a thought."""
    controls = constraint.controls
    never = []
    for place, frame in enumerate(constraint.frames):
        if not frame.trigger:
            never.append("BARE")
        elif any(isinstance(piece, int) for piece in _pieces(frame.trigger, controls)):
            # Spelled in other tokens it would still be read as the mark.
            never.append(f"MARKED_{place}")
            yield f"MARKED_{place}: ANY {literal(frame.trigger)} ANY"
    if constraint.thoughts is not None and not constraint.thoughts.begun:
        never.append("THINKS")
        yield f"THINKS: BLANK {literal(constraint.thoughts.open)} ANY"
    yield "FREE: " + " & ~".join(["ANY", *never])


def _thought(thoughts: ThoughtFrame, controls: Mapping[str, int]) -> Iterator[str]:
    """The rule ``thought``: everything to the closing mark."""
    begin = ""
    if not thoughts.begun and thoughts.open not in controls:
        begin = f"GAP? {literal(thoughts.open)}"
    if thoughts.close in controls:
        inside = f"thinking {_symbols(thoughts.close, controls)}"
        yield f"thinking: {begin} INSIDE"
        yield "INSIDE: ANY & ~OVER"
        yield f"OVER: ANY {literal(thoughts.close)} ANY"
    else:
        inside = "thinking"
        yield f"thinking[lazy]: {begin} ANY {literal(thoughts.close)}"
    control = "" if thoughts.begun or begin else _symbols(thoughts.open, controls)
    yield f"thought: {control} {inside}"


def _begun(place: int, frame: CallFrame, controls: Mapping[str, int]) -> Iterator[str]:
    """The rule of a frame that free text may come before."""
    if not frame.trigger:
        yield f"calls_{place}: GAP? {_symbols(frame.open, controls)} rest_{place}"
        return
    rest = _pieces(frame.open.removeprefix(frame.trigger), controls)
    first, *marks = _pieces(frame.trigger, controls)
    if isinstance(first, str) and not marks:
        yield f"text_{place}[lazy]: FREE {literal(first)}"
    elif isinstance(first, str):
        # No text can hold the token that follows, so the text needs no end of its own.
        yield f"text_{place}: FREE {literal(first)}"
    else:
        yield f"text_{place}: FREE"
        marks = [first, *marks]
    yield f"calls_{place}: text_{place} {_written([*marks, *rest])} rest_{place}"


def _rest(
    place: int, frame: CallFrame, constraint: CallConstraint, refusal: Refusal
) -> Iterator[str]:
    """The rules of a frame after its opening."""
    controls = constraint.controls
    more = f"({_symbols(frame.join, controls)} call_{place})*" if constraint.several else ""
    yield f"rest_{place}: call_{place} {more} {_symbols(frame.close, controls)}"
    options = []
    for rule in frame.rules:
        begin, end = _symbols(rule.begin, controls), _symbols(rule.end, controls)
        options.append(f"{begin} {json_of(_schema(rule, refusal))} {end}")
    yield f"call_{place}: " + "\n    | ".join(options)


def _schema(rule: CallRule, refusal: Refusal) -> dict[str, Any] | bool:
    try:
        schema = read_schema(msgspec.json.encode(rule.schema).decode())
        why = refusal(f"start: {json_of(schema)}\n{OPTIONS}")
        if why is not None:
            raise InvalidRequestError(why)  # noqa: TRY301 - as what ``read_schema`` raises
    except InvalidRequestError as error:
        if not rule.strict:
            return _ANY_OBJECT
        raise type(error)(
            f"Field '{rule.field}' cannot be enforced: {error.message}", param=rule.field
        ) from None
    return schema


def _symbols(text: str, controls: Mapping[str, int]) -> str:
    return _written(_pieces(text, controls))


def _written(pieces: list[str | int]) -> str:
    return " ".join(
        literal(piece) if isinstance(piece, str) else f"<[{piece}]>" for piece in pieces
    )


def _pieces(text: str, controls: Mapping[str, int]) -> list[str | int]:
    """A text as texts and control tokens, in order."""
    if not controls:
        return [text] if text else []
    longest_first = sorted(controls, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
    return [controls.get(part, part) for part in parts if part]
