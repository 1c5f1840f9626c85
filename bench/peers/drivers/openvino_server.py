"""Serves OpenVINO GenAI's continuous batching over HTTP, by `completions`.

It stands in for OpenVINO Model Server, which runs this same pipeline but is in no package index.
Text is made as GenAI's own text streamer makes it, in one call for all sequences of a step.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.peers.drivers.completions import Delta, serve

_KV_BLOCK_TOKENS = 32
_STEP_TOKENS = 512


@dataclass(slots=True)
class _Sequence:
    handle: Any
    left: int
    """Tokens still to come."""
    line: list[int] = field(default_factory=list)
    """Tokens since the last line break; text is decoded from them."""
    told: int = 0
    """Characters of the line that were given out."""

    def more(self, text: str, *, finished: bool) -> str:
        """What is new in ``text``, the decoded line; half a character is held back."""
        if text.endswith("\ufffd") and not finished:
            return ""
        fresh = text[self.told :]
        self.told = len(text)
        if text.endswith("\n"):
            self.line.clear()
            self.told = 0
        return fresh


class OpenVino:
    """A loaded pipeline: a GGUF file or a folder of OpenVINO's own form."""

    def __init__(self, model: str, *, threads: int, sequences: int, sequence_tokens: int) -> None:
        import openvino_genai as genai  # noqa: PLC0415 - only the engine's process is to load it

        scheduler = genai.SchedulerConfig()
        blocks = -(-sequence_tokens // _KV_BLOCK_TOKENS) + 1
        scheduler.num_kv_blocks = sequences * blocks + 64
        scheduler.max_num_seqs = sequences
        scheduler.max_num_batched_tokens = _STEP_TOKENS
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": threads}
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._tokenizer = self._pipeline.get_tokenizer()
        self._live: dict[int, _Sequence] = {}

    def add(self, number: int, prompt: list[int], output_tokens: int) -> None:
        import numpy as np  # noqa: PLC0415 - as above
        import openvino as ov  # noqa: PLC0415
        import openvino_genai as genai  # noqa: PLC0415

        config = genai.GenerationConfig()
        config.max_new_tokens = output_tokens
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        ids = ov.Tensor(np.array([prompt], dtype=np.int64))
        handle = self._pipeline.add_request(number, ids, config)
        self._live[number] = _Sequence(handle, output_tokens)

    def step(self) -> Sequence[Delta]:
        self._pipeline.step()
        got: dict[int, int] = {}
        for number, sequence in self._live.items():
            count = len(sequence.line)
            while sequence.handle.can_read():
                for output in sequence.handle.read().values():
                    sequence.line += output.generated_ids
            if len(sequence.line) > count:
                got[number] = len(sequence.line) - count
        if not got:
            return []
        texts = self._tokenizer.decode([self._live[number].line for number in got])
        return [
            self._delta(number, got[number], text) for number, text in zip(got, texts, strict=True)
        ]

    def _delta(self, number: int, tokens: int, text: str) -> Delta:
        sequence = self._live[number]
        sequence.left -= tokens
        finished = sequence.left <= 0
        if finished:
            del self._live[number]
        return Delta(number, sequence.more(text, finished=finished), tokens, finished)


def main() -> None:
    """Load, then serve until a signal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", required=True)
    for name in ("--port", "--threads", "--sequences", "--sequence-tokens"):
        parser.add_argument(name, type=int, required=True)
    parsed = parser.parse_args()
    load = functools.partial(
        OpenVino,
        parsed.model,
        threads=parsed.threads,
        sequences=parsed.sequences,
        sequence_tokens=parsed.sequence_tokens,
    )
    serve(load, parsed.host, parsed.port)


if __name__ == "__main__":
    main()
