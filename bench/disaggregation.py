"""How long streams pause while long prompts arrive, with one replica for all and with roles.

For each way to divide the machine a server is started. Some streams decode all the time (one that
ends begins anew); meanwhile long prompts arrive, one every so many seconds, each different from its
first token on. What counts is the gap between successive tokens of the streams, as a client sees
it. All ways have all CPUs; with roles, each replica has half of them, which on two cores is one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import yaml

from bench.levels import wait_ready
from tokenpath.bench.client import Client, DisconnectedError, Endpoint
from tokenpath.bench.machine import machine
from tokenpath.bench.sse import EventSplitter

TOKENPATH = str(Path(sys.executable).parent / "tokenpath")
WORDS = ["harbour", "tide", "ship", "ledger", "master", "count", "morning", "rope", "wind", "stone"]


@dataclass
class Figures:
    """What one way of dividing gave."""

    gaps_s: list[float] = field(default_factory=list)
    tokens: int = 0
    first_tokens_s: list[float] = field(default_factory=list)
    """Of the long prompts."""
    handovers: float = 0
    fallbacks: float = 0
    seconds: float = 0.0

    def quantile(self, part: float) -> float:
        """Of the gaps."""
        ordered = sorted(self.gaps_s)
        return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


class Stream:
    """A sink that notes when each token of a streamed completion comes."""

    def __init__(self) -> None:
        self._splitter = EventSplitter()
        self.times: list[float] = []
        self.status = 0

    def head(self, status: int, _content_type: str) -> None:
        """See ``bench.client.Sink``."""
        self.status = status

    def body(self, data: bytes, at: float) -> None:
        """See ``bench.client.Sink``."""
        for event in self._splitter.feed(data):
            if event != b"[DONE]" and json.loads(event)["choices"]:
                self.times.append(at)


def prompt(words: int, seed: int) -> str:
    """Words in an order of their own."""
    chosen = random.Random(seed)
    return f"{seed}: " + " ".join(chosen.choice(WORDS) for _ in range(words))


def spec_of(arguments: argparse.Namespace, roles: list[str], step_tokens: int) -> dict:
    """A server of these roles."""
    return {
        "version": 1,
        "gateway": {"port": 0},
        "models": [
            {
                "name": "m",
                "source": arguments.model,
                "engine": {"max_step_tokens": step_tokens, "kv_cache_tokens": 32_768},
                "replicas": [{"role": role} for role in roles],
            }
        ],
    }


@contextlib.contextmanager
def served(spec: dict) -> Iterator[str]:
    """Serve a spec on a free port; yields its URL once it is ready."""
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "spec.yaml", Path(folder) / "log"
        file.write_text(yaml.safe_dump(spec))
        with log.open("w") as out:
            process = subprocess.Popen(
                [TOKENPATH, "serve", str(file), "--auth", "none"],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ,
            )
            try:
                url = wait_ready(process, log)
                roles = len(spec["models"][0]["replicas"])
                while metric(url, "tokenpath_replica_up") < roles:
                    time.sleep(0.2)
                yield url
            finally:
                process.terminate()
                process.wait(60)


def metric(url: str, name: str) -> float:
    """Sum over all labels."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return sum(map(float, re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)))


async def complete(client: Client, text: str, tokens: int) -> Stream:
    """One streamed completion, from its first byte to its last."""
    stream = Stream()
    body = {"model": "m", "prompt": text, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    await client.post("/completions", json.dumps({**body, "temperature": 0}).encode(), stream)
    if stream.status != httpx.codes.OK:
        raise SystemExit(f"the server answered {stream.status}")
    return stream


async def measure(url: str, arguments: argparse.Namespace) -> Figures:
    """Streams and long prompts together for so many seconds."""
    client, figures = Client(Endpoint.parse(f"{url}/v1")), Figures()
    before = metric(url, "tokenpath_handovers_total")
    await complete(client, prompt(400, 1), 4)  # what only the first request pays
    ends = time.perf_counter() + arguments.seconds

    async def decode(number: int) -> None:
        turn = 0
        while time.perf_counter() < ends:
            turn += 1
            stream = await complete(client, f"Story {number}.{turn}:", arguments.stream_tokens)
            gaps = [b - a for a, b in zip(stream.times, stream.times[1:], strict=False)]
            figures.gaps_s += gaps
            figures.tokens += len(stream.times)

    async def ask(number: int) -> None:
        asked = time.perf_counter()
        stream = await complete(client, prompt(arguments.prompt_words, 100 + number), 4)
        figures.first_tokens_s.append(stream.times[0] - asked)

    started = time.perf_counter()
    streams = [asyncio.create_task(decode(n)) for n in range(arguments.streams)]
    prompts = []
    await asyncio.sleep(arguments.every)
    while time.perf_counter() < ends - arguments.every:
        prompts.append(asyncio.create_task(ask(len(prompts))))
        await asyncio.sleep(arguments.every)
    with contextlib.suppress(DisconnectedError):
        await asyncio.gather(*streams, *prompts)
    figures.seconds = time.perf_counter() - started
    figures.handovers = metric(url, "tokenpath_handovers_total") - before
    figures.fallbacks = metric(url, "tokenpath_handover_fallbacks_total")
    client.close()
    return figures


def main() -> None:
    """Measure every way and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="gemma-3-270m")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--stream-tokens", type=int, default=150)
    parser.add_argument("--prompt-words", type=int, default=1000)
    parser.add_argument("--every", type=float, default=3.0, help="seconds between long prompts")
    parser.add_argument("--seconds", type=float, default=30.0)
    arguments = parser.parse_args()
    here = machine()
    print(f"{here.cpu_model}, {here.cpus} CPUs; {arguments.model}, {arguments.streams} streams, "
          f"a prompt of {arguments.prompt_words} words every {arguments.every:g} s")  # fmt: skip
    ways = {
        "one replica": (["both"], 512),
        "one replica, steps of 64": (["both"], 64),
        "prefill and decode": (["prefill", "decode"], 512),
    }
    print("| replicas | gap p50 | p99 | worst | stream tokens/s | first token of a prompt | "
          "handovers (fallbacks) |\n|---|---|---|---|---|---|---|")  # fmt: skip
    worst = {}
    for name, (roles, step_tokens) in ways.items():
        with served(spec_of(arguments, roles, step_tokens)) as url:
            found = asyncio.run(measure(url, arguments))
        worst[name] = max(found.gaps_s)
        print(
            f"| {name} | {found.quantile(0.5) * 1000:.0f} ms | {found.quantile(0.99) * 1000:.0f} ms"
            f" | {worst[name] * 1000:.0f} ms | {found.tokens / found.seconds:.0f} | "
            f"{statistics.median(found.first_tokens_s):.2f} s | "
            f"{found.handovers:.0f} ({found.fallbacks:.0f}) |",
            flush=True,
        )
    first, *_, last = worst.values()
    print(f"The worst gap with one replica is {first / last:.1f} times that with roles.")


if __name__ == "__main__":
    main()
