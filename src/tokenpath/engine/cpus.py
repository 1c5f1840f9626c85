"""Which CPUs this process may use, how many CPUs' worth of time it gets, and how they lie together.

Not how many the machine has: an affinity mask or a container's quota leaves fewer, and threads that
take each other's time slices make every step wait for the slowest.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Collection, Iterable
from pathlib import Path

from tokenpath.policy.cpu_shares import Cpu, divide

_OWN_CGROUPS = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_SYSTEM = Path("/sys/devices/system")
_OWN_TASKS = Path("/proc/self/task")


def usable_cpus() -> tuple[Cpu, ...]:
    """The CPUs that we may be scheduled on, by number."""
    if hasattr(os, "sched_getaffinity"):
        numbers: Iterable[int] = os.sched_getaffinity(0)
    else:
        numbers = range(os.cpu_count() or 1)
    return layout(numbers)


def layout(numbers: Iterable[int], *, system: Path = _SYSTEM) -> tuple[Cpu, ...]:
    """How CPUs lie together, as the kernel tells under ``/sys/devices/system``.

    A core goes by the lowest number of its hardware threads. Where nothing is told every CPU is a
    core of its own, on node 0.
    """
    nodes = {
        number: int(folder.name.removeprefix("node"))
        for folder in system.glob("node/node[0-9]*")
        for number in parse_cpu_list(_read(folder / "cpulist"))
    }
    cpus = []
    for number in sorted(numbers):
        siblings = _read(system / f"cpu/cpu{number}/topology/thread_siblings_list")
        core = min([number, *parse_cpu_list(siblings)])
        cpus.append(Cpu(number, core, nodes.get(number, 0)))
    return tuple(cpus)


def cpu_limit(
    cpus: int, *, own_cgroups: Path = _OWN_CGROUPS, cgroup_root: Path = _CGROUP_ROOT
) -> int:
    """How many threads can run at once on ``cpus`` CPUs: fewer where a quota leaves less time.

    Quotas are those of the control groups around us (a container's limit), rounded up.
    """
    try:
        text = own_cgroups.read_text()
    except OSError:
        return cpus
    return max(1, min([cpus, *(math.ceil(quota) for quota in _quotas(text, cgroup_root))]))


def default_threads() -> int:
    """Compute threads of a process that has all of its CPUs for one engine."""
    cpus = usable_cpus()
    (share,) = divide(cpus, [None], limit=cpu_limit(len(cpus))).shares
    return share.threads


def stay_on(numbers: Collection[int]) -> None:
    """Let this process, with the threads it has and will have, run on these CPUs only.

    To be called before memory is written: a page lies in the NUMA node of the CPU that first writes
    it. Raises ``OSError`` if none of the CPUs may be used.
    """
    if not hasattr(os, "sched_setaffinity"):
        return  # macOS has no such thing
    os.sched_setaffinity(0, numbers)
    with contextlib.suppress(OSError):  # without /proc: the main thread's, which later ones inherit
        for task in _OWN_TASKS.iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), numbers)


def parse_cpu_list(text: str) -> list[int]:
    """The kernel's way of writing sets of CPUs: ``0-3,8``. Empty for what is none."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def write_cpu_list(numbers: Collection[int]) -> str:
    """The reverse of ``parse_cpu_list``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def _quotas(own_cgroups: str, root: Path) -> Iterable[float]:
    for line in own_cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2; beside groups of version 1 it is mounted one level deeper
            for mount in (root, root / "unified"):
                for group in _enclosing(mount, path):
                    yield from _quotient(_read(group / "cpu.max").split())
        elif "cpu" in controllers.split(","):
            for mount in (root / "cpu", root / controllers):
                for group in _enclosing(mount, path):
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
