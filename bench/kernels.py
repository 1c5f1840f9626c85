"""What does each native kernel gain? Every operation of a step beside the torch calls it replaced.

    python bench/kernels.py --rounds 7

Runs each kind of operation as often as a step of Qwen2.5 1.5B does (28 layers, each with weights,
keys and values of its own, so that no cache holds them), by torch in bfloat16, as `engine.dtype:
bfloat16` computes, and by the native kernels; sampling is in float32. Steps are those of a decoding
batch with 1,024 tokens of context, and of a prompt's chunk of 512 tokens. Torch and native kernels
alternate; figures are medians, in milliseconds a step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from tokenpath.engine.batch import StepBatch, build_batch
from tokenpath.engine.cpus import default_threads
from tokenpath.engine.kernels.base import AttentionSpec
from tokenpath.engine.kernels.native_module import chosen_kernels, native_module
from tokenpath.engine.kernels.native_reducer import NativeReducer
from tokenpath.engine.kernels.torch_backend import TorchBackend
from tokenpath.engine.kv_cache import KvLayer
from tokenpath.engine.rotary import Rotary
from tokenpath.engine.rows import TORCH, Reducer
from tokenpath.engine.sampler import sample
from tokenpath.engine.sampling_state import SamplingState
from tokenpath.policy.sequence import Chunk, Sequence, StepPlan
from tokenpath.protocol.request import SamplingParams

LAYERS, HIDDEN, WIDTH, VOCABULARY, BLOCK_TOKENS = 28, 1536, 8960, 151936, 16
SPEC = AttentionSpec(heads=12, kv_heads=2, head_dim=128, scale=128**-0.5)
PROJECTED = (SPEC.heads + 2 * SPEC.kv_heads) * SPEC.head_dim
ROTATED = SPEC.heads + SPEC.kv_heads
MATRICES = {
    "q, k, v": (HIDDEN, PROJECTED),
    "output": (HIDDEN, HIDDEN),
    "gate, up": (HIDDEN, 2 * WIDTH),
    "down": (WIDTH, HIDDEN),
}
"""Width and outputs."""
CONTEXT, CHUNK, MOST = 1024, 512, 32
PAUSE_S = 0.03
"""Between torch and native, so that the threads of one no longer wait for work on their CPUs."""

Call = Callable[[], object]


class InTorch:
    """The operations as torch computes them in bfloat16."""

    def __init__(self) -> None:
        self.backend = TorchBackend(torch.bfloat16, "cpu")
        self.weights = {
            name: [torch.randn(outputs, width, dtype=torch.bfloat16) for _ in range(LAYERS)]
            for name, (width, outputs) in MATRICES.items()
        }
        self.norm = torch.ones(HIDDEN)
        self.rotary = Rotary(frequencies())
        self.pool = [KvLayer(pool(torch.bfloat16), pool(torch.bfloat16)) for _ in range(LAYERS)]

    def calls(self, batch: StepBatch) -> Iterator[tuple[str, Call]]:
        """Each operation of a step."""
        rows = len(batch.token_ids)
        x, made = random(rows, HIDDEN), random(rows, PROJECTED)
        heads = made.view(rows, -1, SPEC.head_dim)
        slots = torch.from_numpy(batch.slots)
        angles = self.rotary.angles(torch.from_numpy(batch.positions))
        attend = self.backend.plan_attention(batch, [SPEC])[SPEC]

        def norm() -> None:
            for _ in range(2 * LAYERS):
                self.backend.norm_input(x, self.norm, 1e-6)

        def split() -> None:
            for layer in self.pool:
                rotated = self.backend.rotate(heads[:, :ROTATED], angles)
                self.backend.write_kv(layer, rotated[:, SPEC.heads :], heads[:, ROTATED:], slots)

        def attention() -> None:
            for layer in self.pool:
                attend(heads[:, : SPEC.heads], layer)

        yield "norm, round", norm
        yield "rotate, write KV", split
        yield "attention", attention
        yield "attention, int8 KV", attention
        yield from sampling(batch, TORCH)
        for name in MATRICES:
            yield name, self._product(name, random(rows, MATRICES[name][0]))
            yield f"{name}, int4", self._product(name, random(rows, MATRICES[name][0]))

    def _product(self, name: str, x: torch.Tensor) -> Call:
        def call() -> None:
            for weight in self.weights[name]:
                made = torch.nn.functional.linear(x, weight)
                if name == "gate, up":
                    self.backend.gated_input(made, "silu")

        return call


class Native:
    """The operations as the native program has them, each in a program of its own."""

    def __init__(self, module: Any, kernels: str) -> None:
        self.module, self.kernels = module, kernels
        self.team = module.Team(default_threads())
        self.norm = torch.ones(HIDDEN)
        self.weights = {
            (name, bits): [self._matrix(bits, *shape) for _ in range(LAYERS)]
            for name, shape in MATRICES.items()
            for bits in (8, 4)
        }
        self.table = self._matrix(8, HIDDEN, 32)
        self.shape = module.AttentionShape(
            SPEC.heads, SPEC.kv_heads, SPEC.head_dim, SPEC.scale, 0, 0.0
        )
        self.kept: list[torch.Tensor] = []
        self.pools = {
            "": [self._pool(torch.bfloat16) for _ in range(LAYERS)],
            ", int8 KV": [self._pool(torch.int8) for _ in range(LAYERS)],
        }

    def calls(self, batch: StepBatch) -> Iterator[tuple[str, Call]]:
        """Each operation of a step, under the names that torch's have."""
        yield "norm, round", self._call(batch, self._norms)
        yield "rotate, write KV", self._call(batch, self._splits)
        for kind, pools in self.pools.items():

            def attends(program: Any, pools: list[Any] = pools) -> None:
                attended = program.buffer(HIDDEN, False)
                for one in pools:
                    program.attend(attended, self.shape, one)

            # Attention reads the queries that a split leaves; one is enough for all layers.
            yield f"attention{kind}", self._call(batch, attends, split=pools[0])
        yield from sampling(batch, NativeReducer(self.module, self.team, self.kernels))
        for name in MATRICES:
            for bits, kind in ((8, ""), (4, ", int4")):

                def products(program: Any, name: str = name, bits: int = bits) -> None:
                    self._products(program, name, bits)

                yield f"{name}{kind}", self._call(batch, products)

    def _norms(self, program: Any) -> None:
        source, to = program.buffer(HIDDEN, False), program.buffer(HIDDEN, True)
        program.embed(source, self.table[0], 1.0)
        for _ in range(2 * LAYERS):
            program.quantize(source, to, HIDDEN, True, self.norm.data_ptr(), 1e-6, False)

    def _splits(self, program: Any) -> None:
        source = program.buffer(PROJECTED, False)
        rotary = program.rotary(frequencies().tolist(), 1.0)
        for one in self.pools[""]:
            program.split(source, self.shape, one, 0, 0.0, 0, rotary)

    def _products(self, program: Any, name: str, bits: int) -> None:
        width, outputs = MATRICES[name]
        source, rounded = program.buffer(width, False), program.buffer(width, True)
        gated = name == "gate, up"
        made = program.buffer(WIDTH if gated else outputs, False)
        after = program.buffer(WIDTH, True)
        program.quantize(source, rounded, width, bits == 8)  # noqa: PLR2004 - 8 bits
        for matrix, *_ in self.weights[name, bits]:
            program.matmul(rounded, made, matrix, False, "silu" if gated else "", False)
            if gated:
                program.quantize(made, after, WIDTH, bits == 8)  # noqa: PLR2004 - 8 bits

    def _call(
        self, batch: StepBatch, write: Callable[[Any], None], *, split: Any | None = None
    ) -> Call:
        program = self.module.Program(self.team, self.kernels)
        if split is not None:
            rotary = program.rotary(frequencies().tolist(), 1.0)
            program.split(program.buffer(PROJECTED, False), self.shape, split, 0, 0.0, 0, rotary)
        write(program)
        step = (
            np.zeros_like(batch.token_ids),
            batch.positions,
            batch.slots,
            batch.row_starts,
            batch.context_tokens,
            batch.block_tables,
            np.array([], np.int64),
            np.empty((0, 1), np.float32),
        )
        return lambda: program.run(*step)

    def _matrix(self, bits: int, width: int, outputs: int) -> tuple[Any, object, object]:
        """The matrix, and the memory that it has addresses of."""
        panels = -(-outputs // self.module.PANEL)
        size = panels * self.module.panel_bytes(bits, width)
        data = np.random.default_rng(0).integers(0, 64, size, np.uint8)
        scale = np.ones(panels * self.module.PANEL if bits == 8 else 0, np.float32)  # noqa: PLR2004
        return self.module.weights(bits, outputs, width, data, scale, 0), data, scale

    def _pool(self, dtype: torch.dtype) -> Any:
        tensors = [pool(dtype), pool(dtype)]
        if dtype == torch.int8:
            tensors += [torch.ones(tensors[0].shape[:-1]) for _ in range(2)]
        self.kept += tensors
        addresses = [tensor.data_ptr() for tensor in tensors] + [0, 0]
        return self.module.KvPool(*addresses[:4], BLOCK_TOKENS)


def sampling(batch: StepBatch, reducer: Reducer) -> Iterator[tuple[str, Call]]:
    """Drawing a token for every sequence, of logits with some hundred likely tokens."""
    rows = len(batch.context_tokens)
    generator = torch.Generator().manual_seed(rows)
    logits = 2 * torch.randn(rows, VOCABULARY, generator=generator)
    logits += 16 * (torch.rand(logits.shape, generator=generator) > 0.9998)  # noqa: PLR2004
    for name, top_p in (("sampling", 1.0), ("sampling, top-p", 0.95)):
        params = SamplingParams(max_tokens=1, temperature=0.8, top_p=top_p)
        states = [SamplingState(params, prompt=(), seed=row) for row in range(rows)]
        yield name, partial(sample, logits, states, reducer)


def pool(dtype: torch.dtype) -> torch.Tensor:
    """Keys or values of one layer, for the largest batch."""
    blocks = MOST * (CONTEXT // BLOCK_TOKENS)
    return torch.zeros(blocks, BLOCK_TOKENS, SPEC.kv_heads, SPEC.head_dim, dtype=dtype)


def random(rows: int, columns: int) -> torch.Tensor:
    """Activations."""
    return torch.randn(rows, columns, dtype=torch.bfloat16)


def frequencies() -> torch.Tensor:
    """Of the rotary embedding."""
    planes = torch.arange(0, SPEC.head_dim, 2, dtype=torch.float32)
    return 1e6 ** -(planes / SPEC.head_dim)


def batches() -> dict[str, StepBatch]:
    """The steps that are measured."""

    def chunk(index: int, length: int, context: int) -> Chunk:
        blocks = range(index * context // BLOCK_TOKENS, (index + 1) * context // BLOCK_TOKENS)
        sequence = Sequence(str(index), [0] * context, context, 1, blocks=list(blocks))
        return Chunk(sequence, context - length, length)

    def decode(sequences: int) -> StepBatch:
        chunks = tuple(chunk(index, 1, CONTEXT) for index in range(sequences))
        return build_batch(StepPlan(chunks), BLOCK_TOKENS)

    return {f"decode {n}": decode(n) for n in (1, 8, MOST)} | {
        f"prefill {CHUNK}": build_batch(StepPlan((chunk(0, CHUNK, CHUNK),)), BLOCK_TOKENS)
    }


@torch.inference_mode()
def measured(first: Call, second: Call, rounds: int) -> tuple[float, float]:
    """Median seconds of each, alternately."""
    times: tuple[list[float], list[float]] = ([], [])
    first()
    second()
    for _ in range(rounds):
        for call, found in zip((first, second), times, strict=True):
            time.sleep(PAUSE_S)
            started = time.perf_counter()
            call()
            found.append(time.perf_counter() - started)
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    kernels, module = chosen_kernels(), native_module()
    if kernels is None or module is None:
        parser.error("the native kernels were not built: install a C++ compiler, then make setup")
    torch.set_num_threads(default_threads())
    plain, native = InTorch(), Native(module, kernels)
    steps = batches()
    cells: dict[str, list[str]] = {}
    for batch in steps.values():
        pairs = zip(plain.calls(batch), native.calls(batch), strict=True)
        for (name, before), (same, after) in pairs:
            assert name == same
            before_s, after_s = measured(before, after, options.rounds)
            text = f"{before_s * 1e3:.2f} → {after_s * 1e3:.2f} ({before_s / after_s:.1f}x)"
            cells.setdefault(name, []).append(text)
    threads = default_threads()
    table = Table(title=f"ms a step, torch bfloat16 → native {kernels}, {threads} threads")
    table.add_column("operation")
    for name in steps:
        table.add_column(name, justify="right")
    for name, row in cells.items():
        table.add_row(name, *row)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
