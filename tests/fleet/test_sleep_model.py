"""A real model sleeps: its memory goes back to the machine, and its answers are the same after."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from tokenpath.config.spec import EngineSettings
from tokenpath.fleet.local import LocalReplica, ReplicaPlan
from tokenpath.models.local import open_model
from tokenpath.protocol.grammar import Grammar
from tokenpath.protocol.replica import ReplicaState
from tokenpath.protocol.request import GenerationRequest, SamplingParams, TokenPrompt

KV_BYTES = 512 << 20


@pytest.mark.real_model
async def test_memory_goes_back_and_answers_stay_the_same(gemma_path):
    settings = EngineSettings(kv_cache_bytes=KV_BYTES, threads=2)
    plan = ReplicaPlan(replica_id="m-0", name="m", model=Path(gemma_path), engine=settings)
    replica = LocalReplica(plan)
    replica.start()
    try:
        async with asyncio.timeout(200):
            await replica.wait_ready()
        prompt = open_model(gemma_path).tokenizer().encode("1, 2, 3, 4, 5, 6, 7, 8,")

        async def answer(name: str, grammar: Grammar | None = None) -> str:
            sampling = SamplingParams(max_tokens=8, temperature=0.0, grammar=grammar)
            request = GenerationRequest(
                request_id=name, model="m", prompt=TokenPrompt(list(prompt)), sampling=sampling
            )
            return "".join([event.text async for event in replica.generate(request)])

        first = await answer("before")
        assert first.startswith(" 9, 10")
        process = psutil.Process(replica.pid)
        awake = process.memory_info().rss
        await replica.sleep(0.0)
        assert replica.state is ReplicaState.ASLEEP
        slept = process.memory_info().rss
        weights = replica.card.weight_bytes
        assert awake - slept > 0.95 * (weights + KV_BYTES), (awake, slept, weights)
        assert (await replica.stats()).resident_bytes < awake - KV_BYTES
        assert await answer("wakes it") == first
        assert replica.state is ReplicaState.READY
        assert (await answer("held", Grammar.regex(r" [0-9], 1[0-9]"))).startswith(" 9, 1")
        assert replica.pid == process.pid
        assert replica.restarts == 0
        await replica.sleep(0.0)
        slept = process.memory_info().rss
        assert slept < awake - KV_BYTES
        # A vocabulary (some 190 MB) that is let go of only after the memory was given back may stay
        # until the next sleep; several must not.
        for round_ in range(4):
            assert await answer(f"again {round_}", Grammar.regex(rf" [0-9], 1[0-9]{round_}?"))
            await replica.sleep(0.0)
        assert process.memory_info().rss < slept + (400 << 20)
    finally:
        await replica.stop(0.0)
