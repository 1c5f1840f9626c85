"""``/v1/chat/completions``: messages become a prompt by the model's template, outputs deltas."""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final

import msgspec
from msgspec import UNSET

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
    AnsweredToolCall,
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatEnding,
    FunctionDelta,
    ToolCallDelta,
    chat_logprobs,
    ending,
    usage_object,
)
from tokenpath.gateway.openai.errors import decode
from tokenpath.gateway.openai.messages import template_messages
from tokenpath.gateway.openai.schema import ChatCompletionRequest, NamedTool
from tokenpath.gateway.openai.stream import Frame
from tokenpath.gateway.openai.structured import check_grammar, grammar_of
from tokenpath.gateway.openai.tools import (
    check_switches,
    check_tools,
    held_calls,
    offered_tools,
    template_tools,
)
from tokenpath.gateway.plan import Plan, Whole, off_loop
from tokenpath.models.dialects.detect import Dialect
from tokenpath.models.dialects.reader import AnswerReader, Event, Text, Thought, every_call
from tokenpath.models.dialects.shapes import Call
from tokenpath.protocol.errors import InvalidRequestError
from tokenpath.protocol.events import Finish, FinishReason, Usage
from tokenpath.router.served import ServedModel

_ID_CHARACTERS: Final = string.ascii_letters + string.digits

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
        grammar = grammar_of(request, limits)
        if request.top_logprobs is not None and not request.logprobs:
            raise InvalidRequestError(
                "Field 'top_logprobs' needs 'logprobs': true.", param="top_logprobs"
            )
        check_tools(request, grammar)

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
        dialect = model.dialect
        tools = offered_tools(request, model)
        shown = template_tools(request) if tools else None
        switches = check_switches(request, model)
        messages = template_messages(request.messages, text_arguments=dialect.text_arguments)
        size = sum(len(message["content"]) for message in messages)

        def tokenize() -> tuple[list[int], bool]:
            text = template.render(messages, add_generation_prompt=True, tools=shown, **switches)
            ids = model.tokenizer.encode(text, add_special=False)
            return ids, dialect.opens_thoughts(text)

        prompt, thinking = await off_loop(size, tokenize)
        card = model.card
        asked = request.max_completion_tokens or request.max_tokens
        budget = output_budget(asked, None, len(prompt), card=card, limits=limits, param="messages")
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        held = held_calls(request, dialect, tools, thinking=thinking)
        grammar = grammar_of(request, limits)
        if held is not None:
            grammar = held.grammar
            check_grammar(grammar, request, limits)
        params = sampling_params(
            request, card, logprobs=logprobs, max_tokens=budget, grammar=grammar
        )
        marks = (*dialect.thought_mark_ids, *(dialect.call_mark_ids if tools else ()))
        reader = None
        if tools or dialect.thoughts is not None:
            shapes = dialect.calls.shapes if tools and dialect.calls else ()
            reader = partial(
                AnswerReader,
                shapes=shapes if held is None else held.shapes,
                tools=frozenset(tool.name for tool in tools),
                thoughts=dialect.thoughts,
                thinking=thinking,
                parallel=request.parallel_tool_calls is not False,
                accepts=every_call if held is None else held.accepts,
            )
        return Plan(
            model=model,
            prompts=[prompt],
            params=[msgspec.structs.replace(params, shown_token_ids=marks)],
            n=request.n or 1,
            priority=request.priority or 0,
            stream=bool(request.stream),
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
            reader=reader,
            call_named=isinstance(request.tool_choice, NamedTool),
        )

    def writer(self, plan: Plan, created: int) -> ChatWriter:
        return ChatWriter(plan, created)

    def answer(self, plan: Plan, wholes: Sequence[Whole], usage: Usage, created: int) -> bytes:
        with_logprobs = plan.params[0].logprobs is not None
        voices = [_Voice(plan) for _ in wholes]
        choices = [
            ChatChoice(
                index=index,
                message=_message(plan, voice.say(whole.text, whole.token_ids, whole.finish)),
                logprobs=chat_logprobs(whole.logprobs) if with_logprobs else None,
                finish_reason=voice.ending(whole.finish),
            )
            for index, (voice, whole) in enumerate(zip(voices, wholes, strict=True))
        ]
        return _encode(
            ChatCompletion(
                id=new_id(),
                object="chat.completion",
                created=created,
                model=plan.model.name,
                choices=choices,
                usage=usage_object(usage, _reasoning_tokens(voices)),
            )
        )


class _Voice:
    """One choice's answer on its way out: what is text, what is thought, what is a call."""

    def __init__(self, plan: Plan) -> None:
        self._reader = None if plan.reader is None else plan.reader()
        self._called: ChatEnding = "stop" if plan.call_named else "tool_calls"
        self._thought_end_id = plan.model.dialect.thought_end_id
        self._tokens = 0
        self._ended = False
        """Whether the token that ends the thoughts has come."""
        self.introduced = False
        """Whether its role was sent."""
        self.calls = 0
        """Calls that were sent."""

    def say(self, text: str, token_ids: Sequence[int], finish: Finish | None) -> list[Event]:
        """What a piece of output means; the last one has a ``finish``."""
        if self._reader is None:
            return [Text(text)] if text else []
        self._count(token_ids)
        events = self._reader.push(text)
        return events if finish is None else events + self._reader.finish()

    def _count(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._ended:
                return
            self._tokens += 1
            self._ended = token_id == self._thought_end_id

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of the thoughts; None where that cannot be told."""
        if self._reader is None or self._thought_end_id is None:
            return None
        return self._tokens if self._reader.thought else 0

    def ending(self, finish: Finish | None) -> ChatEnding:
        """The finish reason."""
        stopped = finish is None or finish.reason is FinishReason.STOP
        called = self._reader is not None and self._reader.called
        return self._called if called and stopped else ending(finish)


def _reasoning_tokens(voices: Iterable[_Voice]) -> int | None:
    counts = [voice.reasoning_tokens for voice in voices]
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def _message(plan: Plan, events: Sequence[Event]) -> AssistantMessage:
    """A whole answer's message."""
    text = "".join(event.text for event in events if isinstance(event, Text))
    thoughts = "".join(event.text for event in events if isinstance(event, Thought))
    made = [
        AnsweredToolCall(
            new_call_id(plan.model.dialect), "function", CalledFunction(event.name, event.arguments)
        )
        for event in events
        if isinstance(event, Call)
    ]
    return AssistantMessage(
        role="assistant",
        content=text if text or not (made or thoughts) else None,
        reasoning_content=thoughts or UNSET,
        tool_calls=made or UNSET,
    )


class ChatWriter:
    """Chunks of one streamed chat answer: each choice's role, then what it says, then its end."""

    def __init__(self, plan: Plan, created: int) -> None:
        self._frame = Frame(
            call_id=new_id(),
            kind="chat.completion.chunk",
            created=created,
            model=plan.model.name,
            include_usage=plan.include_usage,
        )
        self._dialect = plan.model.dialect
        self._role = (
            b'{"role":"assistant","content":""}'
            if plan.reader is None
            else b'{"role":"assistant","content":null}'
        )
        self._voices = [_Voice(plan) for _ in range(plan.sequences)]

    def chunk(self, output: Output) -> bytes:
        if not (output.text or output.logprobs or output.finish):
            return b""
        voice = self._voices[output.sequence]
        deltas = [
            delta
            for event in voice.say(output.text, output.token_ids, output.finish)
            for delta in self._deltas(voice, event)
        ]
        chunks = []
        if not voice.introduced:
            voice.introduced = True
            chunks.append((self._role, b"null", b"null"))
        logprobs = _encode(chat_logprobs(output.logprobs)) if output.logprobs else b"null"
        if output.logprobs and not deltas:
            deltas = [b'{"content":""}']
        for delta in deltas:
            chunks.append((delta, logprobs, b"null"))
            logprobs = b"null"
        if output.finish is not None:
            chunks.append((b"{}", b"null", b'"%b"' % voice.ending(output.finish).encode()))
        return b"".join(
            self._frame.event(
                b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}'
                % (output.sequence, *chunk)
            )
            for chunk in chunks
        )

    def _deltas(self, voice: _Voice, event: Event) -> list[bytes]:
        if isinstance(event, Text):
            return [b'{"content":%b}' % _encode(event.text)]
        if isinstance(event, Thought):
            return [b'{"reasoning_content":%b}' % _encode(event.text)]
        index, voice.calls = voice.calls, voice.calls + 1
        begun = ToolCallDelta(
            index, new_call_id(self._dialect), "function", FunctionDelta(event.name, "")
        )
        more = ToolCallDelta(index, function=FunctionDelta(arguments=event.arguments))
        return [b'{"tool_calls":[%b]}' % _encode(delta) for delta in (begun, more)]

    def closing(self, usage: Usage) -> bytes:
        return self._frame.closing(usage, _reasoning_tokens(self._voices))


def new_call_id(dialect: Dialect) -> str:
    """An id of a tool call that the model's template takes back."""
    nine = dialect.calls is not None and dialect.calls.ids == "nine"
    characters = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9 if nine else 24))
    return characters if nine else f"call_{characters}"


def new_id() -> str:
    """A unique id of a chat answer."""
    return f"chatcmpl-{uuid.uuid4().hex}"
