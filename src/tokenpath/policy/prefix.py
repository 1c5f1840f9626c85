"""Chained block hashes: the names under which computed KV blocks are found again.

The hash of a block covers its token ids and, through its parent's hash, everything before it; the
chain starts from the cache key (tenant's salt, adapter). The same numbers identify prefixes to a
router, so they are stable across processes and machines: BLAKE2b, 64 bits, little-endian int32
token ids. A hash only *finds* a candidate; ``BlockPool`` compares the token ids before it is used.

What leaves the pool is known by its ``identity`` instead: a chain of the same shape with 256 bits,
in which a collision cannot be found by anybody. It stands in for the salt and all tokens of a
prefix where these are better not written down, such as in files.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence

BlockHasher = Callable[[int, Sequence[int]], int]
"""(hash of the parent, token ids of the block) -> hash of the block."""
IDENTITY_BYTES = 32


def chain_root(cache_key: tuple[str, str]) -> int:
    """Hash that stands before the first block of every sequence with this (salt, adapter)."""
    salt, adapter = (part.encode() for part in cache_key)
    framed = len(salt).to_bytes(8, "little") + salt + adapter
    return int.from_bytes(hashlib.blake2b(framed, digest_size=8).digest(), "little")


def block_hash(parent: int, token_ids: Sequence[int]) -> int:
    """Hash of one full block."""
    data = parent.to_bytes(8, "little") + array("i", token_ids).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def identity_root(cache_key: tuple[str, str], run: bytes = b"") -> bytes:
    """Identity that stands before the first block of every sequence with this (salt, adapter).

    ``run`` is the process's own random bytes. They are mixed in where there is an adapter: it is
    known by its name, behind which the next process may find other weights.
    """
    salt, adapter = (part.encode() for part in cache_key)
    framed = len(salt).to_bytes(8, "little") + salt + adapter + (run if adapter else b"")
    return hashlib.blake2b(framed, digest_size=IDENTITY_BYTES, person=b"kv root").digest()


def block_identity(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Identity of one full block after the prefix ``parent``."""
    data = parent + array("i", token_ids).tobytes()
    return hashlib.blake2b(data, digest_size=IDENTITY_BYTES, person=b"kv block").digest()
