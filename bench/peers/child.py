"""Runs one driver as a child process, and survives what it does: crash, hang, nonsense.

Only one child lives at a time, so that the memory and the processors are one contender's. A child
that does not answer in time is ended by its own process group; a new one goes on with the works
that are left.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bench.peers.install import last_line

LOAD = "load_s"
MEMORY = "rss_bytes"
PERPLEXITY = "perplexity"
_GRACE_S = 10.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One thing that a driver said: a figure, or why there is none."""

    work: str
    """A work's name, or ``LOAD``, ``MEMORY`` or ``PERPLEXITY``."""
    value: float | None
    """Tokens/s of a work; else in the name's unit."""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a driver may be silent, in seconds."""

    load_s: float
    work_s: float


def measure(
    command: Callable[[Sequence[str]], list[str]],
    works: Sequence[str],
    limits: Limits,
    *,
    folder: Path,
    log: Path,
    answers_at_end: bool = False,
) -> Iterator[Answer]:
    """Answers for all ``works`` (and memory and load time), whatever the driver does.

    ``command`` makes a command line for some of the works. It is run in ``folder``; what the driver
    says on stderr is added to ``log``.
    """
    left = list(works)
    while left:
        loaded = False
        reason = "it ended without an answer"
        try:
            for answer in _run(
                command(left), left, limits, folder=folder, log=log, answers_at_end=answers_at_end
            ):
                loaded = loaded or answer.work == LOAD
                if answer.work in left:
                    left.remove(answer.work)
                yield answer
        except _DriverError as error:
            reason = str(error)
        if not left:
            return
        # The first work without an answer is the one that it died of. What does not load, or
        # answers for all works together, will do no better with the others.
        lost = [left[0]] if loaded and not answers_at_end else list(left)
        for work in lost:
            left.remove(work)
            yield Answer(work, None, reason)


class _DriverError(Exception):
    """The child is gone before it answered everything."""


def _run(
    command: list[str],
    works: Sequence[str],
    limits: Limits,
    *,
    folder: Path,
    log: Path,
    answers_at_end: bool,
) -> Iterator[Answer]:
    with log.open("a") as errors:
        child = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        assert child.stdout is not None
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        reader = threading.Thread(target=_forward, args=(child.stdout, lines), daemon=True)
        reader.start()
        allowed = limits.load_s
        if answers_at_end:
            allowed += limits.work_s * len(works)
        try:
            while (line := _next(lines, allowed)) is not None:
                yield from _answers(line)
                allowed = limits.work_s
            status = child.wait(_GRACE_S)
        except (queue.Empty, subprocess.TimeoutExpired):
            raise _DriverError(f"no answer within {allowed:g} s") from None
        finally:
            end(child)
    if status:
        how = f"signal {-status}" if status < 0 else f"status {status}"
        raise _DriverError(f"ended with {how}: {last_line(log)}")


def _forward(stdout: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in stdout:
        lines.put(line)
    lines.put(None)


def _next(lines: queue.SimpleQueue[str | None], allowed_s: float) -> str | None:
    return lines.get(timeout=allowed_s)


def _answers(line: str) -> Iterator[Answer]:
    try:
        said: Mapping[str, Any] = json.loads(line)
    except ValueError:
        raise _DriverError(
            f"answered with something else than JSON: {line.strip()[:80]!r}"
        ) from None
    if "work" in said:
        yield Answer(said["work"], said.get("tokens_per_s"), said.get("error"))
        return
    for name in (LOAD, MEMORY, PERPLEXITY):
        if name in said:
            yield Answer(name, said[name], said.get("error"))


def end(child: subprocess.Popen[str]) -> None:
    """End the child and all that it started; it leads a process group of its own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + _GRACE_S
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
    child.wait()
