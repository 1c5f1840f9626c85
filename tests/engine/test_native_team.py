"""Threads of a native program share out the CPUs among them after every pause."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from tokenpath.bench.engine.products import Shape, int8_ways
from tokenpath.engine.kernels.native_module import native_module

pytestmark = [
    pytest.mark.skipif(native_module() is None, reason="no C++ compiler when installed"),
    pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="not on Linux"),
]
TASKS = Path("/proc/self/task")


def program(threads):
    """A call of a small native program, and its workers' thread ids."""
    torch.set_num_threads(threads)
    torch.ones(1000, 1000).sum()  # torch has its own threads now
    before = {path.name for path in TASKS.iterdir()}
    ways = int8_ways(Shape(rows=8, width=256, outputs=64, count=50))
    call = next(make for name, make in ways.items() if name.startswith("native"))()
    return call, {path.name for path in TASKS.iterdir()} - before


def last_cpu(thread):
    """Where a thread ran last: the 39th field of its ``stat``."""
    return int((TASKS / thread / "stat").read_text().rsplit(")", 1)[1].split()[36])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_a_worker_that_wakes_on_the_callers_cpu_moves():
    call, workers = program(2)
    (worker,) = workers
    apart = 0
    for _ in range(20):
        time.sleep(0.03)  # long enough for the kernel to wake the worker where it was woken from
        call()
        apart += last_cpu(worker) != last_cpu(str(os.getpid()))
    assert apart >= 15  # without moving, a few


def test_nobody_stays_pinned():
    allowed = os.sched_getaffinity(0)
    call, workers = program(3)  # one more than many machines have CPUs
    for _ in range(5):
        time.sleep(0.01)
        call()
    for thread in workers | {str(os.getpid())}:
        assert os.sched_getaffinity(int(thread)) == allowed
