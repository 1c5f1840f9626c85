"""Scores token sequences through the engine: the log probability of each token after those before.

A window is submitted as a prompt; the scheduler cuts it into chunks, and every row of logits that a
chunk makes is read, not only the last. One window is in the engine at a time.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import torch

from tokenpath.engine.batch import build_batch
from tokenpath.engine.core import EngineCore
from tokenpath.engine.runner import ModelRunner
from tokenpath.policy.sequence import StepPlan
from tokenpath.protocol.errors import EngineError
from tokenpath.protocol.events import Failed
from tokenpath.protocol.request import (
    GREEDY_TEMPERATURE,
    GenerationRequest,
    SamplingParams,
    TokenPrompt,
)


class ScoringRunner:
    """Stands between core and runner, and keeps the scores of the sequence that is computed."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.target: Sequence[int] = ()
        """The window that is scored."""
        self.scores: list[float] = []
        """Natural-log probabilities of its second token, its third, and so on."""

    def run(self, plan: StepPlan) -> torch.Tensor:
        """As the runner's."""
        batch = build_batch(plan, self.runner.block_tokens)
        (chunk,) = plan.chunks
        every = dataclasses.replace(batch, sampled_rows=np.arange(chunk.length))
        logits = self.runner.forward(every)
        follow = self.target[chunk.start + 1 : chunk.start + chunk.length + 1]
        with torch.inference_mode():
            chosen = logits.gather(1, torch.tensor(follow)[:, None].to(logits.device)).squeeze(1)
            self.scores += (chosen - logits.logsumexp(-1)).tolist()
        return logits[-1:] if chunk.samples else logits[:0]


class Scorer:
    """Scores windows one after the other. Nothing else may use the core meanwhile."""

    def __init__(self, core: EngineCore, runner: ScoringRunner) -> None:
        self._core = core
        self._runner = runner
        self._numbers = itertools.count()

    def score(self, window: Sequence[int]) -> list[float]:
        """Log probabilities of all tokens of ``window`` (two or more) but the first.

        Raises ``EngineError`` if the engine fails or a score is not a number.
        """
        self._runner.target, self._runner.scores = window, []
        self._core.submit(
            GenerationRequest(
                request_id=f"score-{next(self._numbers)}",
                model=self._core.card.name,
                prompt=TokenPrompt(list(window[:-1])),  # the last one only has to be predicted
                sampling=SamplingParams(
                    max_tokens=1, temperature=GREEDY_TEMPERATURE, ignore_eos=True
                ),
            )
        )
        while self._core.has_work():
            for event in self._core.step():
                if isinstance(event, Failed):
                    raise EngineError(f"scoring failed: {event.error.message}")
        scores = self._runner.scores
        if len(scores) != len(window) - 1 or not np.isfinite(scores).all():
            raise EngineError(
                f"scoring a window of {len(window)} tokens gave {len(scores)} scores, "
                f"{int(np.isfinite(scores).sum())} of them finite"
            )
        return scores
