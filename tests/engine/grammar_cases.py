"""Schemas, expressions and rules that structured output is tried on, and vocabularies to try it with."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from tokenpath.engine.grammar.vocabulary import Vocabulary

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "email": {"type": ["string", "null"], "format": "email", "maxLength": 40},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}

SCHEMAS: dict[str, Any] = {
    "person": PERSON,
    "nested": {
        "type": "object",
        "properties": {
            "owner": PERSON,
            "pets": {"type": "array", "items": {"$ref": "#/$defs/pet"}, "maxItems": 3},
        },
        "required": ["owner", "pets"],
        "additionalProperties": False,
        "$defs": {
            "pet": {
                "type": "object",
                "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"const": 4}},
                "required": ["kind", "legs"],
                "additionalProperties": False,
            }
        },
    },
    "enum of everything": {"enum": ['a"b', "é日🙂", 1, -2.5, True, None, [1, "x"], {"k": "v"}]},
    "const object": {"const": {"a": [1, {"b": None}], "c": "d/e\\f"}},
    "any of": {
        "anyOf": [
            {"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 20},
            {"type": "string", "pattern": "^[A-Z]{2}[0-9]{4}$"},
            {"type": "null"},
        ]
    },
    "tagged union": {
        "oneOf": [{"$ref": "#/$defs/Circle"}, {"$ref": "#/$defs/Square"}],
        "discriminator": {"propertyName": "shape"},
        "$defs": {
            "Circle": {
                "type": "object",
                "title": "Circle",
                "properties": {
                    "shape": {"const": "circle", "default": "circle"},
                    "radius": {"type": "number", "minimum": 0.5, "maximum": 9.75},
                },
                "required": ["shape", "radius"],
                "additionalProperties": False,
            },
            "Square": {
                "type": "object",
                "properties": {
                    "shape": {"enum": ["square"]},
                    "side": {"type": "integer", "multipleOf": 5, "minimum": 5, "maximum": 100},
                },
                "required": ["shape", "side"],
                "additionalProperties": False,
            },
        },
    },
    "arrays with bounds": {
        "type": "array",
        "items": {"type": "boolean"},
        "minItems": 2,
        "maxItems": 5,
    },
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "string", "maxLength": 3}, {"type": "integer"}],
        "items": False,
        "minItems": 2,
    },
    "patterns": {
        "type": "object",
        "properties": {
            "id": {"type": "string", "pattern": "^[a-f0-9]{8}-[a-f0-9]{4}$"},
            "free": {"type": "string", "pattern": "[xyz]+\\d?", "maxLength": 9},
            "word": {"type": "string", "pattern": "^\\w{1,6}$"},
        },
        "required": ["id", "free", "word"],
        "additionalProperties": False,
    },
    "numbers": {
        "type": "object",
        "properties": {
            "ratio": {"type": "number", "minimum": -0.25, "maximum": 0.75},
            "above": {"type": "number", "exclusiveMinimum": 3},
            "even": {"type": "integer", "multipleOf": 2, "minimum": -6, "maximum": 6},
        },
        "required": ["ratio", "above", "even"],
        "additionalProperties": False,
    },
    "all optional": {
        "type": "object",
        "properties": {name: {"type": "boolean"} for name in "abc"},
        "additionalProperties": False,
    },
    "map": {
        "type": "object",
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9},
        "maxProperties": 3,
    },
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^x_[a-z]{1,3}$": {"type": "boolean"}},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "unicode strings": {"type": "string", "minLength": 2, "maxLength": 4},
    "unicode names": {
        "type": "object",
        "properties": {
            "größe": {"type": "integer", "maximum": 9, "minimum": 0},
            "日本": {"const": "✓"},
        },
        "required": ["größe", "日本"],
        "additionalProperties": False,
    },
    "formats": {
        "type": "object",
        "properties": {
            "day": {"type": "string", "format": "date"},
            "at": {"type": "string", "format": "date-time"},
            "id": {"type": "string", "format": "uuid"},
            "ip": {"type": "string", "format": "ipv4"},
        },
        "required": ["day", "at", "id", "ip"],
        "additionalProperties": False,
    },
    "list that ends": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer", "minimum": 0, "maximum": 9},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}},
            {"properties": {"a": {"type": "integer", "maximum": 5}}, "required": ["a"]},
        ],
        "type": "object",
        "properties": {"a": True},
        "additionalProperties": False,
    },
    "anything": True,
    "an object": {"type": "object"},
    "draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"s": {"type": "string", "maxLength": 2}},
        "type": "array",
        "items": {"$ref": "#/definitions/s"},
        "maxItems": 2,
    },
}

REGEXES = [
    r"[a-z]+@[a-z]+\.(com|org)",
    r"\d{3}-\d{2}/x",
    r"(yes|no)\n",
    r"[äöü🙂]{1,3}",
    r"(?i)hello, world",
    r".{3}",
]
CHOICES = [
    ["positive", "negative"],
    ["a", "ab", "abc"],
    ['q"\\', "line\nbreak", "é🙂 /x/"],
    ["one"],
]
RULES = {
    'root ::= "x" [0-9]+ (" " ("a" | "b"))*': r"x[0-9]+( (a|b))*",
    'start: WORD ("," WORD)*\nWORD: /[a-c]{1,3}/': r"[a-c]{1,3}(,[a-c]{1,3})*",
    'root ::= expr\nexpr ::= [0-9] | "(" expr "+" expr ")"': None,
}
"""Rules, and a regular expression that says the same."""


class ByteTokens:
    """Every byte is a token; then pieces of JSON, some of them twice, an end and a control token."""

    pieces = (
        b'{"', b'": ', b'", "', b'"}', b"true", b"false", b"null", b"}", b"]", b", ", b"\n    ",
        b"12", b"0.", "é".encode(), "日".encode()[:2], "日".encode()[2:], b'":"', b"name", b"name",
    )  # fmt: skip
    end = 256 + len(pieces)
    control = end + 1
    second_end = end + 2
    size = end + 5
    """Two ids more than there are tokens: models pad their vocabularies."""
    special_ids = frozenset([control])

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        if token_id < self.end:
            return self.pieces[token_id - 256]
        return {self.end: b"<end>", self.control: b"<|im_start|>", self.second_end: b"</s>"}.get(
            token_id, b""
        )

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        raise AssertionError("grammars do not call the tokenizer")


ENDS = (ByteTokens.end, ByteTokens.second_end)


@cache
def byte_vocabulary() -> Vocabulary:
    return Vocabulary(ByteTokens(), size=ByteTokens.size, end_ids=ENDS)


def matches(pattern: str, text: str) -> bool:
    """Whether Python's own engine matches the whole text."""
    return re.fullmatch(pattern, text) is not None
