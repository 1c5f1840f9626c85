"""Matrix products by every library that is here, each doing the same work with its own packed form.

What is multiplied is ``rows`` of activations with several weights one after the other, as many as
fill the caches several times over: a model's step finds none of its weights in a cache either.
Activations are rounded and weights packed beforehand; what is timed multiplies, scales and writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tokenpath.engine.kernels.native_module import chosen_kernels, native_module

Call = Callable[[], object]
Ways = dict[str, Callable[[], Call]]
"""Makers, by name, of calls that do all products once; made when their turn comes."""


@dataclass(frozen=True, slots=True)
class Shape:
    """``count`` products of ``[rows, width]`` with weights of ``[outputs, width]``."""

    rows: int
    width: int
    outputs: int
    count: int

    @property
    def operations(self) -> float:
        """Of all products; a multiply-add is two."""
        return 2.0 * self.rows * self.width * self.outputs * self.count


def int8_ways(shape: Shape) -> Ways:
    """8-bit integers: torch, oneDNN with weights packed for it, and the native kernels."""
    ways: Ways = {"torch _int_mm": lambda: _torch_int_mm(shape), "oneDNN": lambda: _onednn(shape)}
    kernels, module = chosen_kernels(), native_module()
    if kernels is not None and module is not None:
        ways[f"native {kernels}"] = lambda: _native(module, kernels, shape)
    return ways


def plain_ways(shape: Shape, dtype: torch.dtype) -> Ways:
    """Floating point, by torch."""

    def make() -> Call:
        rows = torch.ones(shape.rows, shape.width, dtype=dtype)
        weights = [torch.ones(shape.outputs, shape.width, dtype=dtype) for _ in range(shape.count)]
        return lambda: [torch.nn.functional.linear(rows, weight) for weight in weights]

    return {"torch linear": make}


def _torch_int_mm(shape: Shape) -> Call:
    rows = torch.ones(shape.rows, shape.width, dtype=torch.int8)
    weights = [torch.ones(shape.width, shape.outputs, dtype=torch.int8) for _ in range(shape.count)]
    return lambda: [torch._int_mm(rows, weight) for weight in weights]  # noqa: SLF001 - torch has no public name for it


def _onednn(shape: Shape) -> Call:
    """oneDNN's product as torch's quantized models call it: one activation scale, float32 out."""
    rows = torch.ones(shape.rows, shape.width, dtype=torch.uint8)
    ones, zeros = torch.ones(shape.outputs), torch.zeros(shape.outputs, dtype=torch.int64)
    one = torch.ones(shape.outputs, shape.width, dtype=torch.int8)
    operators = torch.ops.onednn
    weights = [
        operators.qlinear_prepack(one, [shape.rows, shape.width]) for _ in range(shape.count)
    ]

    def multiply(weight: torch.Tensor) -> object:
        return operators.qlinear_pointwise(
            rows, 1.0, 0, weight, ones, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )

    return lambda: [multiply(weight) for weight in weights]


def _native(module: Any, kernels: str, shape: Shape) -> Call:
    """The same as a program of the native kernels, with a scale for every 128 activations."""
    rows, width, outputs = shape.rows, shape.width, shape.outputs
    program = module.Program(module.Team(torch.get_num_threads()), kernels)
    panels = -(-outputs // module.PANEL)
    scale = np.ones(panels * module.PANEL, np.float32)
    packed = [np.ones(panels * module.panel_bytes(8, width), np.uint8) for _ in range(shape.count)]
    matrices = [module.weights(8, outputs, width, data, scale, 0) for data in packed]
    source = program.buffer(width, False)
    rounded = program.buffer(width, True)
    made = program.buffer(outputs, False)
    program.embed(source, matrices[0], 1.0)
    program.quantize(source, rounded, width, True)
    for matrix in matrices:
        program.matmul(rounded, made, matrix, False, "", False)
    numbers = np.arange(rows)
    step = (
        np.zeros(rows, np.int64),  # token ids
        numbers,  # positions
        numbers,  # slots: no operation writes keys
        np.array([0, rows]),
        np.array([rows]),
        np.zeros((1, 1), np.int64),
        np.array([], np.int64),
        np.empty((0, outputs), np.float32),
    )

    def run(kept: object = (packed, scale)) -> None:
        del kept  # what the program has the addresses of lives as long as this function
        program.run(*step)

    return run
