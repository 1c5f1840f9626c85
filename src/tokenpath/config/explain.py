"""Pydantic's findings about a spec, in sentences that say what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from tokenpath.config.positions import Document, Issue, KeyPath
from tokenpath.config.spec import Spec, WrongValueError

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "model_type": "a group of keys",
    "dict_type": "a group of keys",
}
_BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
_SHOWN_CHARACTERS = 60


def explain(error: ValidationError, document: Document) -> list[Issue]:
    """One issue for each value that is wrong, in the order of pydantic's report."""
    findings: dict[KeyPath, list[Mapping[str, Any]]] = {}
    for detail in error.errors(include_url=False):
        missing_or_unknown = detail["type"] in {"missing", "extra_forbidden"}
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, WrongValueError):
            path = cause.path
        else:
            path = detail["loc"] if missing_or_unknown else _in_file(detail["loc"], document)
        findings.setdefault(path, []).append(detail)
    # What is wrong with a list's entry makes "this is not text" about the list itself noise.
    noise = {path[:-1] for path in findings if path and isinstance(path[-1], int)}
    for path in noise:
        findings.pop(path, None)
    return [_issue(path, details, document) for path, details in findings.items()]


def _in_file(location: KeyPath, document: Document) -> KeyPath:
    """A location without the parts that name a branch of a union, which stand in no file."""
    path: KeyPath = ()
    for part in location:
        if (*path, part) in document.values:
            path = (*path, part)
    return path


def _issue(path: KeyPath, details: list[Mapping[str, Any]], document: Document) -> Issue:
    first = details[0]
    if first["type"] == "extra_forbidden":
        return Issue(document.key_position(path), path, _unknown_key(path))
    if first["type"] == "missing":
        return Issue(document.value_position(path[:-1]), path, "this key is required")
    # The branches of a union report each for itself. What is wrong inside a branch (an empty
    # list, an empty text) says more than that it is not the other branch.
    inside = [d for d in details if d["type"] not in _EXPECTED]
    if inside:
        message = _sentence(inside[0])
    else:
        expected = " or ".join(dict.fromkeys(_EXPECTED[d["type"]] for d in details))
        shown = _shown(first["input"], document.written.get(path))
        message = f"must be {expected}, not {shown}{_quotes(first['input'], expected)}"
    return Issue(document.value_position(path), path, message)


def _sentence(detail: Mapping[str, Any]) -> str:
    """One finding that is about the value rather than its type."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        bound = context[key]
        number = int(bound) if float(bound).is_integer() else bound
        return f"must be {words} {number}, not {detail['input']}"
    if kind == "literal_error":
        return f"must be {context['expected']}, not {_shown(detail['input'], None)}"
    if kind == "too_short":
        return "must have at least one entry"
    if kind == "string_too_short":
        return "must not be empty"
    if kind == "value_error":
        return str(context["error"])
    return str(detail["msg"])


def _unknown_key(path: KeyPath) -> str:
    known = _known_keys(path[:-1])
    near = difflib.get_close_matches(str(path[-1]), known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
    elsewhere = [] if near else _places_of(str(path[-1]), Spec)
    if elsewhere:
        hint = f"it belongs under {' or '.join(elsewhere)}"
    return f"unknown key; {hint}"


def _known_keys(path: KeyPath) -> list[str]:
    model: type[BaseModel] = Spec
    for part in path:
        if isinstance(part, str):
            model = next(iter(_models_in(model.model_fields[part].annotation)))
    return list(model.model_fields)


def _places_of(key: str, model: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted names of the groups that have ``key``."""
    places = [prefix] if prefix and key in model.model_fields else []
    for name, field in model.model_fields.items():
        for inner in _models_in(field.annotation):
            places += _places_of(key, inner, f"{prefix}.{name}" if prefix else name)
    return places


def _models_in(annotation: object) -> Iterable[type[BaseModel]]:
    """The spec's own groups in a field's annotation: ``list[Model]`` holds ``Model``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _shown(value: object, written: str | None) -> str:
    """A value as its author would recognise it."""
    if value is None:
        return "empty"
    if isinstance(value, dict):
        return "a group of keys"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        read = "true" if value else "false"
        return read if written in {None, read} else f"{written} (YAML reads it as {read})"
    if isinstance(value, str):
        text = value if len(value) <= _SHOWN_CHARACTERS else f"{value[:_SHOWN_CHARACTERS]}…"
        return f"the text {text!r}"
    return written or str(value)


def _quotes(value: object, expected: str) -> str:
    """What to do about quotes, where they are the mistake."""
    if isinstance(value, bool | int | float) and "text" in expected:
        return "; quote it if text is meant"
    if isinstance(value, str) and "number" in expected and value.strip("+-").isdecimal():
        return "; leave out the quotes"
    return ""
