"""Random numbers that depend on nothing but a seed and a place in the output.

A generator with hidden state would make a sequence's output depend on when it was preempted, which
replica it ran on, or who shared its batch. Here a draw is a pure function of (seed, position).
"""

from __future__ import annotations

import secrets

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_STAGE = 0xD1B54A32D192ED03


def uniform(seed: int, position: int, stage: int = 0) -> float:
    """A draw of one seed at one output position, uniform in [0, 1) on a grid of 2**-53.

    A choice made in several stages takes one draw a stage.

    ``seed`` may be any integer (its low 64 bits count); ``position`` is the number of output
    tokens before this one. Neighbouring seeds and positions give unrelated numbers.
    """
    key = _mix((seed + _GOLDEN + stage * _STAGE) & _MASK)
    return (_mix((key + (position + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def fresh_seed() -> int:
    """A seed from the operating system, for requests that bring none."""
    return secrets.randbits(63)


def _mix(value: int) -> int:
    """The finalizer of SplitMix64: every input bit moves every output bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
