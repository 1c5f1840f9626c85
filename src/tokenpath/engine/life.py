"""The life of an engine process as a state machine: the table of legal moves, and the one function.

::

    LOADING ──> READY ──> SETTLING ──> RELEASING ──> ASLEEP ──> WAKING ──> READY
                  ^           │                        ^           │
                  └───────────┘ a request came         └───────────┘ could not be loaded

``SETTLING`` waits for running requests to end and may be called off; from ``RELEASING`` on there is
no way back but to wake. From everywhere the process may be told to drain, and then ends.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final


class EngineState(enum.StrEnum):
    """Where an engine process stands."""

    LOADING = "loading"
    READY = "ready"
    SETTLING = "settling"
    RELEASING = "releasing"
    ASLEEP = "asleep"
    WAKING = "waking"
    FAILED = "failed"
    DRAINING = "draining"


_S = EngineState
TRANSITIONS: Final[Mapping[EngineState, frozenset[EngineState]]] = MappingProxyType(
    {
        _S.LOADING: frozenset({_S.READY, _S.FAILED, _S.DRAINING}),
        _S.READY: frozenset({_S.SETTLING, _S.DRAINING}),
        _S.SETTLING: frozenset({_S.READY, _S.RELEASING, _S.DRAINING}),
        _S.RELEASING: frozenset({_S.ASLEEP, _S.DRAINING}),
        _S.ASLEEP: frozenset({_S.WAKING, _S.DRAINING}),
        _S.WAKING: frozenset({_S.READY, _S.ASLEEP, _S.DRAINING}),
        _S.FAILED: frozenset({_S.DRAINING}),
        _S.DRAINING: frozenset(),
    }
)
COMPUTING: Final = frozenset({_S.READY, _S.SETTLING})
"""States in which there is a core that takes requests."""
RESTING: Final = frozenset({_S.RELEASING, _S.ASLEEP, _S.WAKING})
"""States in which there is none, but may be one again."""


class IllegalMoveError(Exception):
    """A move that the table does not have: a bug in the caller."""


def moved(state: EngineState, to: EngineState) -> EngineState:
    """The state after moving to ``to``. Raises ``IllegalMoveError``."""
    if to not in TRANSITIONS[state]:
        raise IllegalMoveError(f"an engine cannot go from {state} to {to}")
    return to
