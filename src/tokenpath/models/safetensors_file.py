"""The safetensors container: a JSON header that says where each tensor lies, and may lie itself."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenpath.models.layout import TensorInfo
from tokenpath.protocol.errors import ModelFileError

ELEMENT_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000
"""The format's own bound."""


def read_safetensors(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of one file, under the file's own names.

    Raises ``ModelFileError`` if the file is truncated or its header contradicts itself or the
    file's size.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if len(start) < 8:  # noqa: PLR2004  the header's length is a 64-bit number
                raise ModelFileError(f"{path} is truncated: it has only {size} bytes")
            (length,) = struct.unpack("<Q", start)
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise ModelFileError(
                    f"{path} is no safetensors file or is truncated: its header should have "
                    f"{length:,} bytes, but the file has {size:,}"
                )
            text = file.read(length)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from error
    return _tensors(path, _parse(path, text), data_start=8 + length, size=size)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except ValueError as error:
        raise ModelFileError(f"{path}: its safetensors header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise ModelFileError(f"{path}: its safetensors header is not a JSON object")
    header.pop("__metadata__", None)
    return header


def _tensors(
    path: Path, header: dict[str, Any], *, data_start: int, size: int
) -> dict[str, TensorInfo]:
    tensors = {}
    covered = []
    for name, entry in header.items():
        dtype, shape, begin, end = _entry(path, name, entry)
        elements = 1
        for length in shape:
            elements *= length
        wanted = elements * ELEMENT_BYTES[dtype]
        if end - begin != wanted:
            raise ModelFileError(
                f"{path}: tensor {name!r} of {dtype} and shape {list(shape)} needs {wanted:,} "
                f"bytes, but its offsets span {end - begin:,}"
            )
        if data_start + end > size:
            raise ModelFileError(
                f"{path} is truncated: tensor {name!r} ends at byte {data_start + end:,}, but the "
                f"file has {size:,} bytes"
            )
        covered.append((begin, end, name))
        tensors[name] = TensorInfo(
            shape=shape, dtype=dtype, stored_bytes=wanted, file=path, offset=data_start + begin
        )
    for (_, end, name), (begin, _, other) in itertools.pairwise(sorted(covered)):
        if begin < end:
            raise ModelFileError(f"{path}: the tensors {name!r} and {other!r} overlap")
    return tensors


def _entry(path: Path, name: str, entry: object) -> tuple[str, tuple[int, ...], int, int]:
    if isinstance(entry, dict):
        dtype: Any = entry.get("dtype")
        shape: Any = entry.get("shape")
        span: Any = entry.get("data_offsets")
        if isinstance(dtype, str) and dtype in ELEMENT_BYTES and _naturals(shape, span):
            begin, end = span if len(span) == 2 else (0, -1)  # noqa: PLR2004  begin and end
            if begin <= end:
                return dtype, tuple(shape), begin, end
    raise ModelFileError(
        f"{path}: the header's entry for tensor {name!r} should have a known dtype, a shape and "
        f"two data_offsets, but is {str(entry)[:120]}"
    )


def _naturals(*values: object) -> bool:
    return all(
        isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
        for value in values
    )
