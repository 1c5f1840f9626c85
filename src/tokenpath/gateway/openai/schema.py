"""Request bodies of OpenAI's API as structs: decoded and validated in one pass.

Fixed bounds are here and so in the OpenAPI page; bounds of the spec or the model are checked in
``gateway.limits``. Names are OpenAI's, and vLLM's for what OpenAI lacks. ``null`` means absent.
Fields that would change the output but are not implemented are declared with ``_only``: they are
refused unless their value asks for nothing. Every other unknown field is ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tokenpath.gateway.openai.structured import (
    Choices,
    JsonSchema,
    Pattern,
    ResponseFormat,
    StructuredOutputs,
)

SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1

Role = Literal["system", "developer", "user", "assistant", "tool"]
ROLES: tuple[str, ...] = ("system", "developer", "user", "assistant", "tool")

Positive = Annotated[int, Meta(ge=1, le=INT32_MAX)]
Count = Annotated[int, Meta(ge=0, le=INT32_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
NonEmpty = Annotated[str, Meta(min_length=1)]


def _only(*values: Any) -> Meta:
    """A field that is not implemented, and the values of it that ask for nothing."""
    return Meta(extra_json_schema={"enum": list(values)}, extra={"accepted": values})


Absent = Annotated[Any, _only(None)]
AbsentOrFalse = Annotated[Any, _only(None, False)]
AbsentOrTrue = Annotated[Any, _only(None, True)]
AbsentOrEmpty = Annotated[Any, _only(None, [])]
# ``typing`` would take this for ``AbsentOrTrue`` if the values came in the same order.
AbsentOrOne = Annotated[Any, _only(1, None)]
AbsentOrUnused = Annotated[Any, _only(None, "none", "auto")]


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    """Send the token counts in a last chunk."""


class TextPart(msgspec.Struct, frozen=True):
    """One part of a message's content."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["text"]})]
    text: str | None = None


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the assistant made earlier in the conversation."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class Message(msgspec.Struct, frozen=True):
    """One message of the conversation."""

    role: Role
    content: str | list[TextPart] | None = None
    """Text, or a list of text parts. An assistant that called tools and a tool may have none."""
    reasoning_content: str | None = None
    """What an assistant thought before it answered; templates decide what becomes of it."""
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class FunctionTool(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    name: str
    """Letters, digits, ``_`` and ``-``, 64 at most."""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of an object."""
    strict: bool | None = None
    """Hold the arguments to the schema."""


class Tool(msgspec.Struct, frozen=True):
    """A tool that the model may use."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["function"]})]
    function: FunctionTool | None = None


class NamedFunction(msgspec.Struct, frozen=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True):
    """The one tool that must be called."""

    function: NamedFunction
    type: Literal["function"] = "function"


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """What both calls share."""

    model: NonEmpty
    n: Positive | None = None
    """Choices to generate. With a seed, choice i uses seed + i."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Positive | None = None
    """Most tokens to generate for each choice."""
    min_tokens: Count | None = None
    """Tokens before which no end is possible."""
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    """0 takes the likeliest token every time. Default 1."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    """Keep the k likeliest tokens; 0 and -1 keep all."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    seed: Annotated[int, Meta(ge=SEED_MIN, le=SEED_MAX)] | None = None
    stop: NonEmpty | list[NonEmpty] | None = None
    """Strings that end the output; they are not part of it."""
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, Bias] | None = None
    """Token id to bias."""
    priority: Annotated[int, Meta(ge=INT32_MIN, le=INT32_MAX)] | None = None
    """Lower runs first. Default 0."""
    user: str | None = None
    response_format: ResponseFormat | None = None
    """What the output must be: free text, any JSON object, or JSON of a schema."""
    structured_outputs: StructuredOutputs | None = None
    """What the output must be, in vLLM's form."""
    guided_json: JsonSchema | str | None = None
    """As ``structured_outputs.json``: vLLM's older name, as are the three below."""
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Pattern | None = None

    use_beam_search: AbsentOrFalse = None
    best_of: AbsentOrOne = None
    length_penalty: AbsentOrOne = None
    bad_words: AbsentOrEmpty = None
    allowed_token_ids: Absent = None
    prompt_logprobs: Absent = None
    truncate_prompt_tokens: Absent = None
    include_stop_str_in_output: AbsentOrFalse = None
    skip_special_tokens: AbsentOrTrue = None
    guided_whitespace_pattern: Absent = None
    logits_processors: AbsentOrEmpty = None


class ChatCompletionRequest(Sampling, frozen=True, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    """OpenAI's newer name of ``max_tokens``; it wins if both are given."""
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    """Likeliest tokens to report at each place; needs ``logprobs``."""

    tools: list[Tool] | None = None
    """Tools that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """Whether it may, must not or must call one, or the one it must call. Default ``auto``."""
    parallel_tool_calls: bool | None = None
    """Whether it may call several in one answer. Default true."""
    functions: AbsentOrEmpty = None
    function_call: AbsentOrUnused = None
    modalities: Annotated[Any, _only(None, ["text"])] = None
    audio: Absent = None
    web_search_options: Absent = None
    reasoning_effort: Absent = None
    verbosity: Absent = None
    add_generation_prompt: AbsentOrTrue = None
    continue_final_message: AbsentOrFalse = None
    chat_template: Absent = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Switches of the model's chat template, such as ``enable_thinking``."""
    documents: AbsentOrEmpty = None
    echo: AbsentOrFalse = None


class CompletionRequest(Sampling, frozen=True, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[str | TokenId | list[TokenId]]
    """A text, a list of texts, token ids, or a list of lists of token ids."""
    echo: bool | None = None
    """Put the prompt before the output."""
    logprobs: Count | None = None
    """Report each token's logprob, and this many of the likeliest at its place."""

    suffix: Annotated[Any, _only(None, "")] = None
    tools: AbsentOrEmpty = None
    tool_choice: AbsentOrUnused = None


def _accepted(body: type[msgspec.Struct]) -> dict[str, tuple[Any, ...]]:
    described = msgspec.inspect.type_info(body)
    assert isinstance(described, msgspec.inspect.StructType)
    return {
        field.name: field.type.extra["accepted"]
        for field in described.fields
        if isinstance(field.type, msgspec.inspect.Metadata) and field.type.extra
    }


NOT_IMPLEMENTED: dict[type, dict[str, tuple[Any, ...]]] = {
    body: _accepted(body) for body in (ChatCompletionRequest, CompletionRequest)
}
"""Per body: the fields that are not implemented, each with the values that ask for nothing."""
