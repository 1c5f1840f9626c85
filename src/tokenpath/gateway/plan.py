"""What every front door makes of a request: the same plan, so that one flow runs them all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from tokenpath.config.spec import Limits
from tokenpath.gateway.execute import Output
from tokenpath.models.dialects.reader import AnswerReader
from tokenpath.protocol.events import Finish, TokenLogprob, Usage
from tokenpath.protocol.request import SamplingParams
from tokenpath.router.served import ServedModel

THREAD_CHARACTERS = 8_192
"""Texts from this size on are tokenized in a thread: a millisecond or more of work."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One API call, ready to run: its prompts as tokens and each one's parameters."""

    model: ServedModel
    prompts: list[list[int]]
    params: list[SamplingParams]
    """One a prompt: those of its first choice."""
    n: int = 1
    """Choices of each prompt; choice i of prompt p is sequence ``p * n + i``."""
    priority: int = 0
    stream: bool = False
    include_usage: bool = False
    echo: list[str] | None = None
    """Per prompt, the text to put before the output."""
    reader: Callable[[], AnswerReader] | None = None
    """Makes what finds tool calls and reasoning in one sequence's text; None: it is all text."""
    call_named: bool = False
    """Whether the request named the tool to call, which changes the finish reason."""

    @property
    def sequences(self) -> int:
        return len(self.prompts) * self.n

    @property
    def prompt_tokens(self) -> int:
        """As OpenAI counts: each prompt once, whatever ``n``."""
        return sum(len(prompt) for prompt in self.prompts)

    def usage(self, reported: Sequence[Usage | None], output: Usage) -> Usage:
        """The call's token counts, of its sequences' own as far as the replica has reported them.

        Of a prompt's tokens those count as cached that every choice of it found cached, which is
        what was there before the call.
        """
        cached: int | None = 0
        for prompt in range(len(self.prompts)):
            of_prompt = reported[prompt * self.n : (prompt + 1) * self.n]
            counts = [None if usage is None else usage.cached_prompt_tokens for usage in of_prompt]
            known = [count for count in counts if count is not None]
            cached = None if cached is None or len(known) < len(counts) else cached + min(known)
        return Usage(
            prompt_tokens=self.prompt_tokens,
            cached_prompt_tokens=cached,
            completion_tokens=output.completion_tokens,
            estimated=output.estimated,
        )


@dataclass(slots=True)
class Whole:
    """Everything one sequence produced, for an answer that is not streamed."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    _pieces: list[str] = field(default_factory=list)

    def add(self, output: Output) -> None:
        """Append an output; the last one completes ``text``."""
        self._pieces.append(output.text)
        self.token_ids.extend(output.token_ids)
        self.logprobs.extend(output.logprobs)
        if output.finish is not None:
            self.finish = output.finish
            self.text = "".join(self._pieces)


class StreamWriter(Protocol):
    """Writes one streamed answer's events; knows what was already sent."""

    def chunk(self, output: Output) -> bytes:
        """The events of one output; empty if it shows the client nothing."""
        ...

    def closing(self, usage: Usage) -> bytes:
        """The events after the last output."""
        ...


Request = TypeVar("Request")


class Door(Protocol[Request]):
    """One API: how its requests become plans, and outputs its answers."""

    @property
    def endpoint(self) -> str:
        """The route."""
        ...

    def decode(self, body: bytes) -> Request:
        """Raises ``InvalidRequestError``."""
        ...

    def model_name(self, request: Request) -> str: ...

    def check(self, request: Request, limits: Limits) -> None:
        """Everything that needs no tokens. Raises ``InvalidRequestError`` and its kinds."""
        ...

    async def plan(self, request: Request, model: ServedModel, limits: Limits) -> Plan:
        """Render, tokenize and size. Raises ``InvalidRequestError`` and its kinds."""
        ...

    def writer(self, plan: Plan, created: int) -> StreamWriter: ...

    def answer(self, plan: Plan, wholes: Sequence[Whole], usage: Usage, created: int) -> bytes:
        """The JSON body of an answer that is not streamed."""
        ...


async def off_loop(characters: int, work: Callable[[], Result]) -> Result:
    """Run tokenization of so many characters: at once if short, else in a thread."""
    if characters < THREAD_CHARACTERS:
        return work()
    return await asyncio.to_thread(work)
