"""The threads that read and write blocks of the disk, so that no step waits for it.

The engine's thread owns all that is known of the tiers; a thread here is given a slot of the host's
memory and a name, and gives them back with what has come of it. Both queues are bounded: who finds
one full does without. Reading has a thread of its own, since somebody waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tokenpath.engine.kv_tiers.folder import BlockFolder
from tokenpath.engine.kv_tiers.sealed import Bytes, DamagedBlockError, Seal, read_block, write_block
from tokenpath.policy.tiers import BlockName

_WRITER_NICENESS = 10
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Write:
    """Write a slot's block, after deleting others."""

    name: BlockName
    slot: int
    row: Bytes
    checksum: bytes
    victims: Sequence[bytes]
    """Identities of blocks to be deleted before."""


@dataclass(frozen=True, slots=True)
class Read:
    """Read a block into a slot."""

    name: BlockName
    slot: int
    row: Bytes


@dataclass(frozen=True, slots=True)
class Written:
    job: Write
    error: OSError | None


@dataclass(frozen=True, slots=True)
class Loaded:
    job: Read
    checksum: bytes = b""
    seconds: float = 0.0
    error: OSError | DamagedBlockError | None = None


_Job = TypeVar("_Job", Read, Write)


class DiskIo:
    """One reader and one writer for one folder. Jobs come from one thread, which also collects."""

    def __init__(
        self,
        folder: BlockFolder,
        *,
        fingerprint: bytes,
        most_writes: int,
        clock: Callable[[], float],
    ) -> None:
        """Starts the threads; at most ``most_writes`` blocks wait to be written."""
        self._folder = folder
        self._fingerprint = fingerprint
        self._most_writes = most_writes
        self._clock = clock
        self._changed = threading.Condition()
        self._reads: deque[Read] = deque()
        self._writes: deque[Write] = deque()
        self._done: deque[Written | Loaded] = deque()
        self._unfinished = {"read": 0, "write": 0}
        self._ending = False
        self._threads = [
            # Daemons: an ending process does not wait for a disk.
            threading.Thread(target=self._read_all, name="kv reader", daemon=True),
            threading.Thread(target=self._write_all, name="kv writer", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def reading(self) -> int:
        """Blocks that were asked for and are not collected yet."""
        return self._unfinished["read"]

    @property
    def writing(self) -> int:
        """Blocks that are to be written and not collected yet."""
        return self._unfinished["write"]

    def read(self, job: Read) -> None:
        """Queue a read. Their number is bounded by the slots."""
        with self._changed:
            self._reads.append(job)
            self._unfinished["read"] += 1
            self._changed.notify_all()

    def write(self, job: Write) -> bool:
        """Queue a write; False if the queue is full."""
        with self._changed:
            if self._unfinished["write"] >= self._most_writes:
                return False
            self._writes.append(job)
            self._unfinished["write"] += 1
            self._changed.notify_all()
            return True

    def collect(self) -> list[Written | Loaded]:
        """What was finished since the last call."""
        if not self._done:
            return []
        with self._changed:
            done = list(self._done)
            self._done.clear()
            for result in done:
                self._unfinished["read" if isinstance(result, Loaded) else "write"] -= 1
            return done

    def wait(self, timeout_s: float) -> None:
        """Wait until there is something to collect, or nothing is left to be done."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._done or not any(self._unfinished.values()), timeout_s
            )

    def close(self, timeout_s: float) -> bool:
        """End the threads after the jobs in work; drops the others. Whether they have ended."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _read_all(self) -> None:
        while (job := self._next(self._reads)) is not None:
            self._finish(self._load(job))

    def _write_all(self) -> None:
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # steps come before files
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _WRITER_NICENESS)
        while (job := self._next(self._writes)) is not None:
            self._finish(Written(job, self._store(job)))

    def _next(self, queue: deque[_Job]) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: queue or self._ending)
            return None if self._ending else queue.popleft()

    def _finish(self, result: Written | Loaded) -> None:
        with self._changed:
            self._done.append(result)
            self._changed.notify_all()

    def _load(self, job: Read) -> Loaded:
        name = job.name
        path = self._folder.file(name.identity)
        started = self._clock()
        try:
            checksum = read_block(
                path,
                job.row,
                fingerprint=self._fingerprint,
                identity=name.identity,
                parent=name.parent,
            )
        except DamagedBlockError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            return Loaded(job, error=error)
        except OSError as error:
            return Loaded(job, error=error)
        seconds = self._clock() - started
        with contextlib.suppress(OSError):
            os.utime(path)  # remembers when it was used
        return Loaded(job, checksum, seconds)

    def _store(self, job: Write) -> OSError | None:
        """Write under a temporary name first: what a killed process leaves is swept at the start.

        Nothing is forced onto the disk: what a power cut leaves half-written is found wrong later.
        """
        name = job.name
        seal = Seal(self._fingerprint, name.identity, name.parent, job.checksum)
        try:
            for victim in job.victims:
                self._folder.file(victim).unlink(missing_ok=True)
            part = self._folder.part(name.identity)
            part.unlink(missing_ok=True)
            write_block(part, seal, job.row)
            part.replace(self._folder.file(name.identity))
        except OSError as error:
            return error
        return None
