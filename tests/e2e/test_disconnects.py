"""Clients that go away: nothing of theirs may stay in the engine."""

import asyncio
import json
import random

import pytest

pytestmark = pytest.mark.real_model
DISCONNECTS = 500
AT_ONCE = 16
PROMPT = "Water boils at a temperature of"
RSS_GROWTH_BYTES = 48 << 20


async def leave(port: int, rng: random.Random) -> None:
    """Send a request of a random kind and close the connection at a random moment."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    chat = rng.random() < 0.5
    words = " ".join(
        rng.choice(["one", "two", "three", "four"]) for _ in range(rng.randint(1, 200))
    )
    body = {
        "model": "gemma",
        "max_tokens": 300,
        "ignore_eos": True,
        "stream": rng.random() < 0.6,
        "n": rng.choice([1, 1, 2]),
    }
    body |= {"messages": [{"role": "user", "content": words}]} if chat else {"prompt": words}
    data = json.dumps(body).encode()
    path = "/v1/chat/completions" if chat else "/v1/completions"
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    ).encode()
    moment = rng.random()
    if moment < 0.1:  # in the middle of the body
        writer.write(head + data[: rng.randint(0, len(data) - 1)])
        await writer.drain()
    else:
        writer.write(head + data)
        await writer.drain()
        if moment < 0.4:  # mostly before the first token
            await asyncio.sleep(rng.random() * 0.1)
        elif moment < 0.8 and body["stream"]:  # in the middle of the stream
            for _ in range(rng.randint(1, 6)):
                if not await asyncio.wait_for(reader.readline(), 60):
                    break
        else:
            await asyncio.sleep(rng.random() * 0.5)
    if rng.random() < 0.5:
        writer.transport.abort()  # a reset instead of a clean end
    else:
        writer.close()


async def run_disconnects(port: int, count: int, seed: int) -> None:
    rng = random.Random(seed)
    gate = asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        async with gate:
            await leave(port, rng)

    await asyncio.gather(*(one() for _ in range(count)))


def resident(server) -> tuple[int, int]:
    import psutil

    gateway = psutil.Process(server.process.pid)
    return gateway.memory_info().rss, server.engine.memory_info().rss


def test_500_random_disconnects_leave_nothing_behind(server, client):
    port = int(server.url.rsplit(":", 1)[1])

    def answer() -> str:
        return (
            client.completions.create(model="gemma", prompt=PROMPT, max_tokens=16, temperature=0)
            .choices[0]
            .text
        )

    undisturbed = answer()
    asyncio.run(run_disconnects(port, 100, seed=1))  # caches and pools reach their size
    server.wait_idle(30)
    before = resident(server)
    asyncio.run(run_disconnects(port, DISCONNECTS, seed=2))
    server.wait_idle(30)
    after = resident(server)
    assert server.metric("tokenpath_requests_running") == 0
    assert server.metric("tokenpath_requests_waiting") == 0
    assert server.metric("tokenpath_kv_blocks_used") == 0
    growth = [new - old for old, new in zip(before, after, strict=True)]
    assert max(growth) < RSS_GROWTH_BYTES, f"gateway and engine grew by {growth} bytes"
    assert answer() == undisturbed


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_reaches_the_engine_within_a_step(server, stream):
    async def start_and_leave() -> float:
        port = int(server.url.rsplit(":", 1)[1])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps(
            {
                "model": "gemma",
                "prompt": "x",
                "max_tokens": 4000,
                "ignore_eos": True,
                "stream": stream,
            }
        ).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        await writer.drain()
        while not await asyncio.to_thread(server.metric, "tokenpath_requests_running"):
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        writer.transport.abort()

    server.wait_idle()
    asyncio.run(start_and_leave())
    before = server.metric("tokenpath_generated_tokens_total")
    server.wait_idle(1)
    assert server.metric("tokenpath_generated_tokens_total") - before <= 3
    assert server.metric("tokenpath_kv_blocks_used") == 0
