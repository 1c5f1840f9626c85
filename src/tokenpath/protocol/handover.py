"""What a replica that decodes and one that prefills for it say to each other.

The replica that decodes connects, proves itself and orders one prompt's blocks of keys and values;
the other one computes the prompt and gives each block as soon as a step has filled it. A connection
carries one order, so that closing it withdraws the order, and a lost process ends it. The wire form
of a frame is that of the replica link: four bytes of big-endian length, then MessagePack. A block's
contents follow its ``Given`` as plain bytes, unless both sides share the memory that they lie in.
"""

from __future__ import annotations

from typing import Final

import msgspec

HANDOVER_VERSION: Final = 1
MAX_GREETING_BYTES: Final = 4096
MAX_ORDER_BYTES: Final = 16 * 1024 * 1024
"""Three million token ids."""


class PrefillPeer(msgspec.Struct, frozen=True):
    """A replica that prefills, as the gateway tells one that decodes."""

    address: str
    """``unix:PATH`` or ``tcp:HOST:PORT``."""
    secret: str

    def __repr__(self) -> str:
        return f"PrefillPeer({self.address!r})"


class Greeting(msgspec.Struct, frozen=True, tag="greeting"):
    """First frame of whoever connects."""

    version: int
    secret: str


class Order(msgspec.Struct, frozen=True, tag="order", kw_only=True):
    """One prompt whose blocks are wanted."""

    fingerprint: bytes
    """Of model, number types, kernels and block size: whose blocks would be understood."""
    block_bytes: int
    token_ids: list[int]
    """Of whole blocks."""
    first_block: int
    """The blocks before it are there already."""
    salt: str = ""
    priority: int = 0
    timeout_s: float | None = None
    shared: bool = False
    """The next byte brings a descriptor of the memory that the blocks are to be written to."""


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The order is queued."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """It is not, or not any more; the connection ends."""

    reason: str


class Given(msgspec.Struct, frozen=True, tag="given"):
    """The next block is there. They come in order, from ``first_block``."""

    seal: bytes
    """What it is of, and its checksum; see ``engine.kv_tiers.sealed``."""


class Working(msgspec.Struct, frozen=True, tag="working"):
    """Nothing new, but nobody has died."""


class Complete(msgspec.Struct, frozen=True, tag="complete"):
    """No block follows: all were given, or as many as could be."""


ToGiver = Greeting | Order
FromGiver = Accepted | Refused | Given | Working | Complete
