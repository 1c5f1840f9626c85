"""Drives CTranslate2's generator. Options: ``compute_type=NAME``.

Batches are static: all sequences begin together. Decoding is timed from the callback of the first
sampled tokens to that of the last.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ctranslate2
import tokenizers

from bench.peers.drivers.harness import Measured, Settings, serve
from bench.peers.drivers.works import DECODE_STEPS, Decode, Prefill


class CTranslate2:
    """A loaded folder."""

    def __init__(self, settings: Settings) -> None:
        folder = Path(settings.model)
        self._generator = ctranslate2.Generator(
            settings.model,
            device="cpu",
            compute_type=settings.options.get("compute_type", "int8"),
            inter_threads=1,
            intra_threads=settings.threads,
        )
        self._tokens: list[str] = json.loads((folder / "vocabulary.json").read_text())
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def prefill(self, work: Prefill) -> Measured:
        prompt = self._spelled(work.prompt())
        started = time.perf_counter()
        times, sampled = self._generate([prompt], 1)
        return Measured(len(prompt) if len(sampled[0]) == 1 else 0, times[0] - started)

    def decode(self, work: Decode) -> Measured:
        prompts = [self._spelled(prompt) for prompt in work.prompts()]
        times, sampled = self._generate(prompts, DECODE_STEPS + 1)
        started = time.perf_counter()
        self._tokenizer.decode_batch(sampled)
        text_s = time.perf_counter() - started
        counts = set(map(len, sampled))
        if counts != {DECODE_STEPS + 1} or len(times) != DECODE_STEPS + 1:
            raise RuntimeError(f"{counts} tokens were sampled in {len(times)} steps")
        return Measured(work.sequences * DECODE_STEPS, times[-1] - times[0] + text_s)

    def score(self, window: Sequence[int]) -> list[float]:
        (result,) = self._generator.score_batch([self._spelled(window)])
        scores: list[float] = result.log_probs
        return scores

    def _generate(
        self, prompts: list[list[str]], count: int
    ) -> tuple[list[float], list[list[int]]]:
        """When each step ended, and what was sampled."""
        times: list[float] = []

        def watch(result: Any) -> bool:
            if result.step == len(times):
                times.append(0.0)
            times[result.step] = time.perf_counter()
            return False

        results = self._generator.generate_batch(
            prompts,
            max_length=count,
            min_length=count,
            beam_size=1,
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=watch,
        )
        return times, [result.sequences_ids[0] for result in results]

    def _spelled(self, ids: Sequence[int]) -> list[str]:
        return [self._tokens[token] for token in ids]


if __name__ == "__main__":
    serve(CTranslate2)
