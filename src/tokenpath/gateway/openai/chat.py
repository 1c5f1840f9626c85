"""``/v1/chat/completions``: messages become a prompt by the model's template, outputs deltas."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokenpath.config.spec import Limits
from tokenpath.gateway.execute import Output
from tokenpath.gateway.limits import (
    check_limits,
    check_logprobs,
    check_supported,
    output_budget,
    sampling_params,
)
from tokenpath.gateway.openai.answers import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    chat_logprobs,
    ending,
    usage_object,
)
from tokenpath.gateway.openai.errors import decode
from tokenpath.gateway.openai.schema import ChatCompletionRequest, Message
from tokenpath.gateway.openai.stream import Frame
from tokenpath.gateway.openai.structured import grammar_of
from tokenpath.gateway.plan import Plan, Whole, off_loop
from tokenpath.protocol.errors import InvalidRequestError, UnsupportedError
from tokenpath.protocol.events import Usage
from tokenpath.router.served import ServedModel

_decoder = msgspec.json.Decoder(ChatCompletionRequest)
_encode = msgspec.json.encode


class ChatDoor:
    """The chat API."""

    endpoint = "/v1/chat/completions"

    def decode(self, body: bytes) -> ChatCompletionRequest:
        return decode(_decoder, body)

    def model_name(self, request: ChatCompletionRequest) -> str:
        return request.model

    def check(self, request: ChatCompletionRequest, limits: Limits) -> None:
        check_supported(request)
        check_limits(request, limits)
        check_logprobs(request.top_logprobs, "top_logprobs", limits)
        grammar_of(request, limits)
        if request.top_logprobs is not None and not request.logprobs:
            raise InvalidRequestError(
                "Field 'top_logprobs' needs 'logprobs': true.", param="top_logprobs"
            )

    async def plan(
        self, request: ChatCompletionRequest, model: ServedModel, limits: Limits
    ) -> Plan:
        template = model.template
        if template is None:
            raise InvalidRequestError(
                f"Model '{model.name}' has no chat template, so it cannot chat: use "
                "/v1/completions, or name a 'chat_template' for it in the spec.",
                param="model",
            )
        messages = [
            template_message(message, f"messages[{place}]")
            for place, message in enumerate(request.messages)
        ]
        size = sum(len(message["content"]) for message in messages)

        def tokenize() -> list[int]:
            text = template.render(messages, add_generation_prompt=True)
            return model.tokenizer.encode(text, add_special=False)

        prompt = await off_loop(size, tokenize)
        card = model.card
        asked = request.max_completion_tokens or request.max_tokens
        budget = output_budget(asked, None, len(prompt), card=card, limits=limits, param="messages")
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        params = sampling_params(
            request,
            card,
            logprobs=logprobs,
            max_tokens=budget,
            grammar=grammar_of(request, limits),
        )
        return Plan(
            model=model,
            prompts=[prompt],
            params=[params],
            n=request.n or 1,
            priority=request.priority or 0,
            stream=bool(request.stream),
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
        )

    def writer(self, plan: Plan, created: int) -> ChatWriter:
        return ChatWriter(plan, created)

    def answer(self, plan: Plan, wholes: Sequence[Whole], usage: Usage, created: int) -> bytes:
        with_logprobs = plan.params[0].logprobs is not None
        choices = [
            ChatChoice(
                index=index,
                message=AssistantMessage(role="assistant", content=whole.text),
                logprobs=chat_logprobs(whole.logprobs) if with_logprobs else None,
                finish_reason=ending(whole.finish),
            )
            for index, whole in enumerate(wholes)
        ]
        return _encode(
            ChatCompletion(
                id=new_id(),
                object="chat.completion",
                created=created,
                model=plan.model.name,
                choices=choices,
                usage=usage_object(usage),
            )
        )


class ChatWriter:
    """Chunks of one streamed chat answer: each choice's role, then its text, then its end."""

    def __init__(self, plan: Plan, created: int) -> None:
        self._frame = Frame(
            call_id=new_id(),
            kind="chat.completion.chunk",
            created=created,
            model=plan.model.name,
            include_usage=plan.include_usage,
        )
        self._introduced: set[int] = set()

    def chunk(self, output: Output) -> bytes:
        index = b'{"index":%d,"delta":' % output.sequence
        events = b""
        if not (output.text or output.logprobs or output.finish):
            return events
        if output.sequence not in self._introduced:
            self._introduced.add(output.sequence)
            events += self._frame.event(
                index + b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
            )
        if output.text or output.logprobs:
            logprobs = _encode(chat_logprobs(output.logprobs)) if output.logprobs else b"null"
            events += self._frame.event(
                b'%b{"content":%b},"logprobs":%b,"finish_reason":null}'
                % (index, _encode(output.text), logprobs)
            )
        if output.finish is not None:
            events += self._frame.event(
                b'%b{},"logprobs":null,"finish_reason":"%b"}'
                % (index, ending(output.finish).encode())
            )
        return events

    def closing(self, usage: Usage) -> bytes:
        return self._frame.closing(usage)


def new_id() -> str:
    """A unique id of a chat answer."""
    return f"chatcmpl-{uuid.uuid4().hex}"


def template_message(message: Message, param: str) -> Mapping[str, Any]:
    """A message as templates read it: plain text content, and ``developer`` as ``system``.

    Raises ``InvalidRequestError`` or ``UnsupportedError`` with ``param`` as the place.
    """
    form: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message, param),
    }
    if message.name is not None:
        form["name"] = message.name
    if message.tool_calls:
        form["tool_calls"] = [msgspec.to_builtins(tool_call) for tool_call in message.tool_calls]
    if message.tool_call_id is not None:
        form["tool_call_id"] = message.tool_call_id
    return form


def _text(message: Message, param: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant" and message.tool_calls:
            return ""
        raise InvalidRequestError(
            f"Field '{param}.content' is required for role '{message.role}'.",
            param=f"{param}.content",
        )
    if not content:
        raise InvalidRequestError(
            f"Field '{param}.content' is an empty list; it needs at least one text part.",
            param=f"{param}.content",
        )
    for place, part in enumerate(content):
        where = f"{param}.content[{place}]"
        if part.type != "text":
            raise UnsupportedError(
                f"Field '{where}.type' is not 'text', the only type of part that is implemented.",
                param=f"{where}.type",
            )
        if part.text is None:
            raise InvalidRequestError(f"Field '{where}.text' is required.", param=f"{where}.text")
    return "\n".join(part.text or "" for part in content)
