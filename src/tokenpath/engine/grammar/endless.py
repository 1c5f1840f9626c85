"""Finds schemas that no finite JSON satisfies, because every value would have to hold another.

A generation under such a schema could only end by ``max_tokens``. The question is which schemas
have a finite value, given those that are already known to have one: it is asked again and again
until the answer no longer grows, which is the least fixed point.

The test errs on one side: what it finds has no value, but a schema that it lets pass may be
impossible for other reasons.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from tokenpath.engine.grammar.pointers import resolve

MAX_VISITS: Final = 300_000
"""Of schemas, over all rounds: a fraction of a second. Ordinary schemas need two rounds."""

_SCALARS: Final = frozenset(("null", "boolean", "integer", "number", "string"))
_ANY: Final = (*_SCALARS, "array", "object")


class TooTangledError(Exception):
    """References lead to each other in so many ways that the answer would take too long."""


def endless_place(root: dict[str, Any]) -> str | None:
    """Where a schema stands that is needed and has no finite value; None if there is none.

    ``root`` is a schema as ``schema.read_schema`` makes it, with references that lead somewhere.
    Raises ``TooTangledError`` after ``MAX_VISITS``.
    """
    schemas = {target: _at(root, target) for target in _references(root)}
    search = _Search()
    waiting = sorted(schemas)
    while True:
        left = [target for target in waiting if not search.settles(target, schemas[target])]
        if len(left) == len(waiting):
            break
        waiting = left[::-1]  # a chain that is unlucky in one direction is lucky in the other
    if search.has_value(root):
        return None
    return min(waiting, default="#")


def _at(root: dict[str, Any], target: str) -> Any:
    found = resolve(root, target)
    return True if found is None else found.schema


def _references(root: dict[str, Any]) -> Iterator[str]:
    """Every ``$ref``; one in a ``const`` or ``enum`` is a value, and does no harm here."""
    pending: list[Any] = [root]
    while pending:
        here = pending.pop()
        if isinstance(here, dict):
            reference = here.get("$ref")
            if isinstance(reference, str) and reference.startswith("#"):
                yield reference
            pending += here.values()
        elif isinstance(here, list):
            pending += here


class _Search:
    """Which referred schemas are known to have a finite value."""

    def __init__(self) -> None:
        self._finite: set[str] = set()
        self._visits = 0

    def settles(self, target: str, schema: Any) -> bool:
        """Whether a referred schema is found to have one; then it is known from here on."""
        found = self.has_value(schema)
        if found:
            self._finite.add(target)
        return found

    def has_value(self, schema: Any) -> bool:
        """Whether a schema has a finite value, as far as is known of those it refers to."""
        self._visits += 1
        if self._visits > MAX_VISITS:
            raise TooTangledError
        if isinstance(schema, bool):
            return schema
        if "$ref" in schema and schema["$ref"] not in self._finite:
            return False
        if "const" in schema or "enum" in schema:
            return True
        for key in ("anyOf", "oneOf"):
            if key in schema and not any(map(self.has_value, schema[key])):
                return False
        if not all(map(self.has_value, schema.get("allOf", ()))):
            return False
        types = schema.get("type", _ANY)
        return any(
            name in _SCALARS or (self._array(schema) if name == "array" else self._object(schema))
            for name in ((types,) if isinstance(types, str) else types)
        )

    def _array(self, schema: dict[str, Any]) -> bool:
        least = schema.get("minItems", 0)
        first = schema.get("prefixItems", ())
        if not all(map(self.has_value, first[:least])):
            return False
        return least <= len(first) or self.has_value(schema.get("items", True))

    def _object(self, schema: dict[str, Any]) -> bool:
        properties = schema.get("properties", {})
        # A name that a pattern may match is taken to have a value.
        others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
        return all(
            self.has_value(properties.get(name, others)) for name in schema.get("required", ())
        )
