"""The way of one generation call through the gateway, the same for every front door.

Receive, authenticate, check, tokenize, reserve, run, answer: each step is a stage of the ledger,
and each may end the call with a typed error. Before the first output an error keeps its status;
after it, it becomes the stream's last event.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import suppress
from typing import Generic, TypeVar

from starlette.types import Receive, Scope, Send

from tokenpath.gateway.call import Call, call_of
from tokenpath.gateway.execute import Execution
from tokenpath.gateway.house import House
from tokenpath.gateway.lifeline import LAST_WORDS_S, Lifeline
from tokenpath.gateway.limits import choice_params
from tokenpath.gateway.openai.stream import KEEPALIVE, error_event
from tokenpath.gateway.plan import Door, Plan, Whole
from tokenpath.gateway.respond import EventStream, send_json
from tokenpath.gateway.tasks import GENERATING
from tokenpath.observe.log import log_crash
from tokenpath.protocol.errors import CancelledError, EngineError, TokenpathError
from tokenpath.protocol.events import Usage
from tokenpath.protocol.request import GenerationRequest, TokenPrompt
from tokenpath.protocol.stages import Stage

Request = TypeVar("Request")


class GenerationEndpoint(Generic[Request]):
    """The ASGI endpoint of one door."""

    def __init__(self, door: Door[Request], house: House) -> None:
        self._door = door
        self._house = house

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = call_of(scope)
        call.endpoint = self._door.endpoint
        stream = EventStream(send)
        lifeline = Lifeline(self._house.settings.limits.request_s)
        try:
            async with lifeline.hold(), self._house.draining.admit(lifeline):
                await self._serve(call, lifeline, receive, stream, send)
        except Exception as error:
            if not stream.started:
                raise
            await _end(call, stream, error)

    async def _serve(
        self, call: Call, lifeline: Lifeline, receive: Receive, stream: EventStream, send: Send
    ) -> None:
        house, door, limits = self._house, self._door, self._house.settings.limits
        request = await house.receive(call, receive, door.decode)
        async with lifeline.watch(receive, lambda: call.answered):
            plan: Plan | None = None
            # Again if the model is replaced meanwhile: its tokens may be others.
            while plan is None or not house.router.is_current(plan.model):
                with call.ledger.stage(Stage.POLICY):
                    model = house.model(call, door.model_name(request), GENERATING)
                    door.check(request, limits)
                with call.ledger.stage(Stage.TOKENIZE):
                    plan = await door.plan(request, model, limits)
            call.usage = Usage(prompt_tokens=plan.prompt_tokens)
            call.stream = plan.stream
            with call.ledger.stage(Stage.ROUTE):
                execution = self._submit(call, plan, lifeline)
            await self._run(call, plan, execution, stream, send)

    def _submit(self, call: Call, plan: Plan, lifeline: Lifeline) -> Execution:
        """Take places on a replica for every sequence of the plan."""
        house = self._house
        lease = house.router.reserve(
            plan.model,
            house.queue_limits,
            sequences=plan.sequences,
            prompt_tokens=plan.prompt_tokens * plan.n,
        )
        base = uuid.uuid4().hex
        requests = [
            GenerationRequest(
                request_id=f"{base}-{prompt * plan.n + choice}",
                model=plan.model.name,
                prompt=TokenPrompt(token_ids),
                sampling=choice_params(plan.params[prompt], choice),
                priority=plan.priority,
                cache_salt=call.key_id or "",
                timeout_s=lifeline.left_s,
            )
            for prompt, token_ids in enumerate(plan.prompts)
            for choice in range(plan.n)
        ]
        meter = house.metrics.token_meter(plan.model.name, call.clock)
        return Execution(requests, lease=lease, call=call, meter=meter)

    async def _run(
        self, call: Call, plan: Plan, execution: Execution, stream: EventStream, send: Send
    ) -> None:
        created = int(time.time())
        try:
            async with execution:
                if plan.stream:
                    await self._stream(plan, execution, stream, created)
                else:
                    await self._answer(plan, execution, send, created)
        finally:
            call.first_token_s = execution.first_token_s
            call.usage = plan.usage(execution.reported, execution.usage)

    async def _answer(self, plan: Plan, execution: Execution, send: Send, created: int) -> None:
        wholes = [Whole() for _ in range(plan.sequences)]
        while not execution.done():
            await execution.wait()
            for output in execution.take():
                wholes[output.sequence].add(output)
        usage = plan.usage(execution.reported, execution.usage)
        await send_json(send, self._door.answer(plan, wholes, usage, created))

    async def _stream(
        self, plan: Plan, execution: Execution, stream: EventStream, created: int
    ) -> None:
        writer = self._door.writer(plan, created)
        waiting = True
        while not execution.done():
            if waiting and self._house.settings.keepalive_s is not None:
                await self._wait_aloud(execution, stream, self._house.settings.keepalive_s)
            else:
                await execution.wait()
            events = b"".join([writer.chunk(output) for output in execution.take()])
            if not events:
                continue
            waiting = False
            if execution.done():
                usage = plan.usage(execution.reported, execution.usage)
                await stream.close(events + writer.closing(usage))
            else:
                await stream.write(events)

    @staticmethod
    async def _wait_aloud(execution: Execution, stream: EventStream, every_s: float) -> None:
        """Wait for the first output, with a comment to the client every so often."""
        while True:
            try:
                async with asyncio.timeout(every_s):
                    await execution.wait()
            except TimeoutError:
                await stream.write(KEEPALIVE)
            else:
                return


async def _end(call: Call, stream: EventStream, error: Exception) -> None:
    """Tell the client of a begun stream that it ends with an error; never a silent stop."""
    if not isinstance(error, TokenpathError):
        failure = EngineError("The server failed while answering.")
        failure.__cause__ = error
        error = failure
    call.error = error
    if error.__cause__ is not None:
        log_crash(call.rid, error.__cause__)
    if isinstance(error, CancelledError):
        return
    # A client that does not read gets a moment, then the connection ends.
    with suppress(TimeoutError):
        async with asyncio.timeout(LAST_WORDS_S):
            await stream.close(error_event(error))
