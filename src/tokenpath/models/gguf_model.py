"""A model in GGUF files: the shards put together and checked against their metadata."""

from __future__ import annotations

import re
from pathlib import Path

from tokenpath.models.architecture import ModelConfig
from tokenpath.models.gguf_config import ROPE_FACTORS, gguf_config
from tokenpath.models.gguf_file import GgufFile, read_gguf
from tokenpath.models.layout import (
    TensorInfo,
    check_config,
    check_tensors,
    gguf_names,
    reject_unused,
)
from tokenpath.protocol.errors import ModelFileError

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def read_gguf_model(path: Path) -> tuple[GgufFile, ModelConfig, dict[str, TensorInfo]]:
    """The first file, the configuration and the tensors under canonical names.

    ``path`` is the file, or the first of its shards. Raises ``ModelFileError`` and
    ``ModelUnsupportedError``.
    """
    first = read_gguf(path)
    stored = dict(first.tensors)
    for shard in _other_shards(first):
        tensors = read_gguf(shard).tensors
        twice = stored.keys() & tensors.keys()
        if twice:
            raise ModelFileError(f"{shard} repeats the tensor {min(twice)!r} of another shard")
        stored |= tensors
    config = gguf_config(first, stored)
    check_config(config, path)
    names = gguf_names(config)
    reject_unused(stored.keys() - names.keys() - {ROPE_FACTORS}, config.family, path)
    canonical = {names[name]: info for name, info in stored.items() if name in names}
    stored_names = {name: stored_name for stored_name, name in names.items()}
    check_tensors(config, canonical, path, stored_names=stored_names)
    return first, config, canonical


def first_gguf(folder: Path) -> Path | None:
    """The one GGUF model of a folder, by its first shard; None if the folder has no GGUF.

    Raises ``ModelFileError`` if there are several to choose from.
    """
    files = sorted(folder.glob("*.gguf"))
    firsts = [file for file in files if _shard_number(file) in {None, 1}]
    if len(firsts) > 1:
        names = ", ".join(file.name for file in firsts)
        raise ModelFileError(f"{folder} has several GGUF models ({names}); name one of the files")
    if files and not firsts:
        raise ModelFileError(f"{folder} has {files[0].name}, but not the first shard of its model")
    return firsts[0] if firsts else None


def _shard_number(path: Path) -> int | None:
    match = _SHARD.fullmatch(path.name)
    return int(match["number"]) if match else None


def _other_shards(first: GgufFile) -> list[Path]:
    count = first.integer("split.count") or 1
    if count == 1:
        return []
    match = _SHARD.fullmatch(first.path.name)
    if match is None or int(match["number"]) != 1 or int(match["count"]) != count:
        raise ModelFileError(
            f"{first.path} is one of {count} shards; open the first, named "
            f"NAME-00001-of-{count:05}.gguf"
        )
    shards = [
        first.path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf")
        for number in range(2, count + 1)
    ]
    for shard in shards:
        if not shard.is_file():
            raise ModelFileError(f"{first.path} lacks its shard {shard.name}")
    return shards
