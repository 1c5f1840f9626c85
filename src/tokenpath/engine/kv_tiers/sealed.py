"""A KV block as it leaves this process: what it is of, and proof that it is whole.

::

    magic        8   what this is, and its version
    fingerprint 32   of model, number types, block size and kernels: whose blocks these are
    identity    32   of the block's tokens and everything before them, salt and adapter included
    parent      32   identity of the prefix
    size         8   bytes of the payload
    checksum    16   XXH3-128 of the payload
    own check   16   XXH3-128 of all of the above
    payload          as ``copier.BlockCopier`` gives it

There are no token ids and no salt in it: the identity is a cryptographic hash of them, so that to
compare it is to compare them, and the file tells nothing of the prompt in clear. The checksum
guards against disks and crashes, not against whoever can write our files, who could as well write
the model's; XXH3 runs at the speed of memory, where BLAKE2 would take as long as computing a small
model's block.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

Bytes = npt.NDArray[np.uint8]
MAGIC = b"TPKVBLK1"
_FIELDS = struct.Struct("<8s32s32s32sQ16s")
_CHECK_BYTES = 16
HEADER_BYTES = _FIELDS.size + _CHECK_BYTES


class DamagedBlockError(Exception):
    """A sealed block that is not as it was written, or not the one wanted; the message says how."""


@dataclass(frozen=True, slots=True)
class Seal:
    """What is known of a block besides its contents."""

    fingerprint: bytes
    identity: bytes
    parent: bytes
    checksum: bytes

    def header(self, payload_bytes: int) -> bytes:
        """What stands before the payload."""
        fields = _FIELDS.pack(
            MAGIC, self.fingerprint, self.identity, self.parent, payload_bytes, self.checksum
        )
        return fields + checksum(fields)


def checksum(data: bytes | memoryview) -> bytes:
    """XXH3-128."""
    return xxhash.xxh3_128_digest(data)


def write_block(path: Path, seal: Seal, payload: Bytes) -> None:
    """Write a new file, which nobody else may read. Raises ``OSError``; the file is gone then."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        parts = [memoryview(seal.header(payload.nbytes)), payload.data]
        while parts:
            written = os.writev(descriptor, parts)
            while parts and written >= len(parts[0]):
                written -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][written:]
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def read_block(
    path: Path, into: Bytes, *, fingerprint: bytes, identity: bytes, parent: bytes
) -> bytes:
    """Read a block's payload and return its checksum.

    Raises ``DamagedBlockError`` if it is not, byte for byte, what was written for exactly this
    block (``into`` then holds anything), and ``OSError`` if it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        if size != HEADER_BYTES + into.nbytes:
            raise DamagedBlockError(
                f"it has {size:,} bytes instead of {HEADER_BYTES + into.nbytes:,}"
            )
        header = bytearray(HEADER_BYTES)
        _read_fully(descriptor, [memoryview(header), into.data])
    finally:
        os.close(descriptor)
    its_checksum = open_seal(
        bytes(header),
        fingerprint=fingerprint,
        identity=identity,
        parent=parent,
        payload_bytes=into.nbytes,
    )
    if checksum(into.data) != its_checksum:
        raise DamagedBlockError("the checksum of its contents is wrong")
    return its_checksum


def open_seal(
    header: bytes, *, fingerprint: bytes, identity: bytes, parent: bytes, payload_bytes: int
) -> bytes:
    """The checksum that the payload of exactly this block must have, by its header.

    Raises ``DamagedBlockError`` if the header is damaged or another block's.
    """
    fields = header[: _FIELDS.size]
    if (
        len(header) != HEADER_BYTES
        or header[: len(MAGIC)] != MAGIC
        or header[_FIELDS.size :] != checksum(fields)
    ):
        raise DamagedBlockError("its header is damaged")
    _, its_fingerprint, its_identity, its_parent, size, its_checksum = _FIELDS.unpack(fields)
    if its_fingerprint != fingerprint:
        raise DamagedBlockError("it is of another model, or of another layout")
    if (its_identity, its_parent) != (identity, parent):
        raise DamagedBlockError("it holds another block than its name says")
    if size != payload_bytes:
        raise DamagedBlockError("it says another size than it has")
    return bytes(its_checksum)


def _read_fully(descriptor: int, buffers: list[memoryview]) -> None:
    while buffers:
        count = os.readv(descriptor, buffers)
        if count == 0:
            raise DamagedBlockError("it ends early")
        while buffers and count >= len(buffers[0]):
            count -= len(buffers.pop(0))
        if buffers:
            buffers[0] = buffers[0][count:]
