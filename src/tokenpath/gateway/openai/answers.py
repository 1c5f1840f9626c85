"""Answers of OpenAI's API as structs: what is encoded, and what the OpenAPI page describes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from tokenpath.protocol.events import Finish, FinishReason, TokenLogprob, Usage
from tokenpath.protocol.replica import ReplicaState, Task

IMPOSSIBLE = -9999.0

Ending = Literal["stop", "length"]
ChatEnding = Literal["stop", "length", "tool_calls"]


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    """Prompt tokens whose KV was reused."""


class CompletionDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int
    """Tokens of the reasoning, with the mark that ends it; part of the completion tokens."""


class UsageObject(msgspec.Struct, frozen=True, omit_defaults=True):
    """Token counts of a call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = None
    """Absent where the backend did not report it."""
    completion_tokens_details: CompletionDetails | None = None
    """Present where the model marks its reasoning and the tokens can be told apart."""


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the likeliest tokens at a place."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    """The chosen token at a place, and the likeliest ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str
    """A JSON object as text, as the model wrote it."""


class AnsweredToolCall(msgspec.Struct, frozen=True):
    """A call that the model makes."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(msgspec.Struct, frozen=True):
    role: Literal["assistant"]
    content: str | None
    """Null where the answer is tool calls or reasoning alone."""
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    """The reasoning before the answer."""
    tool_calls: list[AnsweredToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatEnding


class ChatCompletion(msgspec.Struct, frozen=True):
    """Answer of ``POST /v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageObject


class FunctionDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str | None = None
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """A new call (with id and name), or more of the arguments of call ``index``."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta | None = None


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatEnding | None


class ChatCompletionChunk(msgspec.Struct, frozen=True):
    """One event of a streamed answer of ``POST /v1/chat/completions``."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageObject | None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Parallel lists, one entry a token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]
    """Where in ``text`` each token begins, in characters."""


class CompletionChoice(msgspec.Struct, frozen=True):
    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: Ending | None


class Completion(msgspec.Struct, frozen=True):
    """Answer of ``POST /v1/completions``, and with ``usage`` null one event of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageObject | None


class ModelObject(msgspec.Struct, frozen=True):
    """One served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    """Most tokens of prompt and output together; null while loading. vLLM's name."""
    task: Task
    """What it is served for, which says which endpoints it answers."""
    dimensions: int | None
    """Width of its embeddings; null if it makes none, and while loading."""
    state: ReplicaState
    """Of its replica that is closest to answering."""


class ModelList(msgspec.Struct, frozen=True):
    object: Literal["list"]
    data: list[ModelObject]


def finite(logprob: float) -> float:
    """A logprob that JSON can hold: OpenAI writes -9999 for what is impossible."""
    return max(logprob, IMPOSSIBLE)


def usage_object(usage: Usage, reasoning_tokens: int | None = None) -> UsageObject:
    """The counts in OpenAI's form; ``reasoning_tokens`` where they are known."""
    prompt = usage.prompt_tokens or 0
    completion = usage.completion_tokens or 0
    cached = usage.cached_prompt_tokens
    return UsageObject(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=None if cached is None else PromptDetails(cached),
        completion_tokens_details=(
            None if reasoning_tokens is None else CompletionDetails(reasoning_tokens)
        ),
    )


def ending(finish: Finish | None) -> Ending:
    """The finish reason of a sequence that ended well."""
    return "length" if finish is not None and finish.reason is FinishReason.LENGTH else "stop"


def chat_logprobs(logprobs: Iterable[TokenLogprob]) -> ChatLogprobs:
    """Logprobs in the chat API's form."""
    return ChatLogprobs(
        [
            ChatLogprob(
                token=at.token,
                logprob=finite(at.logprob),
                bytes=list(at.token_bytes),
                top_logprobs=[
                    TopLogprob(token=text, logprob=finite(logprob), bytes=list(raw))
                    for _, logprob, text, raw in at.top
                ],
            )
            for at in logprobs
        ]
    )
