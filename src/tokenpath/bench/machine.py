"""What a benchmark ran on, which travels with its figures."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable
from pathlib import Path

import msgspec


class Machine(msgspec.Struct, frozen=True):
    """Where the measuring process ran; a server that it measured may be elsewhere."""

    cpu_model: str
    cpus: int
    """Those that the process may use."""
    system: str


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Python's version, and those of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> Machine:
    """This machine."""
    try:
        cpus = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        cpus = os.cpu_count() or 1
    return Machine(_cpu_model(), cpus, f"{platform.system()} {platform.release()}")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
