"""Drives a ``ModelRunner`` by hand-made plans, without a scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tokenpath.engine.runner import ModelRunner
from tokenpath.policy.sequence import Chunk, Sequence, StepPlan


@dataclass
class Blocks:
    """Hands out a pool's blocks in a scrambled order, so that neighbours are never adjacent."""

    count: int
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.free = torch.randperm(self.count, generator=generator).tolist()

    def cover(self, sequence: Sequence, tokens: int, block_tokens: int) -> None:
        """Give a sequence blocks for its first ``tokens`` tokens."""
        while len(sequence.blocks) * block_tokens < tokens:
            sequence.blocks.append(self.free.pop())


@dataclass
class Driver:
    """Greedy generation with chunked prefill for any number of sequences at once."""

    runner: ModelRunner
    blocks: Blocks = field(init=False)

    def __post_init__(self) -> None:
        self.blocks = Blocks(self.runner.num_blocks)

    def sequence(self, name: str, prompt: list[int], *, prefix: Sequence | None = None) -> Sequence:
        """A sequence; with ``prefix``, its first blocks are those of another's equal tokens."""
        sequence = Sequence(name, list(prompt), len(prompt), max_tokens=0)
        if prefix is not None:
            size = self.runner.block_tokens
            shared = 0
            limit = min(prefix.computed, len(prompt) - 1) // size
            while shared < limit and (
                prefix.token_ids[: (shared + 1) * size] == prompt[: (shared + 1) * size]
            ):
                shared += 1
            sequence.blocks = prefix.blocks[:shared]
            sequence.computed = shared * size
        return sequence

    def generate(
        self, sequences: list[Sequence], *, new_tokens: int, chunk: int, stagger: int = 0
    ) -> dict[str, torch.Tensor]:
        """Append ``new_tokens`` greedy tokens to each; sequence ``i`` joins at step ``i * stagger``.

        Returns the logits each token was chosen from, [new_tokens, vocab] by request id.
        """
        logits: dict[str, list[torch.Tensor]] = {s.request_id: [] for s in sequences}
        step = 0
        while any(len(rows) < new_tokens for rows in logits.values()):
            live = [
                s
                for i, s in enumerate(sequences)
                if i * stagger <= step and len(logits[s.request_id]) < new_tokens
            ]
            plan = StepPlan(tuple(self._chunk(s, chunk) for s in live))
            rows = iter(self.runner.run(plan)) if plan.chunks else iter(())
            for planned in plan.chunks:
                sequence, samples = planned.sequence, planned.samples
                sequence.computed += planned.length
                if samples:
                    row = next(rows)
                    logits[sequence.request_id].append(row)
                    sequence.token_ids.append(int(row.argmax()))
            step += 1
        return {name: torch.stack(rows) for name, rows in logits.items()}

    def _chunk(self, sequence: Sequence, chunk: int) -> Chunk:
        length = min(chunk, sequence.uncomputed)
        self.blocks.cover(sequence, sequence.computed + length, self.runner.block_tokens)
        return Chunk(sequence, sequence.computed, length)
