"""What of the machine is ours: quotas, affinity masks, and how the CPUs lie together."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenpath.engine.cpus import (
    cpu_limit,
    default_threads,
    layout,
    parse_cpu_list,
    stay_on,
    usable_cpus,
    write_cpu_list,
)
from tokenpath.policy.cpu_shares import Cpu

V1 = "12:memory:/x\n3:cpu,cpuacct:/x/y\n0::/\n"
HALF_OF_8 = {"cpu/x/cpu.cfs_quota_us": "400000", "cpu/x/cpu.cfs_period_us": "100000"}


def write(root, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/a/b\n", {"a/cpu.max": "150000 100000\n", "a/b/cpu.max": "max 100000\n"}, 2),
        ("0::/a/b\n", {"a/cpu.max": "max 100000\n", "a/b/cpu.max": "250000 100000\n"}, 3),
        ("0::/a/b\n", {"a/b/cpu.max": "10000 100000\n"}, 1),
        ("0::/a/b\n", {"cpu.max": "200000 100000\n", "a/b/cpu.max": "900000 100000\n"}, 2),
        ("0::/somewhere/of/the/host\n", {"cpu.max": "300000 100000\n"}, 3),
        ("0::/a\n", {"a/cpu.max": "800000 50000\n"}, 8),
        ("0::/\n", {}, 8),
        ("0::/a\n", {"a/cpu.max": "nonsense\n"}, 8),
        (V1, HALF_OF_8, 4),
        (V1, HALF_OF_8 | {"cpu/x/y/cpu.cfs_quota_us": "50000", "cpu/x/y/cpu.cfs_period_us": "50000"}, 1),
        (V1, {"cpu/x/y/cpu.cfs_quota_us": "-1", "cpu/x/y/cpu.cfs_period_us": "100000"}, 8),
        (V1, {f"cpu,cpuacct/x/y/cpu.cfs_{name}_us": "100000" for name in ("quota", "period")}, 1),
        # Both versions at once: the newer is mounted beside the older ones.
        ("4:memory:/\n0::/s\n", {"unified/s/cpu.max": "200000 100000"}, 2),
    ],
)  # fmt: skip
def test_the_tightest_quota_around_us_counts(tmp_path, membership, files, limit):
    write(tmp_path, files)
    own = tmp_path / "self_cgroup"
    own.write_text(membership)
    assert cpu_limit(8, own_cgroups=own, cgroup_root=tmp_path) == limit


def test_without_control_groups_there_is_no_quota(tmp_path):
    missing = tmp_path / "none"
    assert cpu_limit(8, own_cgroups=missing, cgroup_root=missing) == 8


def test_cores_and_nodes_are_read_from_the_system(tmp_path):
    write(tmp_path, {
        "node/node0/cpulist": "0-1,4-5\n",
        "node/node1/cpulist": "2-3,6-7\n",
        "node/possible": "0-1\n",
        **{f"cpu/cpu{n}/topology/thread_siblings_list": f"{n % 4},{n % 4 + 4}\n" for n in range(8)},
    })  # fmt: skip
    found = layout([7, 0, 4, 2], system=tmp_path)
    assert found == (Cpu(0, 0, 0), Cpu(2, 2, 1), Cpu(4, 0, 0), Cpu(7, 3, 1))


def test_a_system_that_tells_nothing_has_cores_of_one_cpu(tmp_path):
    assert layout([3, 1], system=tmp_path) == (Cpu(1, 1, 0), Cpu(3, 3, 0))


def test_on_this_machine():
    assert [cpu.number for cpu in usable_cpus()] == sorted(os.sched_getaffinity(0))
    assert 1 <= default_threads() <= len(usable_cpus())


@given(st.sets(st.integers(0, 300)))
def test_lists_of_cpus_are_written_as_the_kernel_does(numbers):
    text = write_cpu_list(numbers)
    assert set(parse_cpu_list(text)) == numbers
    assert parse_cpu_list(text + "\n") == sorted(numbers)


def test_a_run_of_cpus_is_written_short():
    assert write_cpu_list([3, 1, 2, 8, 5, 6]) == "1-3,5-6,8"
    assert parse_cpu_list("") == []


def run(code: str, *, prefix: tuple[str, ...] = ()) -> list[str]:
    command = [*prefix, sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.split()


@pytest.mark.skipif(sys.platform != "linux", reason="taskset is Linux's")
def test_a_process_under_taskset_uses_what_it_was_given():
    one = str(min(os.sched_getaffinity(0)))
    code = (
        "from tokenpath.engine import cpus; "
        "print(cpus.default_threads(), *[c.number for c in cpus.usable_cpus()])"
    )
    assert run(code, prefix=("taskset", "-c", one)) == ["1", one]


@pytest.mark.skipif(sys.platform != "linux", reason="macOS pins nothing")
def test_threads_that_run_already_are_held_to_the_cpus_too():
    one = min(os.sched_getaffinity(0))
    code = f"""
import threading, pathlib
from tokenpath.engine.cpus import stay_on
enough = threading.Event()
threads = [threading.Thread(target=enough.wait) for _ in range(2)]
threads[0].start()
stay_on([{one}])
threads[1].start()
for task in pathlib.Path("/proc/self/task").iterdir():
    status = (task / "status").read_text()
    print(status.partition("Cpus_allowed_list:")[2].split()[0])
enough.set()
"""
    assert run(code) == [str(one)] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="macOS pins nothing")
def test_cpus_that_are_not_ours_are_an_error():
    with pytest.raises(OSError, match="Invalid argument"):
        stay_on([4000])
