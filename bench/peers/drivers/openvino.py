"""Drives OpenVINO GenAI's continuous batching, step by step, with token ids.

Options: ``batch_tokens=N`` (budget of a step) and ``property.NAME=VALUE`` for OpenVINO's own.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from bench.peers.drivers.harness import Measured, Settings, serve
from bench.peers.drivers.works import DECODE_STEPS, Decode, Prefill

_KV_BLOCK_TOKENS = 32
_PROPERTY = "property."


class OpenVino:
    """A loaded pipeline: a GGUF file or a folder of OpenVINO's own form."""

    def __init__(self, settings: Settings) -> None:
        self._step_tokens = int(settings.options.get("batch_tokens", "512"))
        scheduler = genai.SchedulerConfig()
        blocks = -(-settings.sequence_tokens // _KV_BLOCK_TOKENS) + 1
        scheduler.num_kv_blocks = settings.sequences * blocks + 64
        scheduler.max_num_seqs = max(64, settings.sequences)
        scheduler.max_num_batched_tokens = self._step_tokens
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": settings.threads}
        properties |= {
            name.removeprefix(_PROPERTY): value
            for name, value in settings.options.items()
            if name.startswith(_PROPERTY)
        }
        self._pipeline = genai.ContinuousBatchingPipeline(
            settings.model, scheduler, "CPU", properties
        )
        self._tokenizer = self._pipeline.get_tokenizer()
        self._numbers = itertools.count()

    def prefill(self, work: Prefill) -> Measured:
        prompt = work.prompt()
        started = time.perf_counter()
        handle = self._add(prompt, output_tokens=1)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        sampled = _read(handle)
        self._tokenizer.decode(sampled)
        seconds = time.perf_counter() - started
        if len(sampled) != 1:
            raise RuntimeError(f"{len(sampled)} tokens were sampled instead of 1")
        return Measured(len(prompt), seconds)

    def decode(self, work: Decode) -> Measured:
        handles = [
            self._add(
                prompt, output_tokens=work.context + work.sequences + DECODE_STEPS + 2 - len(prompt)
            )
            for prompt in work.prompts(self._step_tokens)
        ]
        try:
            waiting = set(range(len(handles)))
            while waiting:
                self._pipeline.step()
                waiting -= {number for number in waiting if handles[number].can_read()}
            for handle in handles:
                _read(handle)
            sampled: list[list[int]] = [[] for _ in handles]
            started = time.perf_counter()
            for _ in range(DECODE_STEPS):
                self._pipeline.step()
                for tokens, handle in zip(sampled, handles, strict=True):
                    tokens.extend(_read(handle))
            self._tokenizer.decode(sampled)
            seconds = time.perf_counter() - started
        finally:
            for handle in handles:
                handle.stop()
            self._pipeline.step()
        count = sum(map(len, sampled))
        if count != work.sequences * DECODE_STEPS:
            raise RuntimeError(
                f"{count} tokens were sampled instead of {work.sequences * DECODE_STEPS}"
            )
        return Measured(count, seconds)

    def score(self, window: Sequence[int]) -> list[float]:
        config = self._config(1)
        config.echo = True
        config.logprobs = 1
        handle = self._request(window, config)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        scores: list[float] = []
        while handle.can_read():
            for output in handle.read().values():
                scores += output.generated_log_probs
        found = scores[1 : len(window)]
        if len(found) != len(window) - 1 or not all(map(math.isfinite, found)):
            raise RuntimeError(f"{len(scores)} log probabilities came for {len(window)} tokens")
        return found

    def _add(self, prompt: Sequence[int], *, output_tokens: int) -> Any:
        return self._request(prompt, self._config(output_tokens))

    def _request(self, prompt: Sequence[int], config: Any) -> Any:
        ids = ov.Tensor(np.array([prompt], dtype=np.int64))
        return self._pipeline.add_request(next(self._numbers), ids, config)

    def _config(self, output_tokens: int) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = output_tokens
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        return config


def _read(handle: Any) -> list[int]:
    """The token ids that were sampled since the last call."""
    found: list[int] = []
    while handle.can_read():
        for output in handle.read().values():
            found += output.generated_ids
    return found


if __name__ == "__main__":
    serve(OpenVino)
