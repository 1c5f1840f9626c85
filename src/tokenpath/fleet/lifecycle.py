"""The life of a replica as a state machine: the table of legal moves, and the one function.

::

    PENDING ──> LOADING ──> READY ──> DRAINING ──> STOPPED
       ^           │          │
       └───────────┴──────────┘   the process ended: start it again after a pause

    READY ──> FALLING_ASLEEP ──> ASLEEP ──> WAKING ──> READY
      ^             │               ^          │
      └─────────────┘ called off    └──────────┘ could not be loaded

A link made anew may find its engine anywhere on the second line, and a process may end there too.
From every state but ``STOPPED`` a replica may fail for good (``FAILED``) or be stopped; a failed
one may be started again on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from tokenpath.protocol.replica import ReplicaState

_S = ReplicaState

_LOADED = frozenset({_S.READY, _S.FALLING_ASLEEP, _S.ASLEEP, _S.WAKING})
_ENDS = frozenset({_S.DRAINING, _S.PENDING, _S.FAILED, _S.STOPPED})

TRANSITIONS: Final[Mapping[ReplicaState, frozenset[ReplicaState]]] = MappingProxyType(
    {
        _S.PENDING: frozenset({_S.LOADING, _S.FAILED, _S.STOPPED}),
        _S.LOADING: _LOADED | _ENDS,
        _S.READY: _ENDS | {_S.FALLING_ASLEEP},
        _S.FALLING_ASLEEP: _ENDS | {_S.READY, _S.ASLEEP},
        _S.ASLEEP: _ENDS | {_S.WAKING},
        _S.WAKING: _ENDS | {_S.READY, _S.ASLEEP},
        _S.DRAINING: frozenset({_S.FAILED, _S.STOPPED}),
        _S.FAILED: frozenset({_S.PENDING, _S.STOPPED}),
        _S.STOPPED: frozenset(),
    }
)


class IllegalTransitionError(Exception):
    """A move that the table does not have: a bug in the caller."""


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """Where a replica stands, and why."""

    state: ReplicaState = ReplicaState.PENDING
    reason: str = ""
    """One sentence for an operator; empty where the state says all."""


def move(life: Lifecycle, to: ReplicaState, reason: str = "") -> Lifecycle:
    """The life after moving to ``to``. Raises ``IllegalTransitionError``."""
    if to not in TRANSITIONS[life.state]:
        raise IllegalTransitionError(f"a replica cannot go from {life.state} to {to} ({reason})")
    return Lifecycle(to, reason)
