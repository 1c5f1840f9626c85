"""Which transport carries the replica link? Measures three candidates in one sitting.

    python bench/link.py            # needs pyzmq and grpcio besides tokenpath's own packages

Each candidate carries the link's own frames (MessagePack by msgspec) between two processes under
uvloop: (a) asyncio streams over a Unix socket with a length prefix, (b) ZeroMQ over ipc, (c) a
bidirectional gRPC stream of bytes over a Unix socket. ``round trip`` is a small frame there and
its answer back, one at a time; ``one way`` is step frames of 32 token events, encoded on one side
and decoded on the other, sent as fast as back-pressure allows. Rounds of the candidates alternate,
so that a noisy neighbour disturbs all of them; the best round of each counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import platform
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import grpc.aio
import uvloop
import zmq
import zmq.asyncio

from tokenpath.protocol.events import TokenDelta
from tokenpath.protocol.framing import (
    HEADER_BYTES,
    READ_BYTES,
    FrameSplitter,
    encode,
    from_replica_codec,
    to_replica_codec,
)
from tokenpath.protocol.link import Drain, Drained, StatsQuery, StatsReply, StepOutput
from tokenpath.protocol.replica import ReplicaStats

EVENTS = 32
STEP = StepOutput(
    events=[
        TokenDelta(request_id=f"cmpl-{i:024x}", token_ids=[1000 + i], text=" token")
        for i in range(EVENTS)
    ]
)
TO_REPLICA = to_replica_codec()
FROM_REPLICA = from_replica_codec()

Send = Callable[[bytes], Awaitable[None]]
Receive = Callable[[], Awaitable[bytes]]
"""Sent with the length prefix in every candidate, so that all carry the same bytes."""


@dataclass(frozen=True)
class Result:
    transport: str
    round_trip_p50_us: float
    round_trip_p99_us: float
    step_frames_per_s: float


async def answer(send: Send, receive: Receive) -> None:
    """The engine's side: a query gets its reply, a ``Drain`` gets that many step frames."""
    while True:
        payload = await receive()
        if not payload:
            return
        frame = TO_REPLICA.decode(payload)
        if isinstance(frame, StatsQuery):
            await send(encode(StatsReply(query_id=frame.query_id, stats=ReplicaStats())))
        elif isinstance(frame, Drain):
            for _ in range(int(frame.grace_s)):
                await send(encode(STEP))
            await send(encode(Drained(aborted=0)))


def bare(send: Send, receive: Receive) -> tuple[Send, Receive]:
    """Of a transport with messages of its own, which needs no prefix to cut them."""

    async def receive_payload() -> bytes:
        return (await receive())[HEADER_BYTES:]

    return send, receive_payload


# (a) asyncio streams


def streams(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[Send, Receive]:
    async def send(data: bytes) -> None:
        writer.write(data)
        await writer.drain()

    splitter = FrameSplitter()
    payloads: deque[bytes] = deque()

    async def receive() -> bytes:
        while not payloads:
            chunk = await reader.read(READ_BYTES)
            if not chunk:
                return b""
            payloads.extend(splitter.feed(chunk))
        return payloads.popleft()

    return send, receive


async def serve_streams(path: str) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answer(*streams(reader, writer))
        writer.close()

    server = await asyncio.start_unix_server(connected, path)
    await server.serve_forever()


@asynccontextmanager
async def connect_streams(path: str) -> AsyncIterator[tuple[Send, Receive]]:
    reader, writer = await asyncio.open_unix_connection(path)
    yield streams(reader, writer)
    writer.close()


# (b) ZeroMQ


async def serve_zmq(path: str) -> None:
    socket = zmq.asyncio.Context().socket(zmq.PAIR)
    socket.bind(f"ipc://{path}")
    await answer(*bare(socket.send, socket.recv))


@asynccontextmanager
async def connect_zmq(path: str) -> AsyncIterator[tuple[Send, Receive]]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.PAIR)
    socket.connect(f"ipc://{path}")
    yield bare(socket.send, socket.recv)
    socket.close(linger=0)
    context.term()


# (c) gRPC


async def serve_grpc(path: str) -> None:
    async def exchange(_: object, context: grpc.aio.ServicerContext) -> None:
        async def receive() -> bytes:
            data = await context.read()
            return b"" if data is grpc.aio.EOF else data

        await answer(*bare(context.write, receive))

    handler = grpc.stream_stream_rpc_method_handler(exchange)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("tokenpath.Link", {"Exchange": handler})]
    )
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    await server.wait_for_termination()


@asynccontextmanager
async def connect_grpc(path: str) -> AsyncIterator[tuple[Send, Receive]]:
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        call = channel.stream_stream("/tokenpath.Link/Exchange")()
        yield bare(call.write, call.read)
        await call.done_writing()


Serve = Callable[[str], Awaitable[None]]
Connect = Callable[[str], AbstractAsyncContextManager[tuple[Send, Receive]]]
CANDIDATES: dict[str, tuple[Serve, Connect]] = {
    "asyncio streams": (serve_streams, connect_streams),
    "ZeroMQ ipc": (serve_zmq, connect_zmq),
    "gRPC": (serve_grpc, connect_grpc),
}


def in_process(name: str, path: str) -> None:
    """Entry of the engine-side process."""
    uvloop.run(CANDIDATES[name][0](path))


async def measure(name: str, path: str, trips: int, steps: int) -> Result:
    async with CANDIDATES[name][1](path) as (send, receive):

        async def trip(query_id: int) -> float:
            start = time.perf_counter()
            await send(encode(StatsQuery(query_id)))
            reply = FROM_REPLICA.decode(await receive())
            assert isinstance(reply, StatsReply)
            return time.perf_counter() - start

        for i in range(200):
            await trip(i)
        micros = [1e6 * await trip(i) for i in range(trips)]

        start = time.perf_counter()
        await send(encode(Drain(grace_s=float(steps))))
        received = 0
        while isinstance(FROM_REPLICA.decode(await receive()), StepOutput):
            received += 1
        elapsed = time.perf_counter() - start
        assert received == steps
    cuts = statistics.quantiles(micros, n=100)
    return Result(name, cuts[49], cuts[98], steps / elapsed)


def one_round(name: str, trips: int, steps: int) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "link")
        process = multiprocessing.get_context("spawn").Process(target=in_process, args=(name, path))
        process.start()
        try:
            while not Path(path).exists():
                time.sleep(0.01)
            time.sleep(0.2)
            return uvloop.run(measure(name, path, trips, steps))
        finally:
            process.kill()
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-trips", type=int, default=3000)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results: dict[str, list[Result]] = {name: [] for name in CANDIDATES}
    for _ in range(args.rounds):
        for name in CANDIDATES:
            results[name].append(one_round(name, args.round_trips, args.steps))
    best = [
        Result(
            name,
            min(r.round_trip_p50_us for r in rounds),
            min(r.round_trip_p99_us for r in rounds),
            max(r.step_frames_per_s for r in rounds),
        )
        for name, rounds in results.items()
    ]
    if args.json:
        json.dump([asdict(result) for result in best], sys.stdout, indent=2)
        return
    print(f"{platform.python_implementation()} {platform.python_version()}, best of {args.rounds}")
    print(f"{'transport':<18}{'p50 µs':>10}{'p99 µs':>10}{'steps/s':>12}{'events/s':>12}")
    for r in best:
        print(
            f"{r.transport:<18}{r.round_trip_p50_us:>10.0f}{r.round_trip_p99_us:>10.0f}"
            f"{r.step_frames_per_s:>12.0f}{r.step_frames_per_s * EVENTS:>12.0f}"
        )


if __name__ == "__main__":
    main()
