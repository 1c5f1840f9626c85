"""OpenAI's streaming API as a client sees it: request bodies out, chunks and errors in.

Only what a measurement needs is decoded; unknown fields are skipped without being built, which is
most of what keeps the client cheap.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from tokenpath.bench import workload
from tokenpath.bench.workload import PlannedRequest

DONE = b"[DONE]"
"""Data of the event that ends a stream."""


class Api(enum.StrEnum):
    """Which endpoint is driven."""

    CHAT = "chat"
    COMPLETIONS = "completions"

    @property
    def path(self) -> str:
        """Path below the base URL."""
        return "/chat/completions" if self is Api.CHAT else "/completions"


class PromptKind(enum.StrEnum):
    """What prompts are made of."""

    TOKENS = "tokens"
    """Token ids: exact lengths whatever the tokenizer. ``/v1/completions`` only."""
    WORDS = "words"
    """English words: about one token each; the server's usage says how many it was."""


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """The server's own count; None where it does not say, which is never zero."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptTokensDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the server took from its cache."""
        details = self.prompt_tokens_details
        return None if details is None else details.cached_tokens


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class ApiError(msgspec.Struct):
    """OpenAI's error object."""

    message: str = ""
    code: str | int | None = None
    type: str | None = None


class Chunk(msgspec.Struct):
    """One event of a stream."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: ApiError | str | None = None

    @property
    def carries_tokens(self) -> bool:
        """Whether it holds output; a chunk with only a role, a finish reason or usage does not."""
        for choice in self.choices:
            delta = choice.delta
            if choice.text or choice.token_ids:
                return True
            if delta is not None and (
                delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls
            ):
                return True
        return False

    @property
    def text(self) -> str:
        """The answer's text in this chunk, without reasoning."""
        return "".join(
            (choice.text or "") + ((choice.delta and choice.delta.content) or "")
            for choice in self.choices
        )

    @property
    def finish_reason(self) -> str | None:
        """Why the (last) choice ended, when it did."""
        reasons = [choice.finish_reason for choice in self.choices if choice.finish_reason]
        return reasons[-1] if reasons else None


class _ErrorBody(msgspec.Struct):
    error: ApiError | str | None = None
    message: str | None = None
    detail: Any = None


class _ModelEntry(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_ModelEntry]


decode_chunk = msgspec.json.Decoder(Chunk).decode
"""Decode one event's data; raises ``msgspec.MsgspecError`` when it is not a chunk."""
_decode_error = msgspec.json.Decoder(_ErrorBody).decode
_decode_models = msgspec.json.Decoder(_ModelList).decode
_encode = msgspec.json.Encoder().encode


def model_ids(body: bytes) -> list[str]:
    """Read the body of ``GET /models``. Raises ``msgspec.MsgspecError``."""
    return [entry.id for entry in _decode_models(body).data]


def error_of(body: bytes) -> ApiError:
    """Make the best of an error response's body, whatever server wrote it."""
    try:
        parsed = _decode_error(body)
    except msgspec.MsgspecError:
        return ApiError(message=body[:200].decode(errors="replace").strip())
    if isinstance(parsed.error, ApiError):
        return parsed.error
    if isinstance(parsed.error, str):
        return ApiError(message=parsed.error)
    if parsed.message is not None:
        return ApiError(message=parsed.message)
    told = parsed.detail if isinstance(parsed.detail, str) else body.decode(errors="replace")
    return ApiError(message=told[:200].strip())


class RequestShape(msgspec.Struct, frozen=True, kw_only=True):
    """What every request of a run has in common."""

    api: Api
    model: str
    prompt_kind: PromptKind
    vocabulary: tuple[int, int]
    """Token ids are drawn from the first up to, not including, the second."""
    seed: int
    temperature: float | None
    ignore_eos: bool


def request_body(planned: PlannedRequest, shape: RequestShape) -> bytes:
    """Write the JSON body of one planned request."""
    fields: dict[str, Any] = {
        "model": shape.model,
        "max_tokens": planned.output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if shape.temperature is not None:
        fields["temperature"] = shape.temperature
    if shape.ignore_eos:
        fields["ignore_eos"] = True
    prompt = _prompt(planned, shape)
    if shape.api is Api.CHAT:
        fields["messages"] = [{"role": "user", "content": prompt}]
    else:
        fields["prompt"] = prompt
    return _encode(fields)


def _prompt(planned: PlannedRequest, shape: RequestShape) -> str | list[int]:
    if shape.prompt_kind is PromptKind.WORDS:
        symbols = workload.content(planned.segments, alphabet=len(workload.WORDS), seed=shape.seed)
        return workload.words(symbols)
    low, high = shape.vocabulary
    symbols = workload.content(planned.segments, alphabet=high - low, seed=shape.seed)
    ids: list[int] = (symbols + low).tolist()
    return ids
