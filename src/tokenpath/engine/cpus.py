"""How many CPUs this process may use: not how many the machine has."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")


def usable_cpus(
    *, own_cgroups: Path = Path("/proc/self/cgroup"), cgroup_root: Path = _CGROUP_ROOT
) -> int:
    """The fewer of the CPUs that we may be scheduled on and those that our quotas amount to.

    Quotas are those of the control groups around us (a container's limit), rounded up. More
    threads than that take each other's time slices, and a step waits for the slowest.
    """
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    try:
        text = own_cgroups.read_text()
    except OSError:
        return allowed
    return max(1, min([allowed, *(math.ceil(quota) for quota in _quotas(text, cgroup_root))]))


def _quotas(own_cgroups: str, root: Path) -> Iterable[float]:
    for line in own_cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            for group in _enclosing(root, path):
                yield from _quotient(_read(group / "cpu.max").split())
        elif "cpu" in controllers.split(","):
            for group in _enclosing(root / "cpu", path):
                quota = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
                yield from _quotient(list(quota))


def _enclosing(mount: Path, path: str) -> Iterable[Path]:
    """Our group and those around it, up to the mount; in a container only the last may exist."""
    group = mount / path.lstrip("/")
    return [folder for folder in (group, *group.parents) if folder.is_relative_to(mount)]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _quotient(quota_and_period: list[str]) -> Iterable[float]:
    """CPUs' worth of time; nothing where there is no limit (``max`` or -1)."""
    match quota_and_period:
        case [quota, period] if quota.isdigit() and period.isdigit() and int(quota):
            yield int(quota) / int(period)
