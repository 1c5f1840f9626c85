"""``/v1/completions``: raw prompts, as texts or token ids, one or many, continued by the model."""

from __future__ import annotations

import codecs
import uuid
from collections.abc import Sequence

import msgspec

from tokenpath.config.spec import Limits
from tokenpath.gateway.execute import Output
from tokenpath.gateway.limits import (
    check_limits,
    check_logprobs,
    check_supported,
    check_token_ids,
    output_budget,
    sampling_params,
)
from tokenpath.gateway.openai.answers import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    ending,
    finite,
    usage_object,
)
from tokenpath.gateway.openai.errors import decode
from tokenpath.gateway.openai.schema import CompletionRequest
from tokenpath.gateway.openai.stream import Frame
from tokenpath.gateway.openai.structured import grammar_of
from tokenpath.gateway.plan import Plan, Whole, off_loop
from tokenpath.protocol.errors import InvalidRequestError, UnsupportedError
from tokenpath.protocol.events import TokenLogprob, Usage
from tokenpath.router.served import ServedModel

DEFAULT_OUTPUT_TOKENS = 16
"""OpenAI's, for this API only."""

_decoder = msgspec.json.Decoder(CompletionRequest)
_encode = msgspec.json.encode


class CompletionDoor:
    """The completions API."""

    endpoint = "/v1/completions"

    def decode(self, body: bytes) -> CompletionRequest:
        return decode(_decoder, body)

    def model_name(self, request: CompletionRequest) -> str:
        return request.model

    def check(self, request: CompletionRequest, limits: Limits) -> None:
        check_supported(request)
        check_limits(request, limits)
        check_logprobs(request.logprobs, "logprobs", limits)
        grammar_of(request, limits)
        if request.echo and request.logprobs is not None:
            raise UnsupportedError(
                "Field 'echo' together with 'logprobs' is not implemented: the prompt's own "
                "logprobs are not computed.",
                param="echo",
            )
        sequences = len(_prompts(request.prompt)) * (request.n or 1)
        most = max(limits.choices, limits.queued_requests)
        if sequences > most:
            raise InvalidRequestError(
                f"The prompts times 'n' are {sequences} sequences; this server allows {most} in "
                "one call.",
                param="prompt",
            )

    async def plan(self, request: CompletionRequest, model: ServedModel, limits: Limits) -> Plan:
        card = model.card
        given = _prompts(request.prompt)
        for prompt in given:
            if not isinstance(prompt, str):
                check_token_ids(prompt, card, "prompt")

        def tokenize() -> list[list[int]]:
            encode = model.tokenizer.encode
            return [
                encode(prompt, add_special=True) if isinstance(prompt, str) else prompt
                for prompt in given
            ]

        size = sum(len(prompt) for prompt in given if isinstance(prompt, str))
        prompts = await off_loop(size, tokenize)
        grammar = grammar_of(request, limits)
        params = [
            sampling_params(
                request,
                card,
                logprobs=request.logprobs,
                max_tokens=output_budget(
                    request.max_tokens,
                    DEFAULT_OUTPUT_TOKENS,
                    len(prompt),
                    card=card,
                    limits=limits,
                    param="prompt",
                ),
                grammar=grammar,
            )
            for prompt in prompts
        ]
        echo = None
        if request.echo:
            decode_ids = model.tokenizer.decode
            echo = [prompt if isinstance(prompt, str) else decode_ids(prompt) for prompt in given]
        return Plan(
            model=model,
            prompts=prompts,
            params=params,
            n=request.n or 1,
            priority=request.priority or 0,
            stream=bool(request.stream),
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
            echo=echo,
        )

    def writer(self, plan: Plan, created: int) -> CompletionWriter:
        return CompletionWriter(plan, created)

    def answer(self, plan: Plan, wholes: Sequence[Whole], usage: Usage, created: int) -> bytes:
        with_logprobs = plan.params[0].logprobs is not None
        choices = []
        for index, whole in enumerate(wholes):
            text = whole.text if plan.echo is None else plan.echo[index // plan.n] + whole.text
            logprobs = LogprobWriter().write(whole.logprobs) if with_logprobs else None
            choices.append(CompletionChoice(text, index, logprobs, ending(whole.finish)))
        return _encode(
            Completion(
                id=new_id(),
                object="text_completion",
                created=created,
                model=plan.model.name,
                choices=choices,
                usage=usage_object(usage),
            )
        )


class CompletionWriter:
    """Chunks of one streamed answer: with echo, each choice's prompt first."""

    def __init__(self, plan: Plan, created: int) -> None:
        self._frame = Frame(
            call_id=new_id(),
            kind="text_completion",
            created=created,
            model=plan.model.name,
            include_usage=plan.include_usage,
        )
        self._echo = (
            {}
            if plan.echo is None
            else {index: plan.echo[index // plan.n] for index in range(plan.sequences)}
        )
        self._logprobs = (
            None
            if plan.params[0].logprobs is None
            else [LogprobWriter() for _ in range(plan.sequences)]
        )

    def chunk(self, output: Output) -> bytes:
        text = self._echo.pop(output.sequence, "") + output.text
        if not (text or output.logprobs or output.finish):
            return b""
        logprobs = b"null"
        if self._logprobs is not None and output.logprobs:
            logprobs = _encode(self._logprobs[output.sequence].write(output.logprobs))
        end = b'"%b"' % ending(output.finish).encode() if output.finish is not None else b"null"
        return self._frame.event(
            b'{"text":%b,"index":%d,"logprobs":%b,"finish_reason":%b}'
            % (_encode(text), output.sequence, logprobs, end)
        )

    def closing(self, usage: Usage) -> bytes:
        return self._frame.closing(usage)


class LogprobWriter:
    """Logprobs in the completions API's form, with each token's place in one choice's text."""

    def __init__(self) -> None:
        self._text = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._characters = 0

    def write(self, logprobs: Sequence[TokenLogprob]) -> CompletionLogprobs:
        """The next tokens. A token that begins inside a character has that character's place."""
        offsets = []
        for at in logprobs:
            offsets.append(self._characters)
            self._characters += len(self._text.decode(at.token_bytes))
        return CompletionLogprobs(
            tokens=[_name(at.token, at.token_bytes) for at in logprobs],
            token_logprobs=[finite(at.logprob) for at in logprobs],
            top_logprobs=[
                {_name(text, raw): finite(logprob) for _, logprob, text, raw in at.top}
                for at in logprobs
            ],
            text_offset=offsets,
        )


def _name(text: str, raw: bytes) -> str:
    r"""A token's text, or OpenAI's ``bytes:\xe2\x80`` where its bytes are no whole character.

    Two such tokens would else have the same name.
    """
    if "\ufffd" not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def new_id() -> str:
    """A unique id of an answer."""
    return f"cmpl-{uuid.uuid4().hex}"


def _prompts(given: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The prompts, whatever form they came in. Raises ``InvalidRequestError`` for a mixture."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequestError(
            "Field 'prompt' is an empty list; it needs at least one prompt or token.",
            param="prompt",
        )
    numbers = [item for item in given if isinstance(item, int)]
    if not numbers:
        return [item for item in given if not isinstance(item, int)]
    if len(numbers) < len(given):
        raise InvalidRequestError(
            "Field 'prompt' mixes token ids with prompts; give one or the other.", param="prompt"
        )
    return [numbers]
