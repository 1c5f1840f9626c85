"""The GGUF container: metadata and the tensor table, checked before anyone trusts them.

``gguf.GGUFReader`` makes NumPy objects of every vocabulary entry and takes ten seconds over a
262,144-token vocabulary; a start should not wait for that. This reader keeps arrays where they are
until somebody asks, and turns each way a file can be broken into one sentence.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from tokenpath.models.layout import TensorInfo
from tokenpath.protocol.errors import ModelFileError, ModelUnsupportedError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {
    code: struct.Struct("<" + letter)
    for code, letter in {
        0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
    }.items()
}  # fmt: skip
_U32, _U64 = _SCALARS[4], _SCALARS[10]


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array that stays in the file until it is read."""

    path: Path
    key: str
    element_type: int
    count: int
    offset: int

    def strings(self) -> list[str]:
        """The elements of a string array. Raises ``ModelFileError`` for any other array."""
        if self.element_type != _STRING:
            raise ModelFileError(f"{self.path}: {self.key!r} should be an array of strings")
        # Bounds were checked when the head was read; a vocabulary is worth a tight loop.
        texts, position, length_at = [], self.offset, _U64.unpack_from
        with _mapped(self.path) as data:
            try:
                for _ in range(self.count):
                    start = position + 8
                    position = start + length_at(data, position)[0]
                    texts.append(data[start:position].decode())
            except (struct.error, UnicodeDecodeError):
                raise ModelFileError(
                    f"{self.path}: element {len(texts)} of {self.key!r} is not UTF-8 text"
                ) from None
        return texts

    def numbers(self) -> list[int | float | bool]:
        """The elements of a numeric array. Raises ``ModelFileError`` for a string array."""
        scalar = _SCALARS.get(self.element_type)
        if scalar is None:
            raise ModelFileError(f"{self.path}: {self.key!r} should be an array of numbers")
        letter = scalar.format[1:]
        with _mapped(self.path) as data:
            return list(struct.unpack_from(f"<{self.count}{letter}", data, self.offset))


GgufValue = str | int | float | bool | GgufArray


@dataclass(frozen=True, slots=True)
class GgufFile:
    """One GGUF file's metadata and tensor table; the tensors' data stay on disk."""

    path: Path
    metadata: Mapping[str, GgufValue]
    tensors: Mapping[str, TensorInfo]
    """Under the file's own names, shapes in torch's order."""

    def text(self, key: str) -> str | None:
        """A string, or None if absent. Raises ``ModelFileError`` if it is something else."""
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise ModelFileError(f"{self.path}: {key!r} is {value!r}, but should be a string")
        return value

    def integer(self, key: str) -> int | None:
        """An integer, or None if absent. Raises ``ModelFileError`` if it is something else."""
        value = self.metadata.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ModelFileError(f"{self.path}: {key!r} is {value!r}, but should be an integer")
        return value

    def number(self, key: str) -> float | None:
        """A float, or None if absent. Raises ``ModelFileError`` if it is something else."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelFileError(f"{self.path}: {key!r} is {value!r}, but should be a number")
        return float(value)

    def flag(self, key: str) -> bool | None:
        """A boolean, or None if absent. Raises ``ModelFileError`` if it is something else."""
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, bool):
            raise ModelFileError(f"{self.path}: {key!r} is {value!r}, but should be a boolean")
        return value

    def array(self, key: str) -> GgufArray | None:
        """An array, or None if absent. Raises ``ModelFileError`` if it is something else."""
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, GgufArray):
            raise ModelFileError(f"{self.path}: {key!r} is {value!r}, but should be an array")
        return value


def is_gguf(path: Path) -> bool:
    """Whether a file begins as a GGUF does."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_gguf(path: Path) -> GgufFile:
    """Read and check one GGUF file's head.

    Raises ``ModelFileError`` if it is no GGUF, is truncated or contradicts itself, and
    ``ModelUnsupportedError`` for a version or a tensor type that nobody here can read.
    """
    with _mapped(path) as data:
        start = data[: len(MAGIC)]
        if start != MAGIC:
            raise ModelFileError(
                f"{path} is not a GGUF file: it starts with {start!r} instead of {MAGIC!r}"
            )
        cursor = _Cursor(data, path, len(MAGIC))
        version = cursor.scalar(_U32, "the version")
        if version not in _VERSIONS:
            raise ModelUnsupportedError(
                f"{path} is a GGUF of version {version}; supported: little-endian versions 2 and 3"
            )
        tensor_count = cursor.scalar(_U64, "the number of tensors")
        key_count = cursor.scalar(_U64, "the number of metadata keys")
        metadata: dict[str, GgufValue] = {}
        for index in range(key_count):
            key = cursor.text(f"metadata key {index} of {key_count}")
            if key in metadata:
                raise ModelFileError(f"{path} has the metadata key {key!r} twice")
            metadata[key] = cursor.value(cursor.scalar(_U32, key), key)
        head = GgufFile(path, metadata, {})
        entries = [cursor.tensor(f"tensor {i} of {tensor_count}") for i in range(tensor_count)]
        alignment = head.integer("general.alignment") or _DEFAULT_ALIGNMENT
        if alignment < 1 or alignment & (alignment - 1):
            raise ModelFileError(f"{path}: general.alignment is {alignment}, not a power of two")
        data_start = -(-cursor.position // alignment) * alignment
        tensors = _locate(path, entries, data_start, len(data))
    return GgufFile(path, metadata, tensors)


_Entry = tuple[str, tuple[int, ...], int, int]
"""Name, shape in torch's order, type code, offset in the data section."""


def _locate(path: Path, entries: list[_Entry], start: int, size: int) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for name, shape, code, offset in entries:
        if name in tensors:
            raise ModelFileError(f"{path} has the tensor {name!r} twice")
        try:
            kind = GGMLQuantizationType(code)
        except ValueError:
            raise ModelUnsupportedError(
                f"{path}: tensor {name!r} is of type {code}, which the gguf library does not know"
            ) from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise ModelFileError(
                f"{path}: tensor {name!r} has rows of {shape[-1]} values, but {kind.name} needs a "
                f"multiple of {block}"
            )
        elements = 1
        for length in shape:
            elements *= length
        info = TensorInfo(
            shape=shape,
            dtype=kind.name,
            stored_bytes=elements // block * block_bytes,
            file=path,
            offset=start + offset,
        )
        if info.offset + info.stored_bytes > size:
            raise ModelFileError(
                f"{path} is truncated: tensor {name!r} ends at byte "
                f"{info.offset + info.stored_bytes:,}, but the file has {size:,} bytes"
            )
        tensors[name] = info
    return tensors


class _Cursor:
    """Reads forward through the head; every way past the end becomes a ``ModelFileError``."""

    __slots__ = ("_data", "_path", "position")

    def __init__(self, data: mmap.mmap, path: Path, position: int) -> None:
        self._data = data
        self._path = path
        self.position = position

    def scalar(self, kind: struct.Struct, what: str) -> int:
        self._need(kind.size, what)
        (value,) = kind.unpack_from(self._data, self.position)
        self.position += kind.size
        return value  # type: ignore[no-any-return]  # struct's letters decide the type

    def text(self, what: str) -> str:
        length = self.scalar(_U64, what)
        self._need(length, what)
        raw = self._data[self.position : self.position + length]
        self.position += length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise ModelFileError(f"{self._path}: {what} is not UTF-8 text: {raw[:40]!r}") from None

    def value(self, code: int, key: str) -> GgufValue:
        if code in _SCALARS:
            return self.scalar(_SCALARS[code], key)
        if code == _STRING:
            return self.text(key)
        if code == _ARRAY:
            return self._array(key)
        raise ModelFileError(f"{self._path}: {key!r} has the unknown value type {code}")

    def tensor(self, what: str) -> _Entry:
        name = self.text(what)
        dimensions = self.scalar(_U32, name)
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise ModelFileError(
                f"{self._path}: tensor {name!r} has {dimensions} dimensions instead of 1 to "
                f"{_MAX_DIMENSIONS}"
            )
        # GGUF lists the contiguous dimension first.
        shape = tuple(self.scalar(_U64, name) for _ in range(dimensions))[::-1]
        if 0 in shape:
            raise ModelFileError(f"{self._path}: tensor {name!r} has the empty shape {list(shape)}")
        return name, shape, self.scalar(_U32, name), self.scalar(_U64, name)

    def _array(self, key: str) -> GgufArray:
        element_type = self.scalar(_U32, key)
        count = self.scalar(_U64, key)
        array = GgufArray(self._path, key, element_type, count, self.position)
        if element_type in _SCALARS:
            size = count * _SCALARS[element_type].size
            self._need(size, key)
            self.position += size
        elif element_type == _STRING:
            self._skip_strings(count, key)
        else:
            raise ModelFileError(
                f"{self._path}: {key!r} is an array of the unreadable value type {element_type}"
            )
        return array

    def _skip_strings(self, count: int, key: str) -> None:
        # The hottest loop of opening a model: hundreds of thousands of vocabulary entries.
        unpack, data, position = _U64.unpack_from, self._data, self.position
        try:
            for _ in range(count):
                position += 8 + unpack(data, position)[0]
        except (struct.error, OverflowError):
            position = len(data) + 1
        self.position = min(position, len(data))
        self._need(position - self.position, key)

    def _need(self, size: int, what: str) -> None:
        if size > len(self._data) - self.position:
            raise ModelFileError(
                f"{self._path} is truncated or corrupt: {what} should go on for {size:,} bytes "
                f"after byte {self.position:,}, but the file has {len(self._data):,} bytes"
            )


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:  # an empty file cannot be mapped
        raise ModelFileError(f"{path} is empty, but should be a model file") from None
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from error
