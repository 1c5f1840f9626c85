"""The OpenAPI document, generated from the structs that decode requests and encode answers."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import Any

import msgspec

from tokenpath.config.spec import Limits
from tokenpath.gateway.admin import ModelStatus, ModelStatusList, NoOptions, SleepOrder
from tokenpath.gateway.openai.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    ModelList,
    ModelObject,
)
from tokenpath.gateway.openai.errors import ErrorBody
from tokenpath.gateway.openai.pooling_schema import (
    ClassificationList,
    ClassifyRequest,
    EmbeddingList,
    EmbeddingRequest,
    RerankAnswer,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from tokenpath.gateway.openai.schema import ChatCompletionRequest, CompletionRequest
from tokenpath.protocol.replica import ReplicaState

_REF = "#/components/schemas/{name}"
_TYPES = (
    ChatCompletionRequest,
    CompletionRequest,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    ModelList,
    ModelObject,
    ErrorBody,
    EmbeddingRequest,
    EmbeddingList,
    RerankRequest,
    RerankAnswer,
    ScoreRequest,
    ScoreList,
    ClassifyRequest,
    ClassificationList,
)
_POOLING = (
    ("embeddings", "Make a vector of each text.", EmbeddingRequest, EmbeddingList),
    ("rerank", "Order documents by how they answer a query.", RerankRequest, RerankAnswer),
    ("score", "Score pairs of texts.", ScoreRequest, ScoreList),
    ("classify", "Give each text a label.", ClassifyRequest, ClassificationList),
)
"""The paths under ``/v1`` that make vectors, each with its request and its answer."""
_ORDERS = (
    ("sleep", "Put a model to sleep: its memory is given back.", SleepOrder),
    ("wake", "Load a sleeping model again.", NoOptions),
    ("reload", "Replace a model's engine without dropping a request.", NoOptions),
)
_ADMIN_TYPES = (SleepOrder, NoOptions, ModelStatus, ModelStatusList)
_FAILURES = {
    "400": "The request is wrong; `param` names the field.",
    "401": "An API key is required.",
    "403": "The caller may not do this.",
    "404": "The model, or the path, is not here.",
    "405": "The path does not take this method.",
    "409": "The model's state does not allow it.",
    "408": "The body took too long to arrive.",
    "413": "The body is too large.",
    "429": "A queue is full; `Retry-After` says when to come back.",
    "500": "The server failed.",
    "503": "No replica can answer now; `Retry-After` says when to come back.",
    "504": "The request ran longer than it may.",
}
_PROBE = {"type": "object", "properties": {"status": {"type": "string"}}, "required": ["status"]}
_READY = {
    "type": "object",
    "properties": {
        "status": {"type": "string"},
        "models": {
            "type": "object",
            "additionalProperties": {"type": "string", "enum": [*ReplicaState]},
        },
    },
    "required": ["status", "models"],
}


def openapi_document(
    limits: Limits, models: Sequence[str], *, admin: bool = False
) -> dict[str, Any]:
    """The document, with this deployment's models and bounds where they narrow the schema's.

    With ``admin`` the paths by which the server is operated are in it.
    """
    types = (*_TYPES, *_ADMIN_TYPES) if admin else _TYPES
    _, schemas = msgspec.json.schema_components(types, ref_template=_REF)
    _narrow(schemas, limits, models)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tokenpath",
            "version": importlib.metadata.version("tokenpath"),
            "description": "OpenAI-compatible inference.",
        },
        "paths": {
            "/v1/chat/completions": {
                "post": _generation(
                    "chat",
                    "Answer a conversation.",
                    "ChatCompletionRequest",
                    "ChatCompletion",
                    "ChatCompletionChunk",
                )
            },
            "/v1/completions": {
                "post": _generation(
                    "complete", "Continue a text.", "CompletionRequest", "Completion", "Completion"
                )
            },
            **{
                f"/v1/{path}": {"post": _call(path, summary, request.__name__, answer.__name__)}
                for path, summary, request, answer in _POOLING
            },
            "/v1/models": {"get": _get("models", "List the served models.", _ref("ModelList"))},
            "/v1/models/{id}": {
                "get": _get("model", "Describe one served model.", _ref("ModelObject"))
                | _in_path("id")
            },
            "/health": {"get": _get("health", "Whether the server is alive.", _PROBE, key=False)},
            "/ready": {"get": _get("ready", "Whether a model can answer.", _READY, key=False)},
            "/metrics": {"get": _text("metrics", "Metrics for Prometheus.", "text/plain")},
            "/openapi.json": {
                "get": _get("openapi", "This document.", {"type": "object"}, key=False)
            },
            "/docs": {"get": _text("docs", "This document as a page.", "text/html")},
            **(_admin_paths() if admin else {}),
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _in_path(name: str) -> dict[str, Any]:
    schema = {"type": "string"}
    return {"parameters": [{"name": name, "in": "path", "required": True, "schema": schema}]}


def _admin_paths() -> dict[str, Any]:
    path = "/admin/models/{name}"
    every = _get("statuses", "Every model's state.", _ref("ModelStatusList"))
    one = _get("status", "One model's state.", _ref("ModelStatus")) | _in_path("name")
    orders: dict[str, Any] = {}
    for verb, summary, order in _ORDERS:
        operation = _call(verb, summary, order.__name__, "ModelStatus") | _in_path("name")
        operation["requestBody"]["required"] = False
        operation["responses"] |= _failures("409")
        orders[f"{path}/{verb}"] = {"post": operation}
    return {"/admin/models": {"get": every}, path: {"get": one}, **orders}


def _narrow(schemas: dict[str, Any], limits: Limits, models: Sequence[str]) -> None:
    """Write the deployment's own models and bounds into the request schemas."""
    chat = schemas["ChatCompletionRequest"]["properties"]
    completion = schemas["CompletionRequest"]["properties"]
    for properties in (chat, completion):
        properties["model"] = {"type": "string", "enum": list(models)}
        _bound(properties["n"], "integer", "maximum", limits.choices)
        _bound(properties["stop"], "array", "maxItems", limits.stop_strings)
        if limits.output_tokens is not None:
            _bound(properties["max_tokens"], "integer", "maximum", limits.output_tokens)
    for _, _, request, _ in _POOLING:
        schemas[request.__name__]["properties"]["model"] = {"type": "string", "enum": list(models)}
    _bound(chat["top_logprobs"], "integer", "maximum", limits.logprobs)
    _bound(completion["logprobs"], "integer", "maximum", limits.logprobs)


def _bound(schema: dict[str, Any], kind: str, name: str, value: int) -> None:
    for alternative in schema["anyOf"]:
        if alternative.get("type") == kind:
            alternative[name] = value


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": _REF.format(name=name)}


def _failures(*statuses: str) -> dict[str, Any]:
    return {
        status: {
            "description": _FAILURES[status],
            "content": {"application/json": {"schema": _ref("ErrorBody")}},
        }
        for status in statuses or _FAILURES.keys() - {"409"}
    }


def _security(*, key: bool) -> dict[str, Any]:
    """A key, or none: an open server needs none."""
    return {"security": [{"key": []}, {}]} if key else {}


def _generation(name: str, summary: str, request: str, answer: str, event: str) -> dict[str, Any]:
    return {
        "operationId": name,
        "summary": summary,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ref(request)}},
        },
        "responses": {
            "200": {
                "description": "The answer; with `stream`, server-sent events of chunks, ended by "
                "`data: [DONE]`, or by an event with an `error`.",
                "content": {
                    "application/json": {"schema": _ref(answer)},
                    # OpenAPI 3.1 cannot say "a sequence of"; the event's own schema is beside it.
                    "text/event-stream": {"schema": {}, "x-event": _ref(event)},
                },
            },
            **_failures(),
        },
        **_security(key=True),
    }


def _call(name: str, summary: str, request: str, answer: str) -> dict[str, Any]:
    """An operation that answers at once."""
    content = {"application/json": {"schema": _ref(request)}}
    return {
        "operationId": name,
        "summary": summary,
        "requestBody": {"required": True, "content": content},
        "responses": {
            "200": {
                "description": "The answer.",
                "content": {"application/json": {"schema": _ref(answer)}},
            },
            **_failures(),
        },
        **_security(key=True),
    }


def _get(name: str, summary: str, schema: dict[str, Any], *, key: bool = True) -> dict[str, Any]:
    return {
        "operationId": name,
        "summary": summary,
        "responses": {
            "200": {"description": "Found.", "content": {"application/json": {"schema": schema}}},
            **_failures("400", "401", "403", "404", "405", "500", "503"),
        },
        **_security(key=key),
    }


def _text(name: str, summary: str, kind: str) -> dict[str, Any]:
    return {
        "operationId": name,
        "summary": summary,
        "responses": {
            "200": {"description": "Found.", "content": {kind: {"schema": {"type": "string"}}}},
            **_failures("405", "500"),
        },
    }
