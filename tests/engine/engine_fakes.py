"""A model whose output is known: the next token is a hash of all tokens before it.

The fake keeps a real pool: it writes the chunk's tokens to the slots of the sequence's blocks and
hashes what it reads back, so a wrong block, a lost chunk or a stale prefix changes the output.
"""

from __future__ import annotations

import codecs
import random
import zlib
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch

from tokenpath.engine.core import EngineCore
from tokenpath.engine.kv_tiers.tiers import KvTiers
from tokenpath.policy.scheduler import Scheduler, SchedulerConfig
from tokenpath.policy.sequence import StepPlan
from tokenpath.policy.speculator import Guess, Speculator
from tokenpath.protocol.events import Failed, Finish, GenerationEvent, TokenLogprob
from tokenpath.protocol.replica import ModelCard
from tokenpath.protocol.request import GenerationRequest, SamplingParams, TokenPrompt

EOS = 0
PIECES: list[bytes] = [
    b"",  # EOS
    *(bytes([letter]) for letter in b"abcdefghijklmnopqrstuvwxyz"),
    b"the ", b"ing", b" ", b"abc", b"\n",
    *("🙂".encode()[i : i + 1] for i in range(4)),
    "é".encode(), "日".encode()[:2], "日".encode()[2:],
]  # fmt: skip
VOCAB = len(PIECES)


def next_token(tokens: Seq[int]) -> int:
    return zlib.crc32(bytes(tokens)) % VOCAB


def continuation(prompt: Seq[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeRunner:
    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.pool = np.full(num_blocks * block_tokens, -1)
        self.block_tokens = block_tokens
        self.steps = 0

    def run(self, plan: StepPlan) -> torch.Tensor:
        self.steps += 1
        rows = []
        for chunk in plan.chunks:
            blocks = np.array(chunk.sequence.blocks)
            end = chunk.start + chunk.length
            places = np.arange(end)
            slots = blocks[places // self.block_tokens] * self.block_tokens
            slots += places % self.block_tokens
            self.pool[slots[chunk.start :]] = chunk.token_ids
            for seen in range(end + 1 - chunk.sampled_rows, end + 1):
                row = torch.zeros(VOCAB)
                row[next_token(self.pool[slots[:seen]].tolist())] = 20.0
                rows.append(row)
        return torch.stack(rows) if rows else torch.zeros(0, VOCAB)


class RandomDrafter:
    """Knows what follows, and errs on purpose now and then."""

    kinds = (0.9,)

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def offers(self, sequences, most):
        offered = {}
        for sequence in sequences:
            right = self.random.randint(0, most)
            tokens = continuation(sequence.token_ids, right)
            tokens += [self.random.randrange(1, VOCAB) for _ in range(most - right)]
            offered[sequence.request_id] = Guess(0, most, tuple(tokens))
        return offered

    def depth_s(self, sequences):
        return 0.0

    def draft(self, lengths):
        return {}

    def forget(self, request_id):
        pass


class FreeRows:
    """Costs of steps by which every draft pays."""

    def seconds(self, rows):
        return 1.0

    def measured(self, rows, seconds):
        pass


def eager_speculator(seed: int, most_tokens: int = 5) -> Speculator:
    speculator = Speculator(RandomDrafter(seed), most_tokens=most_tokens)
    speculator.costs = FreeRows()
    return speculator


class FakeCopier:
    """The fake's pool as bytes; see ``engine.kv_tiers.copier``."""

    def __init__(self, runner: FakeRunner) -> None:
        self._blocks = runner.pool.reshape(-1, runner.block_tokens)
        self.block_bytes = self._blocks[0].nbytes

    def read(self, block, to):
        to[:] = self._blocks[block].view(np.uint8)

    def write(self, block, source):
        self._blocks[block].view(np.uint8)[:] = source


class Poisoned:
    """Raises whenever a poisoned sequence is in the plan, before or after computing."""

    def __init__(self, runner, poison, error):
        self.runner, self.poison, self.error = runner, poison, error

    def run(self, plan):
        logits = self.runner.run(plan)
        if any(self.poison(chunk) for chunk in plan.chunks):
            raise self.error
        return logits


@dataclass
class Piece:
    text: str
    released: int
    matched_stop: str | None = None


class FakeDetokenizer:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = 0

    def push(self, token_id: int) -> Piece:
        self._held += 1
        text = self._decoder.decode(PIECES[token_id])
        if self._decoder.getstate()[0]:
            return Piece(text, 0)
        tokens, self._held = self._held, 0
        return Piece(text, tokens)

    def flush(self) -> Piece:
        tokens, self._held = self._held, 0
        return Piece(self._decoder.decode(b"", final=True), tokens)


class FakeText:
    def token_bytes(self, token_id: int) -> bytes:
        return PIECES[token_id]

    def detokenizer(self, stop: Seq[str], shown: Seq[int]) -> FakeDetokenizer:
        assert not stop, "test_output tests stop strings, with the real detokenizer"
        return FakeDetokenizer()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.tick = 0.0
        """Advance at every reading."""

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


@dataclass
class Result:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    failed: Failed | None = None
    deltas: int = 0

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.failed is not None


class Collector:
    """Gathers events by request and holds them to the order that the protocol promises."""

    def __init__(self) -> None:
        self.results: dict[str, Result] = {}

    def take(self, events: list[GenerationEvent]) -> None:
        for event in events:
            result = self.results.setdefault(event.request_id, Result())
            assert not result.ended, "an event after the end"
            if isinstance(event, Failed):
                result.failed = event
                continue
            assert event.token_ids or event.text or event.finish, "an empty event"
            result.deltas += 1
            result.token_ids += event.token_ids
            result.text += event.text
            if event.logprobs is not None:
                assert [entry.token_id for entry in event.logprobs] == event.token_ids
                result.logprobs += event.logprobs
            result.finish = event.finish


def request(
    request_id: str,
    prompt: Seq[int],
    *,
    priority: int = 0,
    timeout_s: float | None = None,
    **params,
) -> GenerationRequest:
    params = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | params
    return GenerationRequest(
        request_id=request_id,
        model="fake",
        prompt=TokenPrompt(list(prompt)),
        sampling=SamplingParams(**params),
        priority=priority,
        timeout_s=timeout_s,
    )


def make_core(
    *,
    num_blocks: int = 64,
    block_tokens: int = 4,
    max_step_tokens: int = 64,
    max_running: int = 8,
    max_context_tokens: int = 1000,
    prefix_cache: bool = True,
    wrap: Callable[[FakeRunner], object] = lambda runner: runner,
    clock: Callable[[], float] | None = None,
    text: object | None = None,
    make_tiers: Callable[[FakeCopier], KvTiers] | None = None,
    speculator: object | None = None,
) -> EngineCore:
    runner = FakeRunner(num_blocks, block_tokens)
    tiers = None if make_tiers is None else make_tiers(FakeCopier(runner))
    scheduler = Scheduler(
        SchedulerConfig(
            max_step_tokens=max_step_tokens,
            max_running=max_running,
            block_tokens=block_tokens,
            num_blocks=num_blocks,
            max_context_tokens=max_context_tokens,
            prefix_cache=prefix_cache,
        ),
        tiers=tiers,
        drafts=speculator,
    )
    card = ModelCard(
        name="fake", architecture="fake", parameters=1, vocab_size=VOCAB,
        max_context_tokens=scheduler.capacity_tokens, dtype="float32", kv_dtype="bfloat16", weight_bytes=1,
        kv_bytes_per_token=1, kv_blocks_total=num_blocks, block_tokens=block_tokens,
    )  # fmt: skip
    return EngineCore(
        wrap(runner),
        scheduler,
        text=text or FakeText(),
        card=card,
        eos_ids=(EOS,),
        tiers=tiers,
        speculator=speculator,
        clock=clock or Clock(),
        seed_source=iter(range(1_000_000)).__next__,
    )


def run_all(core: EngineCore, collector: Collector | None = None) -> dict[str, Result]:
    collector = collector or Collector()
    while core.has_work():
        collector.take(core.step())
        core.check_integrity()
    assert_idle(core)
    return collector.results


def assert_idle(core: EngineCore) -> None:
    core.check_integrity()
    stats = core.stats()
    assert (stats.requests_running, stats.requests_waiting, stats.kv_blocks_used) == (0, 0, 0)
    assert stats.waiting_tokens == 0
