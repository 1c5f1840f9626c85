"""What the tests of the link and of the local fleet share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from scripted_engine import ScriptedCore

from tokenpath.config.launch import TcpAddress
from tokenpath.engine.server import EngineServer
from tokenpath.fleet.replica import LinkedReplica
from tokenpath.protocol.request import GenerationRequest, SamplingParams, TokenPrompt

TOKEN = "the-secret"


def request(request_id: str, *, kind: int = 1, max_tokens: int = 5) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        model="scripted",
        prompt=TokenPrompt([kind]),
        sampling=SamplingParams(max_tokens=max_tokens),
    )


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Wait until the condition holds; the other side of a socket has no event to wait for."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


class Engine:
    """A server running in this loop, and the core inside it."""

    def __init__(self, core: ScriptedCore, load, address, tls, **options) -> None:
        self.core = core
        self.address = address
        self.server = EngineServer(load or (lambda progress: core), token=TOKEN, **options)
        self.serving = asyncio.create_task(self.server.serve(address, tls))

    async def connect(self, **options) -> LinkedReplica:
        while not self.serving.done():
            if isinstance(self.address, TcpAddress) or self.address.path.exists():
                break
            await asyncio.sleep(0.005)
        return await LinkedReplica.connect(
            self.address, **{"replica_id": "r", "token": TOKEN, **options}
        )

    async def ready(self, **options) -> LinkedReplica:
        link = await self.connect(**options)
        await link.wait_ready()
        return link

    async def raw(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        await (await self.connect()).close()
        return await asyncio.open_unix_connection(self.address.path)

    async def idle(self) -> None:
        await until(lambda: not self.core.live and not self.server._live)


async def collect(link: LinkedReplica, wanted) -> list:
    return [event async for event in link.generate(wanted)]


def tokens(events) -> list[int]:
    return [token for event in events for token in event.token_ids]
