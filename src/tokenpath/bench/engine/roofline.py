"""The machine's own limits: how fast it reads memory, and how fast it multiplies.

Both are measured with operands several times larger than the last-level cache, as a model's weights
are, on as many threads as the engine has. A limit is the best that any of several methods reached
in its best moment; an engine is held against it with its median.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from tokenpath.engine.kernels.native_module import chosen_kernels, native_module

Product = Literal["int8", "bfloat16", "float32"]
Call = Callable[[], object]

ROWS = 512
"""Of the products: a full step of prefill."""
_WIDTH = 4096
_OUTPUTS = 4096
"""A product's weight is 4096 by 4096."""
_CACHES = 4
"""Operands are so many times the size of the last-level cache."""
_LEAST_BYTES = 256 << 20
_UNKNOWN_CACHE_BYTES = 32 << 20
_METHOD_S = 0.5
_LEAST_RUNS = 3
_CACHE_FOLDER = Path("/sys/devices/system/cpu/cpu0/cache")


class Limit(msgspec.Struct, frozen=True):
    """One limit, and what reached it."""

    per_s: float
    """Bytes or operations a second."""
    method: str
    methods: dict[str, float]
    """The best of every method."""


class Roofline(msgspec.Struct, frozen=True):
    """A machine's limits at one moment."""

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


def measure(product: Product, *, threads: int) -> Roofline:
    """Measure both limits on so many threads; takes some seconds."""
    cache = last_level_cache_bytes()
    size = max(_LEAST_BYTES, _CACHES * cache)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        read = read_limit(size)
        multiply = product_limit(product, size)
    finally:
        torch.set_num_threads(before)
    return Roofline(
        read_bytes_per_s=read.per_s,
        read_method=read.method,
        read_methods=read.methods,
        product_ops_per_s=multiply.per_s,
        product_method=multiply.method,
        product_methods=multiply.methods,
        product_dtype=product,
        cache_bytes=cache,
        operand_bytes=size,
    )


def best(found: Sequence[Roofline]) -> Roofline | None:
    """The best of each limit over several measurements; None if there is none."""
    if not found:
        return None
    read = max(found, key=lambda one: one.read_bytes_per_s)
    multiply = max(found, key=lambda one: one.product_ops_per_s)
    return msgspec.structs.replace(
        read,
        product_ops_per_s=multiply.product_ops_per_s,
        product_method=multiply.product_method,
        product_methods=multiply.product_methods,
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


@torch.inference_mode()
def read_limit(size: int) -> Limit:
    """Read ``size`` bytes from one end to the other, by several reductions."""
    words = torch.ones(size // 8, dtype=torch.int64)
    floats = words.view(torch.float32)
    methods: dict[str, Call] = {
        "sum of int64": words.sum,
        "sum of float32": floats.sum,
        "maximum of float32": floats.amax,
    }
    return _best({name: words.nbytes / _fastest(call) for name, call in methods.items()})


@torch.inference_mode()
def product_limit(dtype: Product, size: int) -> Limit:
    """Multiply 512 rows with weights of ``size`` bytes in all, one matrix after the other."""
    element = {"int8": 1, "bfloat16": 2, "float32": 4}[dtype]
    count = -(-size // (_WIDTH * _OUTPUTS * element))
    operations = 2.0 * ROWS * _WIDTH * _OUTPUTS * count
    ways = {"int8": _int8_products, "bfloat16": _plain_products, "float32": _plain_products}
    found: dict[str, float] = {}
    for name, make in ways[dtype](dtype, count).items():
        # Made when its turn comes and dropped before the next, so that memory holds one's weights.
        found[name] = operations / _fastest(make())
    return _best(found)


_Ways = dict[str, Callable[[], Call]]
"""Makers, by name, of calls that do all products once."""


def _plain_products(dtype: Product, count: int) -> _Ways:
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32

    def make() -> Call:
        rows = torch.ones(ROWS, _WIDTH, dtype=kind)
        weights = [torch.ones(_OUTPUTS, _WIDTH, dtype=kind) for _ in range(count)]
        return lambda: [torch.nn.functional.linear(rows, weight) for weight in weights]

    return {"torch linear": make}


def _int8_products(_: Product, count: int) -> _Ways:
    def make() -> Call:
        rows = torch.ones(ROWS, _WIDTH, dtype=torch.int8)
        weights = [torch.ones(_WIDTH, _OUTPUTS, dtype=torch.int8) for _ in range(count)]
        return lambda: [torch._int_mm(rows, weight) for weight in weights]  # noqa: SLF001 - torch has no public name for it

    ways: _Ways = {"torch _int_mm": make}
    kernels, module = chosen_kernels(), native_module()
    if kernels is not None and module is not None:
        ways[f"native {kernels}"] = lambda: _native_products(module, kernels, count)
    return ways


def _native_products(module: Any, kernels: str, count: int) -> Call:
    """The same products as a program of the native kernels, activations rounded once."""
    program = module.Program(module.Team(torch.get_num_threads()), kernels)
    panels = -(-_OUTPUTS // module.PANEL)
    scale = np.ones(panels * module.PANEL, np.float32)
    packed = [np.ones(panels * module.panel_bytes(8, _WIDTH), np.uint8) for _ in range(count)]
    matrices = [module.weights(8, _OUTPUTS, _WIDTH, data, scale, 0) for data in packed]
    source = program.buffer(_WIDTH, False)
    rounded = program.buffer(_WIDTH, True)
    made = program.buffer(_OUTPUTS, False)
    program.embed(source, matrices[0], 1.0)
    program.quantize(source, rounded, _WIDTH, True)
    for matrix in matrices:
        program.matmul(rounded, made, matrix, False, "", False)
    rows = np.arange(ROWS)
    step = (
        np.zeros(ROWS, np.int64),  # token ids
        rows,  # positions
        rows,  # slots: no operation writes keys
        np.array([0, ROWS]),
        np.array([ROWS]),
        np.zeros((1, 1), np.int64),
        np.array([], np.int64),
        np.empty((0, _OUTPUTS), np.float32),
    )

    def run(kept: object = (packed, scale)) -> None:
        del kept  # what the program has the addresses of lives as long as this function
        program.run(*step)

    return run


def _fastest(call: Call) -> float:
    """Seconds of the fastest of several runs, the first of which is not counted."""
    call()
    times: list[float] = []
    while len(times) < _LEAST_RUNS or sum(times) < _METHOD_S:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def _best(methods: dict[str, float]) -> Limit:
    name = max(methods, key=methods.__getitem__)
    return Limit(methods[name], name, methods)
