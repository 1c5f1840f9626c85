"""The machine's own limits: how fast it reads memory, and how fast it multiplies.

Both are measured with operands larger than the last-level cache, as a model's weights are, on as
many threads as the engine has. A limit is what the best of several methods reaches. On a shared
machine it wanders by half within seconds, so that an engine is held against the limit of its own
moment: ``Probe`` measures it again, with the best method, before and after each work.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import torch

from tokenpath.bench.engine.products import Call, Shape, Ways, int8_ways, plain_ways

Product = Literal["int8", "bfloat16", "float32"]

ROWS = 512
"""Of the products: a full step of prefill."""
_WIDTH = 4096
_OUTPUTS = 4096
"""A product's weight is 4096 by 4096."""
_CACHES = 4
"""Operands are so many times the size of the last-level cache, within the next two bounds."""
_LEAST_BYTES = 256 << 20
_MOST_BYTES = 512 << 20
"""Unless the cache alone is larger: a virtual machine is told of hundreds of megabytes, which it
shares with others, and operands of gigabytes would take minutes and the memory of the model."""
_UNKNOWN_CACHE_BYTES = 32 << 20
_METHOD_S = 0.5
_LEAST_RUNS = 3
_FALL_ASLEEP_S = 0.02
"""Torch's threads wait for more work for some milliseconds, on CPUs that the engine's need."""
_CACHE_FOLDER = Path("/sys/devices/system/cpu/cpu0/cache")


class Roofline(msgspec.Struct, frozen=True):
    """A machine's limits, and what reached them."""

    read_bytes_per_s: float
    read_method: str
    read_methods: dict[str, float]
    product_ops_per_s: float
    """Operations (a multiply-add is two) a second of products with 512 rows."""
    product_method: str
    product_methods: dict[str, float]
    product_dtype: str
    cache_bytes: int
    """The last-level cache."""
    operand_bytes: int
    """What was read, and the products' weights."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The limits, measured once."""

    read_bytes_per_s: float
    product_ops_per_s: float


class Probe:
    """The machine's limits: which method is best, and what it reaches at any moment."""

    def __init__(self, product: Product, *, threads: int) -> None:
        """Try all methods on so many threads; takes some seconds."""
        self._threads = threads
        self._size = operand_bytes(last_level_cache_bytes())
        with self._on_threads():
            reads = read_methods(self._size)
            found = {
                way: self._size / _fastest(call, least_s=_METHOD_S) for way, call in reads.items()
            }
            read = max(found, key=found.__getitem__)
            shape, products = product_methods(product, self._size)
            # Made when its turn comes and dropped before the next: memory holds one's weights.
            rates = {
                way: shape.operations / _fastest(make(), least_s=_METHOD_S)
                for way, make in products.items()
            }
            multiply = max(rates, key=rates.__getitem__)
            self._operations = shape.operations
            self._read, self._multiply = reads[read], products[multiply]()
        self.roofline = Roofline(
            read_bytes_per_s=found[read],
            read_method=read,
            read_methods=found,
            product_ops_per_s=rates[multiply],
            product_method=multiply,
            product_methods=rates,
            product_dtype=product,
            cache_bytes=last_level_cache_bytes(),
            operand_bytes=self._size,
        )

    def __call__(self) -> Moment:
        """Measure now, each limit by its best method."""
        with self._on_threads():
            read_s = _fastest(self._read, least_s=0.0)
            multiply_s = _fastest(self._multiply, least_s=0.0)
        return Moment(self._size / read_s, self._operations / multiply_s)

    @contextmanager
    def _on_threads(self) -> Iterator[None]:
        """Torch computes on the engine's number of threads, which fall asleep at the end."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                yield
        finally:
            torch.set_num_threads(before)
            time.sleep(_FALL_ASLEEP_S)


def operand_bytes(cache_bytes: int) -> int:
    """Of operands that a last-level cache of ``cache_bytes`` cannot hold."""
    return max(
        _LEAST_BYTES, min(_CACHES * cache_bytes, max(_MOST_BYTES, cache_bytes + cache_bytes // 8))
    )


def last_level_cache_bytes(folder: Path = _CACHE_FOLDER) -> int:
    """Size of the largest cache that the first processor reaches; 32 MiB where nothing says."""
    sizes = []
    for path in folder.glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        digits = text.rstrip("KMG")
        if digits.isdigit():
            sizes.append(int(digits) * unit)
    return max(sizes, default=_UNKNOWN_CACHE_BYTES)


def read_methods(size: int) -> dict[str, Call]:
    """Several reductions, each of which reads ``size`` bytes from one end to the other."""
    words = torch.ones(size // 8, dtype=torch.int64)
    floats = words.view(torch.float32)
    return {
        "sum of int64": words.sum,
        "sum of float32": floats.sum,
        "maximum of float32": floats.amax,
    }


def product_methods(dtype: Product, size: int) -> tuple[Shape, Ways]:
    """512 rows times weights of ``size`` bytes in all, one matrix after the other."""
    element = {"int8": 1, "bfloat16": 2, "float32": 4}[dtype]
    shape = Shape(ROWS, _WIDTH, _OUTPUTS, count=-(-size // (_WIDTH * _OUTPUTS * element)))
    match dtype:
        case "int8":
            return shape, int8_ways(shape)
        case "bfloat16":
            return shape, plain_ways(shape, torch.bfloat16)
        case "float32":
            return shape, plain_ways(shape, torch.float32)


def _fastest(call: Call, *, least_s: float) -> float:
    """Seconds of the fastest run of several over ``least_s``, the first of which is not counted."""
    call()
    times: list[float] = []
    while len(times) < _LEAST_RUNS or sum(times) < least_s:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)
