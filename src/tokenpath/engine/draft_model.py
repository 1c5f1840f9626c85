"""The drafter that asks a smaller model of the same vocabulary how a text goes on.

It has keys and values of its own. Before it drafts for a sequence it computes what it has not seen
of it, in chunks; then it goes on greedily, all sequences of a step in one batch. Keys and values of
what was drafted and not confirmed are written over when the place is computed again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Protocol

import torch

from tokenpath.engine.rows import TORCH, Reducer, Rows
from tokenpath.policy.blocks import BlockPool
from tokenpath.policy.sequence import Chunk, Sequence, StepPlan
from tokenpath.policy.speculator import Guess
from tokenpath.policy.step_costs import StepCosts

_CHANCE = 0.6
"""That a drafted token is confirmed, before anything is known: what small models of a family reach
on ordinary text, rather less."""
log = logging.getLogger("tokenpath.engine")


class Runner(Protocol):
    """Computes plans; see ``engine.runner.ModelRunner``."""

    def run(self, plan: StepPlan) -> torch.Tensor:
        """Float32 ``[sampled rows, vocab]``."""
        ...


class ModelDrafter:
    """A ``policy.speculator.Drafter``. Single-threaded."""

    kinds: Seq[float] = (_CHANCE,)

    def __init__(
        self,
        runner: Runner,
        *,
        num_blocks: int,
        block_tokens: int,
        step_tokens: int,
        vocab: int,
        reducer: Reducer = TORCH,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``runner`` has ``num_blocks`` blocks of ``block_tokens`` tokens, for this drafter alone.

        ``step_tokens`` is the most that is computed at a time; ``vocab``, how many ids both models
        have.
        """
        self._runner = runner
        self._pool = BlockPool(num_blocks)
        self._block_tokens = block_tokens
        self._step_tokens = step_tokens
        self._vocab = vocab
        self._reducer = reducer
        self._clock = clock
        self._costs = StepCosts()
        self._shadows: dict[str, Sequence] = {}
        """By request id: the sequence as far as this model has seen it, and what it guessed."""
        self._targets: dict[str, Sequence] = {}
        self._broken = False

    def offers(self, sequences: Seq[Sequence], most: int) -> Mapping[str, Guess]:
        """See ``Drafter``; nothing is computed."""
        if self._broken:
            return {}
        self._targets = {one.request_id: one for one in sequences}
        return {one.request_id: Guess(0, most) for one in sequences}

    def depth_s(self, sequences: int) -> float:
        """See ``Drafter``; nothing is known before the first draft."""
        return self._costs.seconds(sequences) or 0.0

    def draft(self, lengths: Mapping[str, int]) -> Mapping[str, Seq[int]]:
        """See ``Drafter``.

        A sequence gets no draft while the model still reads it, or if there is no room for it. If
        the model fails, it is not asked again: drafts are not worth a request.
        """
        if not lengths:
            return {}
        try:
            return self._draft(lengths)
        except Exception:
            log.exception("the draft model failed; going on without it")
            self._broken = True
            return {}

    def forget(self, request_id: str) -> None:
        """See ``Drafter``."""
        shadow = self._shadows.pop(request_id, None)
        if shadow is not None:
            self._pool.release(shadow.blocks)
        self._targets.pop(request_id, None)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` naming the first broken invariant."""
        self._pool.check_integrity(shadow.blocks for shadow in self._shadows.values())

    def _draft(self, lengths: Mapping[str, int]) -> dict[str, list[int]]:
        shadows = [self._followed(name) for name in lengths]
        known = {shadow.request_id: len(shadow.token_ids) for shadow in shadows}
        wanted = shadows
        for _ in range(max(lengths.values())):
            self._advance(wanted, set(lengths))
            wanted = [
                shadow
                for shadow in wanted
                if 0 < self._made(shadow, known) < lengths[shadow.request_id]
            ]
            if not wanted:
                break
        return {
            shadow.request_id: shadow.token_ids[known[shadow.request_id] :]
            for shadow in shadows
            if self._made(shadow, known)
        }

    @staticmethod
    def _made(shadow: Sequence, known: Mapping[str, int]) -> int:
        return len(shadow.token_ids) - known[shadow.request_id]

    def _followed(self, request_id: str) -> Sequence:
        """The shadow of a sequence, brought to the sequence's tokens."""
        target = self._targets[request_id]
        shadow = self._shadows.get(request_id)
        if shadow is None:
            shadow = Sequence(request_id, [], 0, max_tokens=0)
            self._shadows[request_id] = shadow
        # Tokens up to ``prompt_tokens`` were the sequence's at the last time, and always are.
        same = shadow.prompt_tokens
        while (
            same < min(len(shadow.token_ids), len(target.token_ids))
            and shadow.token_ids[same] == target.token_ids[same]
        ):
            same += 1
        shadow.token_ids[same:] = target.token_ids[same:]
        shadow.prompt_tokens = len(shadow.token_ids)
        # One token is left to compute, so that there are logits to go on from.
        shadow.computed = min(shadow.computed, same, len(shadow.token_ids) - 1)
        return shadow

    def _advance(self, shadows: Seq[Sequence], needed: set[str]) -> None:
        """Compute what is left of the shadows, and append a token to those of which nothing is."""
        chunks: list[Chunk] = []
        budget = self._step_tokens
        for shadow in shadows:
            length = min(shadow.uncomputed, budget)
            if length and self._grow(shadow, shadow.computed + length, needed):
                chunks.append(Chunk(shadow, shadow.computed, length))
                budget -= length
        if not chunks:
            return
        started = self._clock()
        logits = self._runner.run(StepPlan(tuple(chunks)))
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        for chunk in chunks:
            chunk.sequence.computed += chunk.length
        if sampling:
            best = Rows(logits[:, : self._vocab], self._reducer).argmax().tolist()
            for shadow, token_id in zip(sampling, best, strict=True):
                shadow.token_ids.append(token_id)
        if all(chunk.length <= 2 for chunk in chunks):  # noqa: PLR2004 - the last drafted one, too
            self._costs.measured(len(chunks), self._clock() - started)

    def _grow(self, shadow: Sequence, tokens: int, needed: set[str]) -> bool:
        """Make a shadow's blocks cover so many tokens, taking those of sequences not ``needed``."""
        missing = -(-tokens // self._block_tokens) - len(shadow.blocks)
        if missing <= 0:
            return True
        for request_id in list(self._shadows):
            if self._pool.available >= missing:
                break
            if request_id not in needed:
                self._pool.release(self._shadows.pop(request_id).blocks)
        taken = self._pool.allocate(missing)
        if taken is None:
            return False
        shadow.blocks += taken
        return True
