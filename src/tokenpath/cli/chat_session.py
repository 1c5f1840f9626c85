"""A conversation with a served model: what was said, how to ask on, and what it took.

Knows nothing of terminals, so that ``chat`` can be about nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import httpx
import msgspec

from tokenpath.bench import wire
from tokenpath.bench.client import Endpoint
from tokenpath.bench.sse import EventSplitter
from tokenpath.protocol.errors import (
    AuthenticationError,
    EngineError,
    ErrorInfo,
    InvalidRequestError,
    ModelNotFoundError,
    TokenpathError,
    UnavailableError,
    from_info,
)

_CONNECT_TIMEOUT_S = 10.0
_CONTROLS = {c: None for c in (*range(0x20), *range(0x7F, 0xA0)) if chr(c) not in "\n\t"}


def printable(text: str) -> str:
    """Return text without control characters: a model must not steer the terminal."""
    return text.translate(_CONTROLS)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer and its figures; None is unknown."""

    text: str
    stopped: bool
    """By the user, before its end."""
    ttft_s: float | None
    """From sending until the first text."""
    tokens_per_s: float | None
    """After the first token."""
    usage: wire.Usage


@dataclass(slots=True)
class Totals:
    """Sums over the answers whose tokens the server reported."""

    answers: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    unreported: int = 0


@dataclass(slots=True)
class Sampling:
    """What is asked of every answer; None leaves it to the server."""

    temperature: float | None = None
    max_tokens: int | None = None


@dataclass(slots=True)
class Session:
    """A conversation at one endpoint. Close it after use."""

    endpoint: Endpoint
    model: str
    http: httpx.Client
    system: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    turns: list[dict[str, str]] = field(default_factory=list)
    """User and assistant messages so far, as the API has them."""
    last: Answer | None = None
    totals: Totals = field(default_factory=Totals)
    clock: Callable[[], float] = time.perf_counter

    @classmethod
    def open(cls, url: str, model: str | None, api_key: str | None = None) -> Self:
        """Connect to a server and choose ``model``, or the first it lists.

        Raises ``UnavailableError`` with the way to start one when nothing listens, and what
        ``models`` raises.
        """
        endpoint = Endpoint.parse(url)
        headers = {"Accept-Encoding": "identity"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        # No limit on reading: a first token may take long on a small machine.
        timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
        session = cls(endpoint, "", httpx.Client(headers=headers, timeout=timeout))
        try:
            session.choose(model)
        except BaseException:
            session.close()
            raise
        return session

    def close(self) -> None:
        """Close the connection."""
        self.http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def models(self) -> list[str]:
        """Ask which models are served. Raises ``TokenpathError``s."""
        with _transport_errors(self.endpoint):
            response = self.http.get(f"{self.endpoint.url}/models")
        if response.status_code != httpx.codes.OK:
            raise _refusal(response.status_code, response.content)
        try:
            return wire.model_ids(response.content)
        except msgspec.MsgspecError as error:
            raise UnavailableError(
                f"{self.endpoint.url}/models is not a list of models; is this an OpenAI-compatible "
                "API, and does its URL end in /v1?"
            ) from error

    def choose(self, model: str | None) -> None:
        """Take ``model``, or the first served. Raises ``ModelNotFoundError``."""
        served = self.models()
        if not served:
            raise ModelNotFoundError(f"the server at {self.endpoint.url} serves no model")
        if model is not None and model not in served:
            raise ModelNotFoundError(
                f"the server at {self.endpoint.url} does not serve {model!r}; it serves "
                f"{', '.join(served[:20])}"
            )
        self.model = served[0] if model is None else model

    def reset(self) -> None:
        """Forget what was said; the system text stays."""
        self.turns.clear()

    def messages(self) -> list[dict[str, str]]:
        """Return the conversation as the API has it."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.turns]

    def ask(self, text: str, write: Callable[[str], None]) -> Answer:
        """Send a message and ``write`` its answer piece by piece.

        A ``KeyboardInterrupt`` while it runs ends the answer, not the conversation: the connection
        is closed, upon which the server aborts. Whatever was answered becomes part of the
        conversation; of a message without answer, or with an error, nothing stays. Raises
        ``TokenpathError``s.
        """
        question = {"role": "user", "content": text}
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [*self.messages(), question],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.sampling.temperature is not None:
            body["temperature"] = self.sampling.temperature
        if self.sampling.max_tokens is not None:
            body["max_tokens"] = self.sampling.max_tokens
        said: list[str] = []
        usage = wire.Usage()
        sent_at = self.clock()
        first_at = last_at = None
        stopped = False
        try:
            for chunk in self._chunks(body):
                usage = chunk.usage or usage
                if chunk.text:
                    last_at = self.clock()
                    first_at = last_at if first_at is None else first_at
                    said.append(chunk.text)
                    write(chunk.text)
        except KeyboardInterrupt:
            stopped = True
        if said:
            self.turns += [question, {"role": "assistant", "content": "".join(said)}]
        rate = None
        if first_at is not None and last_at is not None and last_at > first_at:
            tokens = usage.completion_tokens
            rate = None if tokens is None else (tokens - 1) / (last_at - first_at)
        ttft = None if first_at is None else first_at - sent_at
        self.last = Answer("".join(said), stopped, ttft, rate, usage)
        self._count(usage)
        return self.last

    def _chunks(self, body: dict[str, Any]) -> Iterator[wire.Chunk]:
        splitter = EventSplitter()
        ended = False
        with (
            _transport_errors(self.endpoint),
            self.http.stream("POST", f"{self.endpoint.url}/chat/completions", json=body) as answer,
        ):
            if answer.status_code != httpx.codes.OK:
                raise _refusal(answer.status_code, answer.read())
            for data in answer.iter_raw():
                for event in splitter.feed(data):
                    if event == wire.DONE:
                        ended = True
                        continue
                    chunk = _decode(event)
                    ended = ended or chunk.finish_reason is not None
                    yield chunk
        if not ended:
            raise UnavailableError("the server ended the answer before it was complete")

    def _count(self, usage: wire.Usage) -> None:
        self.totals.answers += 1
        if usage.prompt_tokens is None or usage.completion_tokens is None:
            self.totals.unreported += 1
            return
        self.totals.prompt_tokens += usage.prompt_tokens
        self.totals.output_tokens += usage.completion_tokens


class _transport_errors:  # noqa: N801 - used as a context manager, like those of contextlib
    """Turns httpx's errors into sentences."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            raise UnavailableError(
                f"nothing answers at {self._endpoint.url} ({error}); start a server with: "
                "tokenpath serve"
            ) from error
        if isinstance(error, httpx.HTTPError):
            raise UnavailableError(
                f"the connection to {self._endpoint.url} broke: {error or type(error).__name__}"
            ) from error


def _decode(event: bytes) -> wire.Chunk:
    try:
        chunk = wire.decode_chunk(event)
    except msgspec.MsgspecError as error:
        raise UnavailableError(f"the server sent an event that is no chunk: {error}") from error
    if isinstance(chunk.error, str):
        raise EngineError(chunk.error)
    if chunk.error is not None:
        raise _typed(chunk.error)
    return chunk


def _refusal(status: int, body: bytes) -> TokenpathError:
    error = wire.error_of(body)
    if status in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
        return AuthenticationError(
            f"{error.message or 'the server wants an API key'} (give the name of the environment "
            "variable that holds a valid key with --api-key-env)"
        )
    if "chat template" in error.message.lower():
        return InvalidRequestError(
            f"{error.message} (use a model that chats, for example: "
            "tokenpath serve --model qwen2.5-coder-1.5b)"
        )
    if not error.message:
        return UnavailableError(f"the server answered with status {status} and no explanation")
    return _typed(error)


def _typed(error: wire.ApiError) -> TokenpathError:
    return from_info(ErrorInfo(code=str(error.code), message=error.message))
