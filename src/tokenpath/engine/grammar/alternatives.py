"""Whether two alternatives of a ``oneOf`` exclude each other, so that it is the same as ``anyOf``.

Only what is plain counts: other types, other constants, or a required property in both whose values
differ, which is how tagged unions are written. References are followed to tell.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from tokenpath.engine.grammar.pointers import resolve

Schema = dict[str, Any] | bool

_MOST_STEPS: Final = 64
"""From reference to reference; a longer chain is a circle."""


def disjoint(first: Schema, second: Schema, root: dict[str, Any]) -> bool:
    """Whether it is plain that no value fits both schemas; ``root`` is what they refer into."""
    first, second = _followed(first, root), _followed(second, root)
    if isinstance(first, bool) or isinstance(second, bool):
        return first is False or second is False
    kinds, others = _kinds(first), _kinds(second)
    if kinds is not None and others is not None and not kinds & others:
        return True
    values, other_values = _allowed(first), _allowed(second)
    if values is not None and other_values is not None and not values & other_values:
        return True
    if first.get("type") != "object" or second.get("type") != "object":
        return False
    shared = set(first.get("required", ())) & set(second.get("required", ()))
    return any(
        name in first.get("properties", {})
        and name in second.get("properties", {})
        and _tags_differ(first["properties"][name], second["properties"][name], root)
        for name in shared
    )


def _tags_differ(first: Schema, second: Schema, root: dict[str, Any]) -> bool:
    """As ``_disjoint``, for the property that tells two objects apart; looks no deeper."""
    first, second = _followed(first, root), _followed(second, root)
    if isinstance(first, bool) or isinstance(second, bool):
        return first is False or second is False
    values, other_values = _allowed(first), _allowed(second)
    if values is not None and other_values is not None:
        return not values & other_values
    kinds, others = _kinds(first), _kinds(second)
    return kinds is not None and others is not None and not kinds & others


def _followed(schema: Schema, root: dict[str, Any]) -> Schema:
    """What a schema that is nothing but a reference refers to."""
    for _ in range(_MOST_STEPS):
        if not isinstance(schema, dict) or set(schema) != {"$ref"}:
            break
        found = resolve(root, schema["$ref"])
        if found is None:
            break
        schema = found.schema
    return schema


def _kinds(schema: dict[str, Any]) -> set[str] | None:
    """The types that a schema allows; None for any."""
    names = schema.get("type")
    if names is None:
        return None
    kinds = {names} if isinstance(names, str) else set(names)
    return kinds | {"integer"} if "number" in kinds else kinds


def _allowed(schema: dict[str, Any]) -> set[str] | None:
    """The values that ``const`` or ``enum`` name, each as a text that equal values share."""
    if "const" in schema:
        return {_same_text(schema["const"])}
    if "enum" in schema:
        return {_same_text(value) for value in schema["enum"]}
    return None


def _same_text(value: object) -> str:
    return msgspec.json.encode(_floats(value), order="sorted").decode()


def _floats(value: object) -> object:
    """1 and 1.0 are the same value."""
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, list):
        return [_floats(item) for item in value]
    if isinstance(value, dict):
        return {name: _floats(item) for name, item in value.items()}
    return value
