"""Writes a quantized model as a Hugging Face folder, which appears whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tokenpath.models import disk, hf_export
from tokenpath.models.hf_folder import CONFIG, read_json
from tokenpath.models.local import LocalModel
from tokenpath.models.quantized.methods import OLD_FILES
from tokenpath.models.quantized.recipe import Recipe, entries, ignored_modules, tensors
from tokenpath.models.quantized.safetensors_writer import write_safetensors
from tokenpath.models.sizes import human_bytes
from tokenpath.protocol.errors import ModelError

_KEPT_SUFFIXES = frozenset({".json", ".jinja", ".model", ".txt", ".md"})
_SMALL_BYTES = 100 << 20
"""Files beside the weights are copied up to this size."""
_RIGHTS = 0o755
"""Of the folder: a temporary one is its maker's alone."""


def check_target(folder: Path) -> None:
    """Raise ``ModelError`` unless a folder can be made there."""
    if folder.exists():
        raise ModelError(f"{folder} exists already; remove it, or give another --out")
    if not folder.parent.is_dir():
        raise ModelError(f"{folder} cannot be made: there is no folder {folder.parent}")


def write_folder(
    model: LocalModel,
    recipe: Recipe,
    activity: Mapping[str, torch.Tensor],
    folder: Path,
    *,
    cache: Path,
    progress: Callable[[float], None],
) -> None:
    """Quantize a model into a folder that does not exist yet.

    ``activity`` is as ``tensors`` takes it; ``cache`` keeps what is slow to derive of a GGUF's
    tokenizer. Whatever goes wrong, or is interrupted, nothing is left behind. Raises ``ModelError``
    (one of its leaves), also for a disk that is full.
    """
    check_target(folder)
    config = _config(model, recipe)
    planned = entries(model, recipe)
    size = sum(entry.bytes for entry in planned)
    try:
        disk.require_space(folder.parent, size)
        with disk.writing(folder.parent, size):
            staged = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            try:
                _write_small_files(model, staged, cache)
                hf_export.write_json(staged / CONFIG, config)
                write_safetensors(staged, planned, tensors(model, recipe, activity, progress))
                staged.chmod(_RIGHTS)
                disk.sync_folder(staged)
                staged.rename(folder)
                disk.sync_folder(folder.parent)
            except BaseException:
                shutil.rmtree(staged, ignore_errors=True)
                raise
    except disk.NoSpaceError as error:
        raise ModelError(
            f"the disk is too full for {folder}: {human_bytes(size)} are needed and "
            f"{human_bytes(error.free_bytes)} are free"
        ) from error
    except OSError as error:
        raise ModelError(f"{folder} cannot be written: {error.strerror or error}") from error


def _config(model: LocalModel, recipe: Recipe) -> dict[str, Any]:
    """The source's own configuration where it has one for a text model, else one made for it."""
    raw: dict[str, Any] = {}
    if model.gguf is None:
        raw = dict(read_json(model.path / CONFIG))
        for key in ("quantization_config", "compression_config"):
            raw.pop(key, None)
    if model.gguf is not None or "text_config" in raw:
        raw = hf_export.config_json(model.config, model.path)
    dtype = "bfloat16" if recipe.float_dtype == "BF16" else "float16"
    names = {"dtype": dtype, "torch_dtype": dtype}  # of now, and of then
    quantization = recipe.config(ignored_modules(model, recipe))
    return raw | names | {"quantization_config": quantization}


def _write_small_files(model: LocalModel, folder: Path, cache: Path) -> None:
    if model.gguf is not None:
        hf_export.write_small_files(model.gguf, model.config, folder, cache)
        return
    for file in sorted(model.path.iterdir()):
        known = file.suffix in _KEPT_SUFFIXES and file.is_file()
        ours = file.name == CONFIG or file.name in OLD_FILES
        if known and not ours and not file.name.endswith(".index.json"):
            if file.stat().st_size > _SMALL_BYTES:
                continue
            shutil.copyfile(file, folder / file.name)
