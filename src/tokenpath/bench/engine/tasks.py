"""Works with a measurement of their own: each compares two ways of doing the same."""

from __future__ import annotations

from typing import Protocol

from tokenpath.bench.engine import sharing, speculating, tiering
from tokenpath.bench.engine.first_token import Say
from tokenpath.bench.engine.loaded import LoadedModel
from tokenpath.bench.engine.works import Sharing, Speculating, Task, Tiering


class TaskFigure(Protocol):
    """What a task found; a ``msgspec.Struct``, which is written to the report as it is."""

    def ratios(self, name: str) -> dict[str, float]:
        """The figures at the report's top level, by key; ``name`` is the task's."""
        ...

    def sentence(self) -> str:
        """The line in the terminal's table."""
        ...


def measure(
    loaded: LoadedModel, task: Task, *, step_tokens: int, rounds: int, seed: int, say: Say
) -> TaskFigure:
    """Run a task. Raises ``EngineError`` if what it compares did not happen."""
    runner = loaded.runner
    match task:
        case Tiering():
            return tiering.measure(
                runner, task, step_tokens=step_tokens, rounds=rounds, seed=seed, say=say
            )
        case Sharing():
            return sharing.measure(
                runner, task, step_tokens=step_tokens, rounds=rounds, seed=seed, say=say
            )
        case Speculating():
            return speculating.measure(loaded, task, rounds=rounds, say=say)
