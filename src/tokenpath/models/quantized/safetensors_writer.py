"""Writes safetensors tensor by tensor: the header first, so that nothing waits in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tokenpath.models.layout import Shape
from tokenpath.models.safetensors_file import ELEMENT_BYTES
from tokenpath.models.stored import TORCH_DTYPES

SHARD_BYTES = 4 << 30
"""Most that a file holds, unless one tensor alone is larger."""
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that will be written."""

    name: str
    dtype: str
    """As safetensors call it."""
    shape: Shape

    @property
    def bytes(self) -> int:
        """Of its data."""
        count = ELEMENT_BYTES[self.dtype]
        for size in self.shape:
            count *= size
        return count


def write_safetensors(
    folder: Path,
    entries: Sequence[Entry],
    tensors: Iterable[torch.Tensor],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write ``tensors``, which are those of ``entries`` in their order, into one file or several.

    Raises ``OSError`` for a disk that is full.
    """
    shards = _shards(entries, shard_bytes)
    names = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    )
    stream = iter(tensors)
    for name, shard in zip(names, shards, strict=True):
        _write(folder / name, shard, stream)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(entry.bytes for entry in entries)},
            "weight_map": {
                entry.name: name
                for name, shard in zip(names, shards, strict=True)
                for entry in shard
            },
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2))


def _shards(entries: Sequence[Entry], most: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.bytes > most:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.bytes
    return shards


def _write(path: Path, entries: Sequence[Entry], tensors: Iterator[torch.Tensor]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        begin, end = end, end + entry.bytes
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            tensor = next(tensors)
            assert tuple(tensor.shape) == entry.shape, entry.name
            assert tensor.dtype == TORCH_DTYPES[entry.dtype], entry.name
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
