"""What is measured, by name, and the random prompts of it: the same for every contender.

The names are those of `tokenpath bench engine`. This module runs in the environments of the rivals
as well as in tokenpath's own, so it imports only the standard library.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

DECODE_STEPS = 32
"""Steps of one measured span of decoding; every sequence gets a token in each."""
IDS = range(1_000, 100_000)
"""Token ids of prompts: plain text in the vocabulary of every model that is compared."""
ALL = (
    "prefill_512",
    "prefill_2048",
    *(f"decode_{sequences}_{context}" for context in (64, 1024) for sequences in (1, 4, 8, 16, 32)),
)
_NAME = re.compile(r"prefill_([1-9]\d{0,6})|decode_([1-9]\d{0,3})_([1-9]\d{0,6})")


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prompt of so many tokens, computed up to its first output token."""

    tokens: int

    @property
    def name(self) -> str:
        return f"prefill_{self.tokens}"

    def prompt(self) -> list[int]:
        """Token ids."""
        return _random_ids(self.name, self.tokens)


@dataclass(frozen=True, slots=True)
class Decode:
    """Sequences that advance together from a context of so many tokens each."""

    sequences: int
    context: int

    @property
    def name(self) -> str:
        return f"decode_{self.sequences}_{self.context}"

    def prompts(self, step_tokens: int | None = None) -> list[list[int]]:
        """Token ids of each sequence.

        With ``step_tokens``, the budget of a step of an engine with continuous batching, a sequence
        that is computed before the others has a shorter prompt: it decodes while they are computed,
        and all contexts are about equal when the last one is.
        """
        waits = [0] * self.sequences
        if step_tokens is not None:
            waits = [
                (self.sequences - 1 - index) * self.context // step_tokens
                for index in range(self.sequences)
            ]
        return [
            _random_ids(f"{self.name} {index}", max(1, self.context - wait))
            for index, wait in enumerate(waits)
        ]


Work = Prefill | Decode


def parse(name: str) -> Work:
    """The work of a name such as ``prefill_512`` or ``decode_8_1024``; ``ValueError`` if none."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(
            f"{name!r} is no work; works are prefill_TOKENS and decode_SEQUENCES_CONTEXT"
        )
    if found[1]:
        return Prefill(int(found[1]))
    return Decode(int(found[2]), int(found[3]))


def _random_ids(seed: str, count: int) -> list[int]:
    return random.Random(seed).choices(IDS, k=count)
