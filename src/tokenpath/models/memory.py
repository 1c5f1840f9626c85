"""How much memory a model needs, and how much there is for it.

The estimate decides, before anything is loaded, which model of a list is served; so it errs on
the side of too much, and its one constant is stated here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal, Protocol

import psutil

from tokenpath.models.layout import TensorInfo

Dtype = Literal["float32", "bfloat16", "int8", "int4"]
ELEMENT_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}
WEIGHT_BYTES: dict[Dtype, float] = {**ELEMENT_BYTES, "int8": 1.01, "int4": 0.85}
"""Memory a parameter, as held and while it is packed. In int4 embeddings keep 8 bits: it is
0.69 for Qwen2.5 1.5B and 0.85 for Gemma 270M, of which they are two thirds."""

OVERHEAD_BYTES = 1 << 30
"""On top of weights and KV: a process with torch loaded (0.25 GB), a step's activations, and, for
a moment during loading, the largest tensor in float32 (0.9 GB for a vocabulary of 150,000)."""

RANK_BYTES = 384 << 20
"""What each further process of a divided model takes beside its part of weights and KV: torch, a
step's activations, and the larger part of its packing."""

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63."""


class Checkpoint(Protocol):
    """Any model on this disk."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...


def parameters(model: Checkpoint) -> int:
    """How many numbers the checkpoint holds; a tied head counts once."""
    return sum(tensor.elements for tensor in model.tensors.values())


def weight_bytes(model: Checkpoint, dtype: Dtype) -> int:
    """Memory for all weights in ``dtype``, whatever they are stored as."""
    return int(parameters(model) * WEIGHT_BYTES[dtype])


def needed_bytes(model: Checkpoint, dtype: Dtype, kv_cache_bytes: int) -> int:
    """Memory for serving the model with a KV pool of ``kv_cache_bytes``."""
    return weight_bytes(model, dtype) + kv_cache_bytes + OVERHEAD_BYTES


def needed_bytes_unseen(model_parameters: int, dtype: Dtype, kv_cache_bytes: int) -> int:
    """``needed_bytes`` of a model that is not on this disk yet, from its number of parameters."""
    return int(model_parameters * WEIGHT_BYTES[dtype]) + kv_cache_bytes + OVERHEAD_BYTES


def available_bytes(
    *,
    system_available: Callable[[], int] = lambda: int(psutil.virtual_memory().available),
    own_cgroups: Path = Path("/proc/self/cgroup"),
    cgroup_root: Path = _CGROUP_ROOT,
) -> int:
    """Memory that this process may still take without swapping or being killed.

    The smaller of what the machine has available and what every enclosing control group (a
    container's limit) leaves. Page cache that the kernel would give back counts as free.
    """
    try:
        text = own_cgroups.read_text()
    except OSError:
        return system_available()
    return max(0, min(system_available(), *_group_rooms(text, cgroup_root), _UNLIMITED))


def _group_rooms(own_cgroups: str, root: Path) -> Iterable[int]:
    for line in own_cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _rooms(root, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _rooms(
                root / "memory",
                path,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )


def _rooms(mount: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterable[int]:
    """What each group from ours up to the mount's root leaves.

    In a container the path may be the host's; then only the root, the container itself, exists.
    """
    group = mount / path.lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(mount):
            return
        bound, used = _number(folder / limit), _number(folder / usage)
        if bound is not None and used is not None and bound < _UNLIMITED:
            yield bound - used + _stat(folder / "memory.stat", reclaimable)


def _number(path: Path) -> int | None:
    """None where there is no such file or no limit (``max``)."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _stat(path: Path, key: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key} ")), 0)
