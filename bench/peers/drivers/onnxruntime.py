"""Drives ONNX Runtime GenAI's generator. Batches are static: all sequences begin together."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime_genai as genai

from bench.peers.drivers.harness import Measured, Settings, serve
from bench.peers.drivers.works import DECODE_STEPS, Decode, Prefill


class OnnxRuntime:
    """A loaded folder."""

    def __init__(self, settings: Settings) -> None:
        config = genai.Config(settings.model)
        session = {"intra_op_num_threads": settings.threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self._model = genai.Model(config)
        self._tokenizer = genai.Tokenizer(self._model)

    def prefill(self, work: Prefill) -> Measured:
        generator = self._generator([work.prompt()], 1)
        started = time.perf_counter()
        generator.append_tokens(np.array([work.prompt()], dtype=np.int32))
        generator.generate_next_token()
        self._tokenizer.decode(generator.get_next_tokens())
        seconds = time.perf_counter() - started
        return Measured(generator.token_count() - 1, seconds)

    def decode(self, work: Decode) -> Measured:
        prompts = work.prompts()
        generator = self._generator(prompts, DECODE_STEPS + 1)
        generator.append_tokens(np.array(prompts, dtype=np.int32))
        generator.generate_next_token()
        sampled = []
        started = time.perf_counter()
        for _ in range(DECODE_STEPS):
            generator.generate_next_token()
            sampled.append(generator.get_next_tokens().copy())
        for tokens in np.stack(sampled, axis=1):
            self._tokenizer.decode(tokens)
        seconds = time.perf_counter() - started
        return Measured(sum(map(len, sampled)), seconds)

    def score(self, window: Sequence[int]) -> list[float]:
        generator = self._generator([list(window)], 1)
        generator.append_tokens(np.array([window[:-1]], dtype=np.int32))
        rows = generator.get_output("logits")[0].astype(np.float64)
        if len(rows) != len(window) - 1:
            raise NotImplementedError
        rows -= rows.max(axis=1, keepdims=True)
        norms = np.log(np.exp(rows).sum(axis=1))
        scores: list[float] = (rows[np.arange(len(rows)), list(window[1:])] - norms).tolist()
        return scores

    def _generator(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> Any:
        length = len(prompts[0]) + output_tokens
        parameters = genai.GeneratorParams(self._model)
        parameters.set_search_options(
            batch_size=len(prompts), max_length=length, min_length=length, do_sample=False
        )
        return genai.Generator(self._model, parameters)


if __name__ == "__main__":
    serve(OnnxRuntime)
