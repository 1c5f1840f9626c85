"""Structured output as clients ask for it: OpenAI's ``response_format`` and vLLM's own fields.

All of them mean one ``Grammar``; two in one request contradict each other. What a grammar says is
checked where it is compiled, in the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tokenpath.config.spec import Limits
from tokenpath.protocol.errors import InvalidRequestError
from tokenpath.protocol.grammar import Grammar

if TYPE_CHECKING:
    from tokenpath.gateway.openai.schema import Sampling

JsonSchema = dict[str, Any] | bool
Pattern = Annotated[str, Meta(min_length=1)]
Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A JSON schema by OpenAI's rules."""

    schema: JsonSchema
    """What the output must satisfy."""
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    """The schema is always enforced, whatever this says."""


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's form of structured output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    """With type ``json_schema``."""


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's form of structured output: exactly one of these."""

    json: JsonSchema | str | None = None
    """A JSON schema, or its text."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: Pattern | None = None
    """A regular expression that the whole output matches."""
    choice: Choices | None = None
    """The possible outputs."""
    grammar: Pattern | None = None
    """Rules in GBNF's or Lark's form."""


def grammar_of(request: Sampling, limits: Limits) -> Grammar | None:
    """What the output must be; None if it is free.

    Raises ``InvalidRequestError`` if the request asks for two things, or for one together with what
    it excludes, or if a schema or grammar is larger than the spec allows.
    """
    found = [grammar for grammar in _asked(request) if grammar is not None]
    if not found:
        return None
    grammar, *others = found
    if others:
        raise InvalidRequestError(
            f"Fields '{grammar.field}' and '{others[0].field}' each say what the output must be; "
            "only one can be given.",
            param=others[0].field,
        )
    check_grammar(grammar, request, limits)
    return grammar


def check_grammar(grammar: Grammar, request: Sampling, limits: Limits) -> None:
    """Raise ``InvalidRequestError`` if it is too large, or excluded by the rest of the request."""
    size = len(grammar.source.encode("utf-8", "surrogatepass"))
    if size > limits.grammar_bytes:
        raise InvalidRequestError(
            f"Field '{grammar.field}' has {size} bytes of schema or grammar; this server allows "
            f"{limits.grammar_bytes}.",
            param=grammar.field,
        )
    if request.ignore_eos:
        raise InvalidRequestError(
            f"Field 'ignore_eos' cannot be combined with '{grammar.field}': the output ends where "
            "the grammar does.",
            param="ignore_eos",
        )


def _asked(request: Sampling) -> list[Grammar | None]:
    """One entry for each field that may ask for a grammar."""
    outputs = request.structured_outputs or StructuredOutputs()
    return [
        _response_format(request.response_format),
        *_fields(
            "structured_outputs.",
            outputs.json,
            outputs.regex,
            outputs.choice,
            outputs.grammar,
            empty=request.structured_outputs is not None and not outputs.json_object,
        ),
        Grammar.json_object(field="structured_outputs.json_object")
        if outputs.json_object
        else None,
        *_fields(
            "guided_",
            request.guided_json,
            request.guided_regex,
            request.guided_choice,
            request.guided_grammar,
        ),
    ]


def _response_format(asked: ResponseFormat | None) -> Grammar | None:
    if asked is None or asked.type == "text":
        return None
    field = "response_format"
    if asked.type == "json_object":
        return Grammar.json_object(field=field)
    if asked.json_schema is None:
        raise InvalidRequestError(
            "Field 'response_format.json_schema' is required with type 'json_schema'.",
            param="response_format.json_schema",
        )
    return Grammar.json_schema(asked.json_schema.schema, field=field)


def _fields(
    prefix: str,
    json: JsonSchema | str | None,
    regex: str | None,
    choice: list[str] | None,
    rules: str | None,
    *,
    empty: bool = False,
) -> list[Grammar | None]:
    """vLLM's four kinds; ``empty`` if there being none of them is a mistake."""
    found = [
        None if json is None else Grammar.json_schema(json, field=f"{prefix}json"),
        None if regex is None else Grammar.regex(regex, field=f"{prefix}regex"),
        None if choice is None else Grammar.choice(choice, field=f"{prefix}choice"),
        None if rules is None else Grammar.ebnf(rules, field=f"{prefix}grammar"),
    ]
    if empty and not any(found):
        raise InvalidRequestError(
            "Field 'structured_outputs' is empty; it needs one of json, json_object, regex, choice "
            "and grammar.",
            param="structured_outputs",
        )
    return found
