"""The shape of a model's calls, found by asking its template.

A chat template writes an assistant's earlier calls the way the model was trained to write them. So
a conversation with a made-up call is rendered, and what stands around its name and its arguments
are the marks. Two calls in one message show what stands between calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from tokenpath.models.dialects.json_steps import NotACall, Tape, recognise, value
from tokenpath.models.dialects.reader import check_marks
from tokenpath.models.dialects.shapes import ARGUMENT_KEYS, Shape

NAMES: Final = ("probe_first_tool", "probe_second_tool")
_KEY, _VALUE = "probe_key", "probe_value"
_IDS: Final = ("prb000001", "prb000002")
"""Nine letters and digits, since some templates take no others."""
_SAYS: Final = "PROBE-TEXT"
_MAX_MARK: Final = 200
"""Longer than that, it is not a mark but part of the conversation."""

Render = Callable[[Sequence[Mapping[str, Any]]], str]
"""Renders messages without a generation prompt. Raises if the template refuses them."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What a template told."""

    shapes: tuple[Shape, ...]
    """Empty if it does not show calls, or shows them in a way that cannot be read."""
    text_arguments: bool
    """Whether it wants ``arguments`` as JSON text instead of an object."""


def probe(render: Render) -> Probe:
    """Ask a template how calls are written. Never raises: a template may fail in any way."""
    for text_arguments in (False, True):
        one = _rendered(render, 1, text_arguments=text_arguments)
        if one is None or NAMES[0] not in one or _KEY not in one:
            continue
        plain = _rendered(render, 0, text_arguments=text_arguments)
        two = _rendered(render, 2, text_arguments=text_arguments)
        shapes = _shapes(one, plain, two)
        return Probe(shapes, text_arguments)
    return Probe((), text_arguments=False)


def _rendered(render: Render, calls: int, *, text_arguments: bool) -> str | None:
    arguments = {_KEY: _VALUE}
    message: dict[str, Any] = {"role": "assistant", "content": "" if calls else _SAYS}
    if calls:
        message["tool_calls"] = [
            {
                "id": _IDS[place],
                "type": "function",
                "function": {
                    "name": NAMES[place],
                    "arguments": json.dumps(arguments) if text_arguments else arguments,
                },
            }
            for place in range(calls)
        ]
    try:
        return render([{"role": "user", "content": "probe"}, message])
    except Exception:  # noqa: BLE001 - a template is a program of somebody else
        return None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a call is in a rendered text."""

    start: int
    end: int
    between: str | None
    """None: the name is inside of the JSON."""
    name_key: str = "name"
    argument_key: str = "arguments"


def _shapes(one: str, plain: str | None, two: str | None) -> tuple[Shape, ...]:
    place = _find(one, NAMES[0])
    if place is None or plain is None:
        return ()
    before, after = one[: place.start], one[place.end :]
    opened = before[_common_start(before, plain) :].strip()
    closed = after[: len(after) - _common_end(after, plain)].strip()
    if max(len(opened), len(closed)) > _MAX_MARK:
        return ()
    shape = Shape(
        open=opened,
        close=closed,
        payload="json" if place.between is None else "named",
        between=place.between or "",
        name_key=place.name_key,
        argument_keys=tuple(dict.fromkeys((place.argument_key, *ARGUMENT_KEYS))),
        sure=bool(opened),
    )
    shapes = _with_neighbour(shape, two)
    if any(shape.payload == "named" and not shape.open for shape in shapes):
        return ()  # any text would begin a call
    try:
        check_marks([shape.open for shape in shapes if shape.open])
    except ValueError:
        return ()
    return shapes


def _with_neighbour(shape: Shape, two: str | None) -> tuple[Shape, ...]:
    """The shape once it is known what stands between two calls."""
    first = None if two is None else _find(two, NAMES[0])
    second = None if two is None else _find(two, NAMES[1])
    join = None
    if two is not None and first is not None and second is not None:
        join = two[first.end : second.start].strip()
    if shape.open.endswith("[") and shape.close.startswith("]") and shape.payload == "json":
        # A list: the recogniser of JSON reads it.
        opened = shape.open[:-1].rstrip()
        return (replace(shape, open=opened, close=shape.close[1:].lstrip(), sure=bool(opened)),)
    if not join or len(join) > _MAX_MARK or join == shape.close + shape.open:
        return (shape,)
    if shape.close and join.startswith(shape.close):
        again = join.removeprefix(shape.close).strip()
        return (shape,) if again in ("", shape.open) else (shape, replace(shape, open=again))
    return (replace(shape, join=join) if shape.close else shape,)


def _find(text: str, name: str) -> _Place | None:
    """The widest JSON object that holds the name, or the name with the JSON object after it."""
    at = text.find(name)
    if at < 0:
        return None
    for start in range(at):
        if text[start] != "{":
            continue
        end = _json_end(text, start)
        if end is None or end < at:
            continue
        keys = _keys(text[start:end], name)
        if keys is not None:
            return _Place(start, end, None, *keys)
    return _named_place(text, name, at)


def _named_place(text: str, name: str, at: int) -> _Place | None:
    after = at + len(name)
    start = text.find("{", after)
    end = None if start < 0 else _json_end(text, start)
    if end is None or _KEY not in text[start:end]:
        return None
    between = text[after:start].strip()
    if len(between) > _MAX_MARK or any(probe in between for probe in _IDS):
        return None
    return _Place(at, end, between)


def _json_end(text: str, start: int) -> int | None:
    tape: Tape = ["{"]
    try:
        # ``value`` wants its first character read; the brace is.
        read = recognise(value(tape, "{"), tape, text[start + 1 :])
    except NotACall:
        return None
    return None if read is None else start + 1 + read[1]


def _keys(text: str, name: str) -> tuple[str, str] | None:
    """What the members with the name and the arguments are called."""
    found = json.loads(text)
    if isinstance(found.get("function"), dict) and found["function"].get("name") == name:
        found = found["function"]
    names = [key for key, member in found.items() if member == name]
    arguments = [key for key, member in found.items() if _is_arguments(member)]
    return (names[0], arguments[0]) if names and arguments else None


def _is_arguments(member: Any) -> bool:
    """Whether this is the made-up call's arguments, or their text."""
    if not isinstance(member, str):
        return bool(member == {_KEY: _VALUE})
    try:
        return bool(json.loads(member) == {_KEY: _VALUE})
    except ValueError:
        return False


def _common_start(text: str, other: str) -> int:
    length = 0
    for left, right in zip(text, other, strict=False):
        if left != right:
            break
        length += 1
    return length


def _common_end(text: str, other: str) -> int:
    return _common_start(text[::-1], other[::-1])
