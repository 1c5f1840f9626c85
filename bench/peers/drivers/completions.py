"""A thin HTTP front for an engine that has none: OpenAI's streamed completions, and nothing else.

It adds as little as it can to the engine's own cost. The engine is stepped in a process of its own,
because a step may hold Python's lock for as long as it computes; what all sequences got in a step
crosses in one message, and the event loop writes an event for each. It runs in a rival's
environment, so it is made of the standard library.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

MODEL = "model"
"""The one that is listed."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one sequence got in a step."""

    number: int
    text: str
    tokens: int
    finished: bool


class Engine(Protocol):
    """Generates for several sequences at once."""

    def add(self, number: int, prompt: list[int], output_tokens: int) -> None:
        """Begin a sequence: greedy, and of exactly so many tokens."""
        ...

    def step(self) -> Sequence[Delta]:
        """Advance all sequences."""
        ...


@dataclass(frozen=True, slots=True)
class _Job:
    number: int
    prompt: list[int]
    output_tokens: int


def serve(load: Callable[[], Engine], host: str, port: int) -> None:
    """Load the engine in a process of its own, and answer requests until a signal.

    ``load`` must be picklable. Raises ``EOFError`` when the engine's process is gone; what it died
    of is on stderr.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=_engine_process, args=(load, theirs), daemon=True).start()
    theirs.close()
    ours.recv()  # it is loaded
    asyncio.run(_serve(ours, host, port))


async def _serve(engine: Connection, host: str, port: int) -> None:
    gone = asyncio.get_running_loop().create_future()
    front = _Front(engine, gone)
    async with await asyncio.start_server(front.connection, host, port):
        await gone


class _Front:
    """The event loop's side: connections, and the answers that are being written."""

    def __init__(self, engine: Connection, gone: asyncio.Future[None]) -> None:
        self._engine = engine
        self._gone = gone
        self._numbers = itertools.count()
        self._answers: dict[int, _Answer] = {}
        asyncio.get_running_loop().add_reader(engine.fileno(), self._take)

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request after the other until the client goes away."""
        try:
            while True:
                await self._exchange(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # it has gone
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        method, path, _ = head.split(" ", 2)
        fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
        body = await reader.readexactly(int(fields.get("content-length", "0")))
        if (method, path) == ("GET", "/health"):
            writer.write(_whole("200 OK", {}))
        elif (method, path) == ("GET", "/v1/models"):
            writer.write(_whole("200 OK", {"object": "list", "data": [{"id": MODEL}]}))
        elif (method, path) == ("POST", "/v1/completions"):
            await self._complete(body, writer)
        else:
            writer.write(_whole("404 Not Found", _error(f"there is no {method} {path}")))

    async def _complete(self, body: bytes, writer: asyncio.StreamWriter) -> None:
        try:
            job = _job(next(self._numbers), json.loads(body))
        except (ValueError, TypeError, KeyError) as error:
            writer.write(_whole("400 Bad Request", _error(str(error))))
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        answer = self._answers[job.number] = _Answer(writer, len(job.prompt))
        self._engine.send(job)
        await answer.done

    def _take(self) -> None:
        try:
            deltas = self._engine.recv()
        except EOFError as error:
            asyncio.get_running_loop().remove_reader(self._engine.fileno())
            self._gone.set_exception(error)
            return
        for delta in deltas:
            self._answers[delta.number].take(delta)
            if delta.finished:
                del self._answers[delta.number]


class _Answer:
    """One response; its events are written as they come, whether or not anyone still reads."""

    def __init__(self, writer: asyncio.StreamWriter, prompt_tokens: int) -> None:
        self._writer = writer
        self._prompt_tokens = prompt_tokens
        self._tokens = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self, delta: Delta) -> None:
        self._tokens += delta.tokens
        reason = "length" if delta.finished else None
        choice = {"index": 0, "text": delta.text, "finish_reason": reason}
        events = _event({"choices": [choice]})
        if delta.finished:
            usage = {
                "prompt_tokens": self._prompt_tokens,
                "completion_tokens": self._tokens,
                "total_tokens": self._prompt_tokens + self._tokens,
            }
            events += _event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"
        chunk = b"%x\r\n%b\r\n" % (len(events), events)
        self._writer.write(chunk + b"0\r\n\r\n" if delta.finished else chunk)
        if delta.finished:
            self.done.set_result(None)


def _engine_process(load: Callable[[], Engine], front: Connection) -> None:
    """Step the engine as long as a sequence lives, and sleep until the next job otherwise."""
    engine = load()
    front.send(())
    live: set[int] = set()
    try:
        while True:
            while not live or front.poll():
                job: _Job = front.recv()
                engine.add(job.number, job.prompt, job.output_tokens)
                live.add(job.number)
            deltas = engine.step()
            live -= {delta.number for delta in deltas if delta.finished}
            if deltas:
                front.send(deltas)
    except (EOFError, BrokenPipeError):
        return  # the front has ended


def _job(number: int, asked: dict[str, Any]) -> _Job:
    """Raises for a request that this front does not do, so that nothing is measured wrongly."""
    prompt, output_tokens = asked["prompt"], asked["max_tokens"]
    if not (prompt and isinstance(prompt, list) and all(type(token) is int for token in prompt)):
        raise ValueError("prompt must be a list of token ids")
    if type(output_tokens) is not int or output_tokens < 1:
        raise ValueError("max_tokens must be a whole number above 0")
    for name, value in (("stream", True), ("ignore_eos", True), ("temperature", 0)):
        if asked.get(name) != value:
            raise ValueError(f"{name} must be {json.dumps(value)}")
    return _Job(number, prompt, output_tokens)


def _event(fields: dict[str, Any]) -> bytes:
    whole = {"id": "cmpl", "object": "text_completion", "created": 0, "model": MODEL} | fields
    return b"data: %b\n\n" % json.dumps(whole).encode()


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error"}}


def _whole(status: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        status.encode(),
        len(data),
        data,
    )
