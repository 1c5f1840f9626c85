"""Rank 0's hold on the other ranks: starts them, hears how far they are, and watches them.

Each rank has a thread here that starts it and reads what it says until it ends. That a rank ended,
for whatever reason, is the end of this engine: its part of the KV pool is gone. What waits for it
is told at once, and whoever watches too.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from tokenpath.engine.batch import StepBatch
from tokenpath.engine.loading import Progress
from tokenpath.engine.parallel.messages import (
    Answer,
    Ended,
    Loading,
    Opened,
    RankOrder,
    Ready,
    write_batch,
)
from tokenpath.protocol.errors import ReplicaLostError, TokenpathError, from_info

RANK_COMMAND: Final = (sys.executable, "-P", "-m", "tokenpath.engine.parallel.follow")
OPEN_TIMEOUT_S: Final = 300.0
"""For a process to import torch and read the model's metadata, on a machine busy with others."""
END_S: Final = 3.0
NOTICE_S: Final = 1.0
"""A rank that is lost is mostly a process that ends; wait this long to learn how."""
_decoder = msgspec.json.Decoder(Answer)


class _Member:
    """One other rank, as far as it is known; its fields are the crew's lock's."""

    def __init__(self, order: RankOrder) -> None:
        self.order = order
        self.process: subprocess.Popen[bytes] | None = None
        self.opened = False
        self.ready: Ready | None = None
        self.error: TokenpathError | None = None
        self.ended = False


class Crew:
    """The ranks beside rank 0. Everything but ``close`` is called from one thread."""

    def __init__(
        self,
        orders: Sequence[RankOrder],
        *,
        descriptors: Sequence[int],
        timeout_s: float,
        progress: Progress = lambda _what, _fraction: None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """Start a process for each order.

        ``descriptors`` are handed down to them; ``progress`` is told how far they are, from threads
        of ours; ``on_close`` is called when none is left.
        """
        self.weight_bytes = 0
        """Of all of them together, once they are ready."""
        self._progress = progress
        self._on_close = on_close
        self._members = [_Member(order) for order in orders]
        self._descriptors = tuple(descriptors)
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._closing = False
        self._lost: ReplicaLostError | None = None
        self._on_lost: list[Callable[[ReplicaLostError], None]] = []
        for member in self._members:
            # A thread of its own, which lasts as long as the process: Linux ends a process that
            # wishes it when the *thread* that started it ends.
            threading.Thread(
                target=self._attend, args=(member,), name=f"rank {member.order.share.rank}",
                daemon=True,
            ).start()  # fmt: skip

    @property
    def pids(self) -> list[int]:
        """Of the processes that were started, by rank."""
        with self._changed:
            return [m.process.pid for m in self._members if m.process is not None]

    def wait_opened(self) -> None:
        """Until every rank is about to meet the others. Raises what a rank ended with."""
        deadline = time.monotonic() + OPEN_TIMEOUT_S
        with self._changed:
            while not all(member.opened for member in self._members):
                self._raise_failed()
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise ReplicaLostError(
                        f"a rank of this engine did not start within {OPEN_TIMEOUT_S:g} s"
                    )

    def wait_ready(self) -> None:
        """Until every rank is loaded. Raises as ``wait_opened``."""
        with self._changed:
            while not all(member.ready for member in self._members):
                self._raise_failed()
                self._changed.wait()
            self.weight_bytes = sum(m.ready.weight_bytes for m in self._members if m.ready)

    def watch(self, on_lost: Callable[[ReplicaLostError], None]) -> None:
        """Call this from any thread as soon as a rank is lost; at once if one is."""
        with self._changed:
            self._on_lost.append(on_lost)
            lost = self._lost
        if lost is not None:
            on_lost(lost)

    def send(self, batch: StepBatch) -> None:
        """Let every rank compute a step. Raises ``ReplicaLostError``."""
        frame = write_batch(batch)
        deadline = time.monotonic() + self._timeout_s
        for member in self._members:
            if self._lost is not None:
                raise self._lost
            self._write(member, frame, deadline)

    def reason(self, error: Exception) -> ReplicaLostError:
        """The sentence for a step that failed with ``error``: what became of the ranks."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None, NOTICE_S)
            if self._lost is not None:
                return self._lost
        if isinstance(error, ReplicaLostError):
            return error
        return ReplicaLostError(
            f"a step failed in rank 0 ({type(error).__name__}), and the ranks are out of step"
        )

    def close(self) -> None:
        """End all ranks; returns when none is left, within seconds."""
        with self._changed:
            self._closing = True
            processes = [m.process for m in self._members if m.process is not None]
        for process in processes:
            assert process.stdin is not None
            try:
                process.stdin.close()
            except OSError:
                continue  # it has ended
        until = time.monotonic() + END_S
        for process in processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._on_close()

    def _attend(self, member: _Member) -> None:
        try:
            process = subprocess.Popen(  # noqa: S603 - our own module
                RANK_COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=self._descriptors,
            )
        except OSError as error:
            self._end(member, f"cannot be started: {error}")
            return
        with self._changed:
            member.process = process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(member.order) + b"\n")
            process.stdin.flush()
        except OSError:
            pass  # it has ended, as is about to be seen
        os.set_blocking(process.stdin.fileno(), False)
        for line in process.stdout:
            self._hear(member, _decoder.decode(line))
        self._end(member, _how_it_ended(process.wait()))

    def _hear(self, member: _Member, answer: Answer) -> None:
        if isinstance(answer, Loading):
            rank = member.order.share.rank
            self._progress(f"rank {rank}: {answer.what}", answer.fraction)
            return
        with self._changed:
            match answer:
                case Opened():
                    member.opened = True
                case Ready():
                    member.ready = answer
                case Ended(error):
                    member.error = from_info(error)
            self._changed.notify_all()

    def _end(self, member: _Member, how: str) -> None:
        rank, size = member.order.share.rank, member.order.share.size
        with self._changed:
            member.ended = True
            if member.error is not None:
                how = f"failed: {member.error.message}"
            lost = None
            if self._lost is None and not self._closing:
                self._lost = lost = ReplicaLostError(
                    f"rank {rank} of the {size} that compute this model {how}"
                )
            self._changed.notify_all()
            watchers = list(self._on_lost)
        if lost is not None:
            for on_lost in watchers:
                on_lost(lost)

    def _raise_failed(self) -> None:
        for member in self._members:
            if member.ended and member.error is not None:
                raise member.error
        if self._lost is not None:
            raise self._lost

    def _write(self, member: _Member, frame: bytes, deadline: float) -> None:
        process = member.process
        assert process is not None
        assert process.stdin is not None
        descriptor = process.stdin.fileno()
        rest = memoryview(frame)
        while rest:
            try:
                rest = rest[os.write(descriptor, rest) :]
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([], [descriptor], [], left)[1]:
                    raise ReplicaLostError(
                        f"rank {member.order.share.rank} has taken no step for "
                        f"{self._timeout_s:g} seconds"
                    ) from None
            except OSError as error:
                raise self.reason(error) from error


class MeetingRoom:
    """What all ranks of an engine share on this machine: a private folder, and memory by stage."""

    def __init__(self, *, stages: int, memory_bytes: int) -> None:
        """``memory_bytes`` for every stage; 0: none is shared."""
        self.folder = Path(tempfile.mkdtemp(prefix="tokenpath-ranks-"))
        self.descriptors = [
            _shared_memory(memory_bytes) for _ in range(stages if memory_bytes else 0)
        ]

    def of(self, stage: int) -> int | None:
        """The descriptor of a stage's memory."""
        return self.descriptors[stage] if self.descriptors else None

    def close(self) -> None:
        """After everybody has come. Whoever has the memory mapped keeps it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []


def _shared_memory(size: int) -> int:
    """Zeros without a name in any folder, for us and the processes that we hand them down to."""
    descriptor: Any
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("tokenpath")
    else:
        descriptor, path = tempfile.mkstemp()
        os.unlink(path)  # noqa: PTH108 - the file behind the descriptor stays
    os.ftruncate(descriptor, size)
    return int(descriptor)


def _how_it_ended(exit_code: int) -> str:
    if exit_code < 0:
        hint = ", perhaps because memory ran out" if exit_code == -signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-exit_code).name}{hint}"
    return f"ended with exit code {exit_code}"
