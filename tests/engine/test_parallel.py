"""A model divided over ranks computes what it computes in one process.

Equality is tried with ranks that are threads of this process, on the same groups and the same shared
memory as processes have; what becomes of processes is tried with real ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import mmap
import os
import signal
import threading
import time
from pathlib import Path
from queue import Queue

import numpy as np
import psutil
import pytest
import torch
from driver import Driver
from hypothesis import given
from hypothesis import strategies as st
from reference import SMALL_MODELS, VOCAB, saved, small_reference

from tokenpath import Engine, SamplingParams
from tokenpath.config.spec import EngineSettings
from tokenpath.engine.batch import build_batch
from tokenpath.engine.build import build_engine
from tokenpath.engine.kernels.native_module import native_module
from tokenpath.engine.parallel import crew as crew_module
from tokenpath.engine.parallel.lead import load_divided, refuse_undivided
from tokenpath.engine.parallel.member import MEETING_BYTES, join_ranks
from tokenpath.engine.parallel.messages import (
    HEADER_BYTES,
    RankOrder,
    body_bytes,
    read_batch,
    write_batch,
)
from tokenpath.engine.parallel.share import Share, divided, undivided
from tokenpath.engine.runner import usable_kernels
from tokenpath.models.local import LocalModel, open_model
from tokenpath.policy.sequence import Chunk, Sequence, StepPlan
from tokenpath.protocol.errors import ModelFileError, ReplicaLostError, SpecError

needs_native = pytest.mark.skipif(native_module() is None, reason="no C++ compiler when installed")
BLOCKS = 96
ODD_VOCAB = 251
"""Not to be shared equally."""


@functools.cache
def config_for(name: str, *, vocab: int = VOCAB) -> str:
    """A small model with heads that the native kernels take; its name among ``SMALL_MODELS``."""
    base = SMALL_MODELS[name]()
    base.config.head_dim = 32
    base.config.vocab_size = vocab
    base.config.final_logit_softcapping = getattr(base.config, "final_logit_softcapping", None)
    SMALL_MODELS[f"parallel-{name}-{vocab}"] = lambda: type(base)(base.config)
    return f"parallel-{name}-{vocab}"


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    @functools.cache
    def find(name: str, vocab: int = VOCAB) -> LocalModel:
        return saved(small_reference(config_for(name, vocab=vocab)), tmp_path_factory.mktemp(name))

    return find


def orders(share: Share, dtype: str, folder: Path, *, kv_dtype: str | None = None) -> list:
    return [
        RankOrder(
            share=rank,
            model="",
            name="m",
            dtype=dtype,
            kv_dtype=kv_dtype or ("float32" if dtype == "float32" else "bfloat16"),
            device="cpu",
            num_blocks=BLOCKS,
            block_tokens=16,
            threads=1,
            cpus=None,
            folder=str(folder),
            meeting=None,
            timeout_s=30,
            log_level="info",
        )
        for rank in share.ranks()
    ]


class Threads:
    """``runner.Followers`` that are threads."""

    def __init__(self) -> None:
        self.queues: list[Queue] = []
        self.threads: list[threading.Thread] = []

    def follow(self, make) -> None:
        queue: Queue = Queue()

        def serve() -> None:
            runner = make()
            while (batch := queue.get()) is not None:
                assert runner.forward(batch).shape[0] == 0, "logits are rank 0's"

        self.queues.append(queue)
        self.threads.append(threading.Thread(target=serve, daemon=True))
        self.threads[-1].start()

    def send(self, batch) -> None:
        for queue in self.queues:
            # As it arrives in a process of its own.
            frame = write_batch(batch)
            assert body_bytes(frame[:HEADER_BYTES]) == len(frame) - HEADER_BYTES
            queue.put(read_batch(frame[HEADER_BYTES:]))

    def reason(self, error: Exception) -> Exception:
        return error

    def end(self) -> None:
        for queue in self.queues:
            queue.put(None)
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()


@contextlib.contextmanager
def divided_runner(model, dtype, folder, *, parts=1, stages=1, kv_dtype=None, room=MEETING_BYTES):
    share = divided(model.config, name="m", parts=parts, stages=stages)
    bits = dtype in {"int8", "int4"} and parts > 1
    native = bits and usable_kernels(model.config, torch.bfloat16, "cpu", 16, parts=parts)
    areas = [np.frombuffer(mmap.mmap(-1, room), np.uint8) for _ in range(stages)]

    def meeting(rank: Share):
        if not native:
            return None
        return native_module().Meeting(areas[rank.stage], rank.part, rank.parts, 30)

    first, *others = orders(share, dtype, folder, kv_dtype=kv_dtype)
    followers = Threads()
    for order in others:
        followers.follow(
            functools.partial(join_ranks, order, model=model, meeting=meeting(order.share))
        )
    runner = join_ranks(first, model=model, meeting=meeting(first.share))
    runner.lead(followers)
    try:
        yield runner
    finally:
        followers.end()


def logits(runner) -> dict[str, torch.Tensor]:
    """Prompts of many lengths, in chunks, and some tokens of each."""
    driver = Driver(runner)
    generator = torch.Generator().manual_seed(3)
    prompts = [
        driver.sequence(str(n), torch.randint(ODD_VOCAB, (n,), generator=generator).tolist())
        for n in (1, 5, 40, 100)
    ]
    return driver.generate(prompts, new_tokens=4, chunk=33, stagger=1)


@pytest.fixture(scope="module")
def alone(model_of, tmp_path_factory):
    @functools.cache
    def find(name: str, dtype: str, kv_dtype: str | None = None, vocab: int = VOCAB) -> dict:
        share, model = Share(), model_of(name, vocab)
        (order,) = orders(share, dtype, tmp_path_factory.mktemp("alone"), kv_dtype=kv_dtype)
        return logits(join_ranks(order, model=model))

    return find


FAMILIES = ["llama-bias", "qwen2-tied", "qwen3", "gemma3-softcap-scaled"]
DIVISIONS = [(2, 1), (1, 2), (2, 2)]


@needs_native
@pytest.mark.parametrize(("parts", "stages"), DIVISIONS)
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_native_results_keep_their_bits(name, dtype, parts, stages, model_of, alone, tmp_path):
    expected = alone(name, dtype)
    with divided_runner(model_of(name), dtype, tmp_path, parts=parts, stages=stages) as runner:
        assert runner.kernels != "torch"
        found = logits(runner)
    for key, rows in expected.items():
        assert torch.equal(found[key], rows), key


@needs_native
def test_int8_keys_and_values(model_of, alone, tmp_path):
    expected = alone("llama-bias", "int8", "int8")
    model = model_of("llama-bias")
    with divided_runner(model, "int8", tmp_path, parts=2, kv_dtype="int8") as runner:
        found = logits(runner)
    assert all(torch.equal(found[key], rows) for key, rows in expected.items())


@needs_native
def test_parts_too_narrow_for_the_kernels_compute_in_torch(model_of, alone, tmp_path, caplog):
    """Quantized all the same, row by row, so that it is near what the kernels make."""
    expected = alone("llama-bias", "int8")
    with divided_runner(model_of("llama-bias"), "int8", tmp_path, parts=4) as runner:
        assert runner.kernels == "torch"
        found = logits(runner)
    assert "feed-forward size 96, divided by 4, is no multiple of 16" in caplog.text
    first = [found[key][0] for key in expected]
    for mine, theirs in zip(first, (rows[0] for rows in expected.values()), strict=True):
        assert torch.nn.functional.cosine_similarity(mine, theirs, dim=0) > 0.99


@needs_native
def test_exchanges_larger_than_the_memory_go_in_turns(model_of, alone, tmp_path):
    """Two areas of 4 kB: a step's hidden rows take several, and a vocabulary of 251 has a gap."""
    expected = alone("qwen3", "int8", None, ODD_VOCAB)
    room = 3 * 4096
    with divided_runner(
        model_of("qwen3", ODD_VOCAB), "int8", tmp_path, parts=2, room=room
    ) as runner:
        found = logits(runner)
    for key, rows in expected.items():
        assert rows.shape[1] == ODD_VOCAB
        assert torch.equal(found[key], rows), key


@pytest.mark.parametrize(("parts", "stages"), DIVISIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_torch_results(name, parts, stages, model_of, alone, tmp_path):
    """Stages keep the bits; parts keep them but for the order in which the library sums."""
    expected = alone(name, "float32", None, ODD_VOCAB)
    with divided_runner(
        model_of(name, ODD_VOCAB), "float32", tmp_path, parts=parts, stages=stages
    ) as runner:
        found = logits(runner)
    for key, rows in expected.items():
        if parts == 1:
            assert torch.equal(found[key], rows), key
        else:
            torch.testing.assert_close(found[key], rows, atol=2e-5, rtol=0)
            assert torch.equal(found[key].argmax(-1), rows.argmax(-1))


@needs_native
def test_a_part_that_does_not_come_ends_the_exchange():
    memory = np.frombuffer(mmap.mmap(-1, MEETING_BYTES), np.uint8)
    started = time.monotonic()
    program = exchanging(memory, timeout_s=0.3)
    assert not program()
    assert 0.3 <= time.monotonic() - started < 10
    assert not program(), "an exchange that failed is final"
    memory = np.frombuffer(mmap.mmap(-1, MEETING_BYTES), np.uint8)
    module = native_module()
    other = module.Meeting(memory, 1, 2, 600)
    waiting = exchanging(memory, timeout_s=600)
    threading.Timer(0.2, other.give_up).start()
    assert not waiting()


def exchanging(memory, *, timeout_s):
    """A program of one exchange, of part 0 of 2."""
    module = native_module()
    program = module.Program(module.Team(1), module.usable()[0])
    program.join(module.Meeting(memory, 0, 2, timeout_s))
    buffer = program.buffer(64, False, False)
    program.exchange(buffer, buffer, 32, 0, 64, False)
    batch = build_batch(one_chunk([1, 2, 3]), 16)

    def run() -> bool:
        return program.run(
            batch.token_ids,
            batch.positions,
            batch.slots,
            batch.row_starts,
            batch.context_tokens,
            batch.block_tables,
            np.zeros(0, np.int64),
            np.zeros((0, 1), np.float32),
        )

    return run


def one_chunk(ids: list[int]) -> StepPlan:
    sequence = Sequence("a", ids, len(ids), max_tokens=0)
    sequence.blocks = [0]
    return StepPlan((Chunk(sequence, 0, len(ids)),))


@given(total=st.integers(1, 300), parts=st.integers(1, 16), stages=st.integers(1, 12))
def test_shares_cover_everything_once(total, parts, stages):
    ranks = Share(parts=parts, stages=stages).ranks()
    assert [rank.rank for rank in ranks] == list(range(parts * stages))
    rows = [row for rank in ranks[:parts] for row in rank.rows(total)]
    assert rows == list(range(total))
    assert all(len(rank.rows(total)) <= rank.held(total) for rank in ranks)
    layers = [layer for rank in ranks[::parts] for layer in rank.layers(total)]
    assert layers == list(range(total))
    if stages <= total:
        assert all(rank.layers(total) for rank in ranks)


def test_what_cannot_be_divided_is_named_with_what_can(model_of):
    config = model_of("llama-bias").config

    def refused(parts=1, stages=1, **changes) -> str:
        with pytest.raises(SpecError) as caught:
            divided(dataclasses.replace(config, **changes), name="tiny", parts=parts, stages=stages)
        return str(caught.value)

    assert refused(3) == (
        "tensor_parallel is 3, but tiny has 4 query heads, which 3 ranks cannot share equally; for "
        "this model it can be 1, 2 or 4"
    )
    assert "has 1 KV head, which 2 ranks" in refused(2, kv_heads=1)
    assert "can be 1 (pipeline_parallel divides its layers instead)" in refused(2, kv_heads=1)
    assert "a feed-forward size of 98" in refused(4, intermediate_size=98)
    assert "a vocabulary of 5" in refused(4, vocab_size=5)
    assert refused(stages=4) == (
        "pipeline_parallel is 4, but tiny has 3 layers, and every stage needs one; it can be 3 at "
        "most"
    )
    assert undivided(config, 4) is None


@pytest.mark.real_model
def test_gemma_cannot_be_shared_and_kv_tiers_cannot_be_divided(gemma_path):
    model = open_model(gemma_path)

    def refused(**settings) -> SpecError:
        with pytest.raises(SpecError) as caught:
            build_engine(model, EngineSettings(**settings), name="gemma-3-270m")
        return caught.value

    error = refused(tensor_parallel=2)
    assert error.param == "tensor_parallel"
    assert "gemma-3-270m has 1 KV head, which 2 ranks cannot share" in error.message
    tiers = refused(pipeline_parallel=2, kv_tiers={"host_bytes": 1 << 20})
    assert tiers.param == "kv_tiers"
    with pytest.raises(SpecError, match="roles hand over whole blocks"):
        refuse_undivided(EngineSettings(pipeline_parallel=2), torch.device("cpu"), hands_over=True)


# Real processes.


@contextlib.contextmanager
def processes(model: LocalModel, *, parts=1, stages=1, timeout_s=30.0):
    share = divided(model.config, name="tiny", parts=parts, stages=stages)
    settings = EngineSettings(
        tensor_parallel=parts, pipeline_parallel=stages, rank_timeout_s=timeout_s, threads=parts
    )
    threads, cpus = torch.get_num_threads(), os.sched_getaffinity(0)
    runner, crew = load_divided(
        model,
        share,
        settings,
        name="tiny",
        dtype="int8",
        kv_dtype="bfloat16",
        num_blocks=BLOCKS,
        progress=None,
    )
    try:
        yield runner, crew
    finally:
        crew.close()
        torch.set_num_threads(threads)
        assert not any(psutil.pid_exists(pid) for pid in crew.pids)
        assert os.sched_getaffinity(0) == cpus, "the crew's end gives the CPUs back"


@needs_native
def test_processes_give_the_same_bits_until_one_is_killed(model_of, alone):
    expected = alone("qwen3", "int8")
    with processes(model_of("qwen3"), parts=2) as (runner, crew):
        found = logits(runner)
        assert all(torch.equal(found[key], rows) for key, rows in expected.items())
        lost: Queue = Queue()
        crew.watch(lost.put)
        os.kill(crew.pids[0], signal.SIGKILL)
        sentence = "rank 1 of the 2 that compute this model was ended by SIGKILL"
        assert str(lost.get(timeout=10)).startswith(sentence)
        with pytest.raises(ReplicaLostError, match=sentence):
            runner.run(one_chunk([1, 2, 3]))


@needs_native
def test_a_process_that_is_stopped_ends_the_step_in_time(model_of, monkeypatch):
    monkeypatch.setattr(crew_module, "END_S", 0.2)
    with processes(model_of("qwen3"), parts=2, timeout_s=0.5) as (runner, crew):
        os.kill(crew.pids[0], signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(ReplicaLostError, match="did not come to an exchange in time"):
            runner.run(one_chunk([1, 2, 3]))
        assert time.monotonic() - started < 10


def test_a_rank_that_cannot_load_says_why(model_of, tmp_path):
    """Rank 0 has opened the model, and the file changes before the others do."""
    model = model_of("qwen3")
    moved = dataclasses.replace(model, path=tmp_path / "gone")
    with pytest.raises(ModelFileError, match="gone"), processes(moved, stages=2):
        pytest.fail("it cannot be loaded")


@pytest.mark.real_model
def test_gemma_in_two_stages_answers_as_in_one():
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=2)
    prompts = ["The capital of France is", "1 2 3 4 5 6", "def add(a, b):"]
    answers = []
    for stages in (1, 2):
        with Engine(
            "gemma-3-270m",
            progress=False,
            kv_cache_tokens=2048,
            dtype="int8",
            pipeline_parallel=stages,
        ) as engine:
            completions = engine.generate(prompts, params, progress=False)
            answers.append([(c.token_ids, c.logprobs) for c in completions])
            assert engine.card.weight_bytes > 250_000_000
    assert answers[0] == answers[1]
