"""What the life of an engine costs: start, sleep, wake, the first token after it, and a reload.

    python bench/life.py --model gemma-3-270m --rounds 3

Each round runs everything once on a real engine process, and the median of the rounds counts.
"Load" is a start with weights that are packed already; the very first start packs them and is not
counted. A wake and the first token after it are given as parts of a load, because seconds depend on
the machine and its neighbours while their ratio does not. A schema's first answer is measured on an
engine that was warmed up and on one that was not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path

import psutil

from tokenpath.config.paths import models_dir
from tokenpath.config.spec import EngineSettings
from tokenpath.fleet.local import LocalFleet, LocalReplica, ReplicaPlan
from tokenpath.fleet.reload import Reload
from tokenpath.models.source import resolve
from tokenpath.protocol.grammar import Grammar
from tokenpath.protocol.request import GenerationRequest, SamplingParams, TokenPrompt

PROMPT = TokenPrompt(list(range(10, 42)))
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


class Bench:
    def __init__(self, path: Path, kv_bytes: int) -> None:
        self.path = path
        self.kv_bytes = kv_bytes
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.megabytes: defaultdict[str, list[float]] = defaultdict(list)
        self.number = 0

    def plan(self, *, warm_up: bool = True) -> ReplicaPlan:
        settings = EngineSettings(kv_cache_bytes=self.kv_bytes, warm_up=warm_up)
        return ReplicaPlan(replica_id="bench", name="bench", model=self.path, engine=settings)

    async def first_token(self, replica: LocalReplica, grammar: Grammar | None = None) -> float:
        self.number += 1
        request = GenerationRequest(
            request_id=str(self.number),
            model="bench",
            prompt=PROMPT,
            sampling=SamplingParams(max_tokens=2, temperature=0.0, grammar=grammar),
        )
        began = time.perf_counter()
        first = None
        async for event in replica.generate(request):
            assert not hasattr(event, "error"), event
            first = first or time.perf_counter() - began
        assert first is not None
        return first

    def note(self, what: str, began: float) -> None:
        self.seconds[what].append(time.perf_counter() - began)

    def memory(self, what: str, replica: LocalReplica) -> None:
        assert replica.pid is not None
        self.megabytes[what].append(psutil.Process(replica.pid).memory_info().rss / 1e6)

    async def start(self, what: str, *, warm_up: bool) -> LocalFleet:
        fleet = LocalFleet([self.plan(warm_up=warm_up)])
        began = time.perf_counter()
        await fleet.start()
        await fleet.wait_ready()
        self.note(what, began)
        return fleet

    async def round(self) -> None:
        schema = Grammar.json_schema(SCHEMA)
        cold = await self.start("load without warm-up", warm_up=False)
        try:
            seconds = self.seconds["first token, schema, not warmed up"]
            seconds.append(await self.first_token(cold.replicas[0], schema))
        finally:
            await cold.stop(0.0)
        fleet = await self.start("load", warm_up=True)
        try:
            [old] = fleet.replicas
            seconds = self.seconds["first token, schema"]
            seconds.append(await self.first_token(old, schema))
            self.seconds["first token"].append(await self.first_token(old))
            self.memory("ready", old)
            began = time.perf_counter()
            await old.sleep(0.0)
            self.note("sleep", began)
            self.memory("asleep", old)
            began = time.perf_counter()
            await old.wake()
            self.note("wake", began)
            await old.sleep(0.0)
            self.seconds["first token of a sleeping model"].append(await self.first_token(old))
            await self.reload(fleet, old)
        finally:
            await fleet.stop(0.0)

    async def reload(self, fleet: LocalFleet, old: LocalReplica) -> None:
        reload = Reload(fleet, old)

        async def plan() -> ReplicaPlan:
            return self.plan()

        async def settled() -> None:
            """Nobody asks here."""

        began = time.perf_counter()
        await reload.run(plan, lambda _: None)
        self.note("reload", began)
        await reload.retire(settled(), 1.0)


async def measure(bench: Bench, rounds: int) -> None:
    packing = await bench.start("unused", warm_up=False)
    await packing.stop(0.0)
    del bench.seconds["unused"]
    for _ in range(rounds):
        await bench.round()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="gemma-3-270m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-cache-bytes", type=int, default=256 << 20)
    parser.add_argument("--json", type=Path, help="keep every round's figures in this file")
    options = parser.parse_args()
    bench = Bench(
        resolve(options.model, models_dir=models_dir(), pull=False), options.kv_cache_bytes
    )
    asyncio.run(measure(bench, options.rounds))
    load = statistics.median(bench.seconds["load"])
    print(f"{options.model}, median of {options.rounds} rounds")
    print(f"{'':38} {'seconds':>8} {'of a load':>10}")
    for what, values in bench.seconds.items():
        median = statistics.median(values)
        print(f"{what:38} {median:8.3f} {median / load:10.2f}")
    for what, values in bench.megabytes.items():
        print(f"resident, {what:28} {statistics.median(values):8.0f} MB")
    if options.json is not None:
        options.json.write_text(json.dumps({"s": bench.seconds, "MB": bench.megabytes}))


if __name__ == "__main__":
    main()
