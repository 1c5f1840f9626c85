"""A small OpenAI-compatible server whose timing and token counts are known, for the tests.

It runs uvicorn in a thread of the test process. Requests choose nothing: the ``Script`` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from dataclasses import dataclass, field

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route


@dataclass
class Script:
    """How the server behaves, and what it saw."""

    first_delay_s: float = 0.0
    gap_s: float = 0.0
    tokens_per_event: int = 1
    usage: bool = True
    cached_tokens: int = 0
    template_tokens: int = 0
    """Counted on top of the prompt, as a chat template's are."""
    fail_status: int | None = None
    fail_from: int = 0
    """With ``fail_status``: the first request (counted from 0) that fails."""
    error_after: int | None = None
    """Send an error event after this many output events."""
    truncate_after: int | None = None
    """End the response after this many output events."""
    models: list[str] = field(default_factory=lambda: ["tiny"])
    wanted_key: str | None = None
    text: str | None = None
    no_template: bool = False

    bodies: list[dict] = field(default_factory=list)
    arrived_at: list[float] = field(default_factory=list)
    live: int = 0
    most_live: int = 0
    disconnects: int = 0


def make_app(script: Script) -> Starlette:
    async def models(request):
        if (
            script.wanted_key
            and request.headers.get("authorization") != f"Bearer {script.wanted_key}"
        ):
            return JSONResponse({"error": {"message": "wrong key", "code": "invalid_api_key"}}, 401)
        return JSONResponse({"object": "list", "data": [{"id": m} for m in script.models]})

    async def generate(request):
        number = len(script.bodies)
        body = json.loads(await request.body())
        script.bodies.append(body)
        script.arrived_at.append(time.perf_counter())
        if script.no_template:
            return JSONResponse(
                {
                    "error": {
                        "message": "the model tiny has no chat template",
                        "code": "unsupported_parameter",
                    }
                },
                400,
            )
        if script.fail_status is not None and number >= script.fail_from:
            return JSONResponse(
                {"error": {"message": "come back later", "type": "x", "code": "overloaded"}},
                script.fail_status,
            )
        chat = "messages" in body
        return StreamingResponse(stream(body, chat), media_type="text/event-stream")

    async def stream(body, chat):
        script.live += 1
        script.most_live = max(script.most_live, script.live)
        finished = False
        try:
            if chat:
                yield event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
            await asyncio.sleep(script.first_delay_s)
            pieces = ["tok "] * -(-body.get("max_tokens", 16) // script.tokens_per_event)
            if script.text is not None:
                pieces = script.text.split("|")
            for i, piece in enumerate(pieces):
                if i:
                    await asyncio.sleep(script.gap_s)
                if i == script.error_after:
                    yield event({"error": {"message": "it broke", "code": "engine_error"}})
                    finished = True
                    return
                if i == script.truncate_after:
                    finished = True
                    return
                choice = {"delta": {"content": piece}} if chat else {"text": piece}
                yield event({"choices": [{"index": 0, **choice, "finish_reason": None}]})
            last = {"delta": {}} if chat else {"text": ""}
            yield event({"choices": [{"index": 0, **last, "finish_reason": "length"}]})
            if script.usage:
                usage = {
                    "prompt_tokens": prompt_tokens(body) + script.template_tokens,
                    "completion_tokens": body.get("max_tokens", 16)
                    if script.text is None
                    else len(pieces),
                    "prompt_tokens_details": {"cached_tokens": script.cached_tokens},
                }
                yield event({"choices": [], "usage": usage})
            finished = True
            yield b"data: [DONE]\n\n"
        finally:
            script.live -= 1
            script.disconnects += not finished

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/completions", generate, methods=["POST"]),
            Route("/v1/chat/completions", generate, methods=["POST"]),
        ]
    )


def prompt_tokens(body) -> int:
    if "messages" in body:
        return sum(len(m["content"].split()) for m in body["messages"])
    prompt = body["prompt"]
    return len(prompt) if isinstance(prompt, list) else len(prompt.split())


def event(payload) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


@contextlib.contextmanager
def serving(app, **options):
    """Run an ASGI app on a free loopback port; yields the base URL."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="error", lifespan="off", **options)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    scheme = "https" if "ssl_certfile" in options else "http"
    try:
        yield f"{scheme}://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(10)
        listener.close()
