"""Whether a request can still make its deadline.

A prompt takes at least as long as its tokens would at the best rate that the engine was lately
seen to have. Nothing else is held against it: not who is before it in the queue, nor its
neighbours, nor that a longer context is slower. So a request is given up only when it could not
have its first token in time on an engine of its own, and every second spent on it would be lost
to others.
"""

from __future__ import annotations

from typing import Final

from tokenpath.policy.sequence import StepPlan
from tokenpath.policy.step_budget import is_prefill

SAFETY: Final = 0.8
"""Of the best rate's time, what a prompt is taken to need at least."""
_LEAST_TOKENS: Final = 16
"""A step with fewer prompt tokens says nothing of their rate."""
_STEPS: Final = 3
"""Steps to be seen before anything is foretold: the first ones are cold."""
_DRIFT: Final = 1.002
"""The best rate fades with each step, by half in some 350: machines get slower too."""


class Foresight:
    """The best rate at which prompts were computed. Single-threaded."""

    def __init__(self) -> None:
        self._steps = 0
        self._token_s = 0.0

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step was computed, in so many seconds."""
        tokens = sum(chunk.length for chunk in plan.chunks if is_prefill(chunk))
        if tokens < _LEAST_TOKENS:
            return
        seen = seconds / plan.tokens
        self._steps += 1
        self._token_s = seen if self._steps == 1 else min(self._token_s * _DRIFT, seen)

    def least_s(self, tokens: int) -> float:
        """Seconds that so many prompt tokens take at the very least; 0 while nothing is known."""
        return 0.0 if self._steps < _STEPS else SAFETY * tokens * self._token_s
