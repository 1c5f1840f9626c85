"""What ``tokenpath models quantize`` makes of a model: which matrices become codes, and how.

The result is compressed-tensors, which other engines load too: 8 bits with a scale for each output
channel (W8A8: activations are rounded as they come), or 4 bits packed in groups of 32 (W4A16).
Embeddings and the head keep their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tokenpath.models.layout import HEAD, TensorInfo
from tokenpath.models.local import LocalModel
from tokenpath.models.quantized.feedback import round_with_feedback
from tokenpath.models.quantized.rounding import GroupCodes, round_groups
from tokenpath.models.quantized.safetensors_writer import Entry
from tokenpath.models.quantized.words import pack
from tokenpath.models.weights import read_tensor
from tokenpath.protocol.errors import ModelFileError

Target = Literal["int8", "int4"]
GROUP = 32
_PER_WORD = 8
_PRODUCTS = 2
"""Dimensions of a module's activity, where channels' products were noted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One way to quantize one model."""

    target: Target
    symmetric: bool
    float_dtype: Literal["BF16", "F16"]
    """Of what stays in floats, and of 4-bit groups' scales."""
    modules: frozenset[str]
    """Names of the matrices that are rounded, without ``.weight``."""

    def config(self, ignored: tuple[str, ...]) -> dict[str, Any]:
        """A ``quantization_config``; ``ignored`` are the linear modules that are not rounded."""
        int8 = self.target == "int8"
        weights = {
            "num_bits": 8 if int8 else 4,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": "channel" if int8 else "group",
            "group_size": None if int8 else GROUP,
            "dynamic": False,
        }
        activations = {
            "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True,
        }  # fmt: skip
        return {
            "quant_method": "compressed-tensors",
            "format": "int-quantized" if int8 else "pack-quantized",
            "quantization_status": "compressed",
            "ignore": list(ignored),
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": weights,
                    "input_activations": activations if int8 else None,
                    "output_activations": None,
                }
            },
        }


def recipe_for(model: LocalModel, target: Target, *, symmetric: bool) -> Recipe:
    """Every projection whose rows are whole groups is rounded; float16 files stay float16."""
    dtypes = {t.dtype for t in model.tensors.values() if t.quantized is None}
    return Recipe(
        target=target,
        symmetric=symmetric or target == "int8",
        float_dtype="F16" if model.format == "safetensors" and dtypes == {"F16"} else "BF16",
        modules=frozenset(
            name.removesuffix(".weight")
            for name, info in model.tensors.items()
            if name.endswith("_proj.weight") and not info.shape[1] % GROUP
        ),
    )


def ignored_modules(model: LocalModel, recipe: Recipe) -> tuple[str, ...]:
    """Linear modules that keep their numbers; a tied head among them, which other engines ask."""
    rest = (name.removesuffix(".weight") for name in model.tensors if name.endswith("_proj.weight"))
    return (HEAD.removesuffix(".weight"), *(name for name in rest if name not in recipe.modules))


def entries(model: LocalModel, recipe: Recipe) -> list[Entry]:
    """All tensors of the result, in the order in which ``tensors`` makes them."""
    found = []
    for name, info in model.tensors.items():
        module = name.removesuffix(".weight")
        if module in recipe.modules:
            found += _entries_of(module, info, recipe)
        else:
            found.append(Entry(name, recipe.float_dtype, info.shape))
    return found


def _entries_of(module: str, info: TensorInfo, recipe: Recipe) -> list[Entry]:
    rows, columns = info.shape
    if recipe.target == "int8":
        return [
            Entry(f"{module}.weight", "I8", (rows, columns)),
            Entry(f"{module}.weight_scale", "F32", (rows, 1)),
        ]
    groups = columns // GROUP
    found = [
        Entry(f"{module}.weight_packed", "I32", (rows, columns // _PER_WORD)),
        Entry(f"{module}.weight_scale", recipe.float_dtype, (rows, groups)),
        Entry(f"{module}.weight_shape", "I64", (2,)),
    ]
    if not recipe.symmetric:
        words = -(-rows // _PER_WORD)
        found.append(Entry(f"{module}.weight_zero_point", "I32", (words, groups)))
    return found


def tensors(
    model: LocalModel,
    recipe: Recipe,
    activity: Mapping[str, torch.Tensor],
    progress: Callable[[float], None],
) -> Iterator[torch.Tensor]:
    """The tensors of ``entries``, each made when it is asked for.

    ``activity`` has, by module, the mean squares [K] of its input channels, or their mean products
    [K, K]; a module that is not in it counts them all alike. Raises as ``read_tensor``, and
    ``ModelFileError`` for weights that are not finite.
    """
    floats = torch.bfloat16 if recipe.float_dtype == "BF16" else torch.float16
    total = sum(info.elements for info in model.tensors.values())
    done = 0
    for name, info in model.tensors.items():
        tensor = read_tensor(model, name)
        module = name.removesuffix(".weight")
        if module in recipe.modules:
            try:
                found = _rounded(tensor.float(), recipe, floats, activity.get(module))
            except ValueError as error:
                raise ModelFileError(f"{model.path}: {name} cannot be rounded: {error}") from None
            yield from _int8(found) if recipe.target == "int8" else _int4(found, recipe)
        else:
            yield tensor.to(floats)
        done += info.elements
        progress(done / total)


def _rounded(
    weight: torch.Tensor, recipe: Recipe, floats: torch.dtype, activity: torch.Tensor | None
) -> GroupCodes:
    """Raises ``ValueError`` as ``round_groups`` and ``round_with_feedback``."""
    products = activity if activity is not None and activity.dim() == _PRODUCTS else None
    strengths = activity if products is None else products.diagonal()
    if recipe.target == "int8":
        return round_groups(
            weight,
            bits=8,
            group=weight.shape[1],
            symmetric=True,
            scale_dtype=torch.float32,
            importance=strengths,
        )
    if products is None:
        return round_groups(
            weight,
            bits=4,
            group=GROUP,
            symmetric=recipe.symmetric,
            scale_dtype=floats,
            importance=strengths,
        )
    return round_with_feedback(
        weight,
        products,
        bits=4,
        group=GROUP,
        symmetric=recipe.symmetric,
        scale_dtype=floats,
    )


def _int8(found: GroupCodes) -> Iterator[torch.Tensor]:
    yield (found.codes.int() - 128).to(torch.int8)
    yield found.scale


def _int4(found: GroupCodes, recipe: Recipe) -> Iterator[torch.Tensor]:
    yield pack(found.codes, 4)
    yield found.scale
    yield torch.tensor(found.codes.shape)
    if not recipe.symmetric:
        yield pack(found.zero.t().contiguous(), 4).t().contiguous()
