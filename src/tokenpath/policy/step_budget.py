"""How much of the prompts a step may compute while others' streams wait for it.

A stream gets its next token when the step ends, so a step that computes much of a prompt is a gap
in every stream. The time of a step is taken to be a sum of four costs: of any step, of a decoding
token, of a prompt's token, and of a prompt's token for each token before it (attention). They are
estimated from the steps that were measured, the latest counting most, and a prompt gets as many
tokens as the target leaves room for: fewer, the more of it is already computed.

Prompts never starve: a step has room for ``LEAST_TOKENS`` of them even where decoding alone takes
as long as the target. On a CPU so few ride along for little, as the weights are read anyway.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from tokenpath.policy.sequence import Chunk, StepPlan

LEAST_TOKENS: Final = 16
"""Prompt tokens that a step may always compute."""
FIRST_TOKENS: Final = 64
"""The same while nothing is known yet of what a prompt's token costs."""
_SCALES: Final = (1.0, 8.0, 64.0, 65536.0)
"""Typical sizes of what is counted, so that the estimates have like weights."""
_FORGET: Final = 0.97
"""What a measurement still counts after the next one: some 30 steps are remembered."""
_INERTIA: Final = 0.02
"""How much an estimate keeps to what it was where the recent steps say nothing of it."""
_OUTLIER: Final = 3.0
"""A step that took so many times as long as expected counts as this much: it was disturbed."""
_SPREAD: Final = 0.1
"""Weight of a step in the mean error of the estimates."""
_LEAST_SPREAD, _MOST_SPREAD = 0.08, 0.4

Vector = tuple[float, float, float, float]


def is_prefill(chunk: Chunk) -> bool:
    """Whether a chunk computes a part of a prompt, rather than what was sampled last."""
    return chunk.known > 1 and chunk.start < chunk.sequence.prompt_tokens


class StepBudget:
    """The estimates, and the room that they leave. Single-threaded."""

    def __init__(self, target_s: float) -> None:
        """``target_s`` is the longest that a step should take while anything decodes."""
        if not target_s > 0:
            raise ValueError("target_s must be above 0")
        self.target_s = target_s
        self.limited_total = 0
        """Steps whose prompts got less than they could have had."""
        self._costs: Vector = (0.0, 0.0, 0.0, 0.0)
        """Seconds for each of ``_SCALES``."""
        self._squares = [[0.0] * 4 for _ in range(4)]
        self._products = [0.0] * 4
        self._spread = _MOST_SPREAD / 2
        self._seen_prefill = False
        self._largest = FIRST_TOKENS // 2
        """Prompt tokens of the largest step that streams had to wait for."""

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step was computed as planned, in so many seconds."""
        decoding = sum(c.length for c in plan.chunks if not is_prefill(c))
        prompts = [(c.start, c.length) for c in plan.chunks if is_prefill(c)]
        counted = _counted(decoding, prompts)
        expected = sum(c * x for c, x in zip(self._costs, counted, strict=True))
        known = self._seen_prefill or not prompts
        if known and expected > 0:
            seconds = min(seconds, _OUTLIER * expected)
            if decoding:
                self._largest = max(self._largest, sum(length for _, length in prompts))
                error = min(abs(seconds - expected) / expected, 1.0)
                self._spread += _SPREAD * (error - self._spread)
        self._seen_prefill = self._seen_prefill or bool(prompts)
        for i, row in enumerate(self._squares):
            self._products[i] = self._products[i] * _FORGET + counted[i] * seconds
            for j in range(4):
                row[j] = row[j] * _FORGET + counted[i] * counted[j]
        self._costs = _fitted(self._squares, self._products, self._costs)

    def expected_s(self, decoding: int, prompts: list[tuple[int, int]]) -> float:
        """Seconds of a step with so many decoding tokens and chunks of (start, length)."""
        counted = _counted(decoding, prompts)
        return sum(c * x for c, x in zip(self._costs, counted, strict=True))

    def allowance(self, decoding: int) -> Allowance | None:
        """What the prompts may have of the next step; None if nobody waits for it: all of it."""
        if not decoding:
            return None
        if not self._seen_prefill:
            return Allowance(0.0, 0.0, 0.0, floor=FIRST_TOKENS, ceiling=FIRST_TOKENS)
        # The target less the usual error of the estimates, so that most steps keep to it.
        spread = min(max(self._spread, _LEAST_SPREAD), _MOST_SPREAD)
        left_s = self.target_s / (1 + 2 * spread) - self.expected_s(decoding, [])
        return Allowance(
            max(left_s, 0.0),
            self._costs[2] / _SCALES[2],
            self._costs[3] / _SCALES[3],
            floor=LEAST_TOKENS,
            # Estimates are not trusted far beyond what was tried: twice the tokens may be five
            # times the pairs, whose cost the first steps say little of.
            ceiling=self._largest * 3 // 2,
        )


@dataclass(slots=True)
class Allowance:
    """What is left of one step for prompts."""

    left_s: float
    token_s: float
    """Of a prompt's token."""
    pair_s: float
    """Of a prompt's token and one before it."""
    floor: int
    """Tokens that are left of those that a step may always compute."""
    ceiling: int
    """Tokens that are left of the most that a step may compute."""

    def most(self, start: int) -> int:
        """Tokens that fit into what is left, the first of them at position ``start``."""
        linear, square = self.token_s + self.pair_s * start, self.pair_s / 2
        # square n² + linear n = left_s, in the form that is exact for a small square
        divisor = linear + math.sqrt(linear * linear + 4 * square * self.left_s)
        if divisor * self.ceiling > 2 * self.left_s:
            return max(int(2 * self.left_s / divisor), self.floor)
        return self.ceiling if self.left_s > 0 else self.floor

    def take(self, start: int, length: int) -> None:
        """A prompt's chunk was planned."""
        used = length * (self.token_s + self.pair_s * (start + length / 2))
        self.left_s = max(self.left_s - used, 0.0)
        self.floor = max(self.floor - length, 0)
        self.ceiling = max(self.ceiling - length, 0)

    def set_aside(self) -> Allowance:
        """Keep half of what is left, and return it, until ``put_back``."""
        kept = replace(
            self,
            left_s=self.left_s / 2,
            floor=self.floor - self.floor // 2,
            ceiling=self.ceiling - self.ceiling // 2,
        )
        self.left_s -= kept.left_s
        self.floor -= kept.floor
        self.ceiling -= kept.ceiling
        return kept

    def put_back(self, kept: Allowance) -> None:
        """Add what was set aside."""
        self.left_s += kept.left_s
        self.floor += kept.floor
        self.ceiling += kept.ceiling


def _counted(decoding: int, prompts: list[tuple[int, int]]) -> Vector:
    tokens = sum(length for _, length in prompts)
    pairs = sum(length * (start + length / 2) for start, length in prompts)
    _, rows, some, many = _SCALES
    return 1.0, decoding / rows, tokens / some, pairs / many


def _fitted(squares: list[list[float]], products: list[float], before: Vector) -> Vector:
    """Least squares, held to the estimates before where the data leaves a choice; none negative.

    A cost that comes out negative is set to 0 and the others are fitted again without it.
    """
    free = [0, 1, 2, 3]
    while free:
        matrix = [
            [squares[i][j] + (_INERTIA if i == j else 0.0) for j in free]
            + [products[i] + _INERTIA * before[i]]
            for i in free
        ]
        found = dict(zip(free, _solved(matrix), strict=True))
        negative = [i for i in free if found[i] < 0]
        if not negative:
            return found.get(0, 0.0), found.get(1, 0.0), found.get(2, 0.0), found.get(3, 0.0)
        free.remove(min(negative, key=found.__getitem__))
    return before


def _solved(rows: list[list[float]]) -> list[float]:
    """The solution of a positive definite system; each row ends with its right-hand side."""
    size = len(rows)
    for k in range(size):
        for i in range(k + 1, size):
            factor = rows[i][k] / rows[k][k]
            for j in range(k, size + 1):
                rows[i][j] -= factor * rows[k][j]
    found = [0.0] * size
    for k in reversed(range(size)):
        known = sum(rows[k][j] * found[j] for j in range(k + 1, size))
        found[k] = (rows[k][size] - known) / rows[k][k]
    return found
