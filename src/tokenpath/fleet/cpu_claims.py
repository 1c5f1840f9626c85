"""Tells servers on one machine which CPUs the others' engines compute on.

A claim is a lock on a file named after the CPU, which the kernel lets go of when its holder ends,
however that happens. Claims are those of one user; a container has its own, and cannot know what
runs beside it: see ``sees_whole_machine``.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, Self

_FIRST_PID_NAMESPACE: Final = 0xEFFFFFFC
"""The kernel's fixed number for the namespace that it starts with."""

log = logging.getLogger(__name__)


class CpuClaims:
    """The claims in one folder, seen from one server. A context manager, which ends its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._held:
            os.close(descriptor)
        self._held.clear()

    @contextlib.contextmanager
    def choosing(self) -> Iterator[None]:
        """Be the only server that looks at claims and makes some. Waits for another."""
        descriptor = self._open("choosing")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def of_others(self, cpus: Collection[int]) -> set[int]:
        """Which of these CPUs others have claimed; to be asked before claiming."""
        taken = set()
        for number in cpus:
            descriptor = self._open(f"cpu{number}")
            if not _locked(descriptor):
                taken.add(number)
            os.close(descriptor)
        return taken

    def claim(self, cpus: Collection[int]) -> None:
        """Keep these CPUs until the end; what others have claimed already stays theirs."""
        for number in cpus:
            descriptor = self._open(f"cpu{number}")
            if _locked(descriptor):
                self._held.append(descriptor)
            else:
                os.close(descriptor)

    def _open(self, name: str) -> int:
        return os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def usual_claims() -> CpuClaims | None:
    """This user's claims on this machine; None where there can be none."""
    if not sees_whole_machine():
        return None
    folder = Path(tempfile.gettempdir()) / f"tokenpath-cpus-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        log.debug("no claims on CPUs: %s", error)
        return None
    if found.st_uid != os.getuid() or not folder.is_dir() or folder.is_symlink():
        log.debug("no claims on CPUs: %s is somebody else's", folder)
        return None
    return CpuClaims(folder)


def sees_whole_machine() -> bool:
    """False in a container, whose neighbours could choose the very CPUs that it would."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
