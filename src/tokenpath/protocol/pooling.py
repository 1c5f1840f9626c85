"""Whole inputs in, one vector each out: what embedding, scoring and classifying have in common.

A ``PoolingRequest`` carries all inputs of one API call; its vectors come back in ``Pooled`` events
as they are computed, in any order, the last of them with a ``Finish``. A request that fails ends
with a ``Failed``, as a generating one does (``protocol.events``).
"""

from __future__ import annotations

import msgspec

from tokenpath.protocol.events import Finish


class PoolingInput(msgspec.Struct, frozen=True, array_like=True):
    """One input as token ids, tokenized once by the gateway."""

    token_ids: list[int]
    second: int | None = None
    """Where the second text of a pair begins; None for a single text."""


class PoolingRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The inputs of one API call."""

    request_id: str
    """Unique among the live requests of a replica."""
    model: str
    inputs: list[PoolingInput]
    priority: int = 0
    """Lower runs earlier; equal priorities share the steps."""
    timeout_s: float | None = None
    """Seconds left to the request when it was sent; a duration, since clocks differ."""

    @property
    def tokens(self) -> int:
        """Of all inputs together."""
        return sum(len(each.token_ids) for each in self.inputs)


class Pooled(msgspec.Struct, frozen=True, tag="pooled", omit_defaults=True):
    """Vectors of some of a request's inputs."""

    request_id: str
    places: list[int] = []
    """Which inputs; each place comes once."""
    vectors: bytes = b""
    """float32, little-endian: one row of the model's width for each place."""
    finish: Finish | None = None
    """With the last of them."""
