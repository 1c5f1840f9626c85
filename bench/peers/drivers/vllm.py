"""Drives vLLM for CPU through its engine, with token ids, step by step.

Options: ``batch_tokens=N`` (budget of a step), ``reserve=N`` (CPUs without a compute thread; vLLM
by itself leaves one, which of two is half). vLLM's engine core runs in a process of its own, as it
does when it serves; its outputs are counted as they come.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.peers.drivers.harness import Measured, Settings, cpu_numbers, serve
from bench.peers.drivers.works import DECODE_STEPS, Decode, Prefill

_KV_BYTES = 3 * 2**30


class Vllm:
    """A loaded Hugging Face folder."""

    def __init__(self, settings: Settings) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(-(-_KV_BYTES // 2**30)))
        cpus = cpu_numbers(settings.threads - int(settings.options.get("reserve", "0")))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cpus)))
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from vllm import LLM, SamplingParams  # noqa: PLC0415 - reads the variables above

        self._sampling = SamplingParams
        self._step_tokens = int(settings.options.get("batch_tokens", "2048"))
        self._engine = LLM(
            model=settings.model,
            dtype="bfloat16",
            max_model_len=settings.sequence_tokens + 8,
            max_num_seqs=max(settings.sequences, 4),
            max_num_batched_tokens=self._step_tokens,
            enable_prefix_caching=False,
            disable_log_stats=True,
        ).llm_engine
        self._numbers = itertools.count()

    def prefill(self, work: Prefill) -> Measured:
        started = time.perf_counter()
        self._add(work.prompt(), output_tokens=1)
        prompt_tokens = sampled = 0
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                prompt_tokens = len(output.prompt_token_ids)
                sampled += len(output.outputs[0].token_ids)
        seconds = time.perf_counter() - started
        if sampled != 1:
            raise RuntimeError(f"{sampled} tokens were sampled instead of 1")
        return Measured(prompt_tokens, seconds)

    def decode(self, work: Decode) -> Measured:
        prompts = work.prompts(self._step_tokens)
        requests = [
            self._add(
                prompt,
                output_tokens=work.context + work.sequences + 2 * DECODE_STEPS - len(prompt),
            )
            for prompt in prompts
        ]
        sampled: dict[str, int] = {}
        try:
            while len(sampled) < work.sequences:
                self._step(sampled)
            before, started = sum(sampled.values()), time.perf_counter()
            wanted = before + work.sequences * DECODE_STEPS
            while sum(sampled.values()) < wanted:
                self._step(sampled)
                if not self._engine.has_unfinished_requests():
                    raise RuntimeError("the sequences ended before enough tokens were sampled")
            seconds = time.perf_counter() - started
        finally:
            self._engine.abort_request(requests)
            while self._engine.has_unfinished_requests():
                self._engine.step()
        return Measured(sum(sampled.values()) - before, seconds)

    def score(self, window: Sequence[int]) -> list[float]:
        self._add(window, output_tokens=1, prompt_logprobs=0)
        found: list[float] = []
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                found = [
                    entry[token].logprob
                    for token, entry in zip(
                        window[1:], (output.prompt_logprobs or [])[1:], strict=True
                    )
                ]
        return found

    def _step(self, sampled: dict[str, int]) -> None:
        for output in self._engine.step():
            sampled[output.request_id] = len(output.outputs[0].token_ids)

    def _add(
        self, prompt: Sequence[int], *, output_tokens: int, prompt_logprobs: int | None = None
    ) -> str:
        request_id = str(next(self._numbers))
        self._engine.add_request(
            request_id,
            {"prompt_token_ids": list(prompt)},
            self._sampling(
                max_tokens=output_tokens,
                temperature=0.0,
                ignore_eos=True,
                prompt_logprobs=prompt_logprobs,
            ),
        )
        return request_id


def preload_openmp() -> None:
    """Begin anew with Intel's OpenMP: vLLM's documentation asks for it, its package has it."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    if "LD_PRELOAD" not in os.environ and library.exists():
        arguments = [sys.executable, "-m", "bench.peers.drivers.vllm", *sys.argv[1:]]
        os.execve(sys.executable, arguments, os.environ | {"LD_PRELOAD": str(library)})


if __name__ == "__main__":
    preload_openmp()
    serve(Vllm)
