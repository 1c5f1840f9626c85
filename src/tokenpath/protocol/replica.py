"""The one contract behind which every engine stands: native, managed or remote.

The gateway and the router see a ``Replica`` and nothing else. Its methods may be called from one
asyncio event loop only.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Literal, Protocol

import msgspec

from tokenpath.protocol.events import Failed, GenerationEvent
from tokenpath.protocol.pooling import Pooled, PoolingRequest
from tokenpath.protocol.request import GenerationRequest

Task = Literal["generate", "embed", "rerank", "classify"]
"""What a model is served for. ``rerank`` scores pairs of texts by one logit."""


class ReplicaState(enum.StrEnum):
    """Life of a replica."""

    PENDING = "pending"
    LOADING = "loading"
    READY = "ready"
    FALLING_ASLEEP = "falling_asleep"
    ASLEEP = "asleep"
    """The process is there, its weights and KV pool are not."""
    WAKING = "waking"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


RESTING = frozenset({ReplicaState.FALLING_ASLEEP, ReplicaState.ASLEEP, ReplicaState.WAKING})
"""States in which a replica can be had again by a wake."""


class ReplicaStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A replica's own truth at one moment.

    ``*_total`` only ever grow while the replica lives; ``kv_blocks_total`` is a size.
    """

    requests_running: int = 0
    requests_waiting: int = 0
    waiting_tokens: int = 0
    """Prompt tokens of the waiting requests that are not known to be cached."""
    kv_blocks_used: int = 0
    """Held by live requests."""
    kv_blocks_cached: int = 0
    """Held by nobody, reusable as a prefix, reclaimable at once."""
    kv_blocks_total: int = 0
    kv_host_blocks: int = 0
    """Evicted from the pool and kept in host memory."""
    kv_host_bytes: int = 0
    kv_disk_blocks: int = 0
    """Kept in files; those in host memory may be among them."""
    kv_disk_bytes: int = 0
    kv_saved_blocks_total: int = 0
    """Copied out of the pool as they were evicted."""
    kv_restored_blocks_total: int = 0
    """Copied back into the pool."""
    kv_restored_tokens_total: int = 0
    kv_disk_hits_total: int = 0
    """Blocks read from the disk because somebody's prefix has them."""
    kv_corrupt_blocks_total: int = 0
    """Found damaged, and computed instead."""
    kv_dropped_blocks_total: int = 0
    """Lost from the last tier, or never kept, for want of room or time."""
    prompt_tokens_total: int = 0
    cached_prompt_tokens_total: int = 0
    generated_tokens_total: int = 0
    drafted_tokens_total: list[int] = []
    """Guessed and computed, by the place in the draft; the first is place 1."""
    accepted_tokens_total: list[int] = []
    """Of them, those that the model then chose itself."""
    preemptions_total: int = 0
    steps_total: int = 0
    step_seconds_total: float = 0.0
    aborts_total: int = 0
    resident_bytes: int = 0
    grammars_cached: int = 0
    grammars_compiled_total: int = 0
    """Compiled, or found wrong."""
    grammar_hits_total: int = 0
    """Requests whose grammar was compiled already, or was being compiled."""
    grammar_compile_seconds_total: float = 0.0

    def counted(self) -> ReplicaStats:
        """Only what is counted, without what is held at this moment."""
        return ReplicaStats(**{name: getattr(self, name) for name in _totals()})

    def after(self, earlier: ReplicaStats) -> ReplicaStats:
        """These with totals increased by those of an engine that went before."""
        sums = {name: getattr(self, name) + getattr(earlier, name) for name in _totals()}
        return msgspec.structs.replace(self, **sums)


def _totals() -> list[str]:
    held = {"kv_blocks_total"}  # the size of the pool: nothing that grows
    return [n for n in ReplicaStats.__struct_fields__ if n.endswith("_total") and n not in held]


class ModelCard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a replica says of the model it has loaded."""

    name: str
    architecture: str
    parameters: int
    vocab_size: int
    max_context_tokens: int
    """Most tokens a sequence may have: the model's context, the spec's cap, and the KV pool."""
    dtype: str
    kv_dtype: str
    """Of keys and values."""
    weight_bytes: int
    kv_bytes_per_token: int
    kv_blocks_total: int
    block_tokens: int
    task: Task = "generate"
    dimensions: int | None = None
    """Width of an embedding; None for a model that makes none."""
    labels: list[str] = []
    """What a classifier decides between, in the order of its vectors' entries."""


class Replica(Protocol):
    """One running copy of a model."""

    @property
    def replica_id(self) -> str: ...

    @property
    def state(self) -> ReplicaState: ...

    @property
    def card(self) -> ModelCard | None:
        """None until the model has loaded."""
        ...

    @property
    def last_stats(self) -> ReplicaStats:
        """The newest stats received; zeros before the first."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """Stream the events of one request.

        Closing the iterator before its last event aborts the request in the replica within one
        engine step. Raises ``NotReadyError``, ``DrainingError`` or ``ReplicaLostError`` when
        there is nobody to answer.
        """
        ...

    def pool(self, request: PoolingRequest) -> AsyncGenerator[Pooled | Failed]:
        """Stream the vectors of one request; otherwise as ``generate``."""
        ...

    def abort(self, request_id: str) -> None:
        """Withdraw a request, and let its iterator tell what it has cost.

        The stream then ends with a ``Finish`` of reason ``abort`` within one engine step, unless
        it has ended by itself meanwhile. Unknown ids are ignored.
        """
        ...

    async def stats(self) -> ReplicaStats:
        """Ask the replica now. Raises ``ReplicaLostError``."""
        ...

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, wait up to ``grace_s`` for the running ones, abort the rest."""
        ...

    async def sleep(self, grace_s: float, *, keep_kv: bool = True) -> None:
        """Give back weights and KV pool once nothing runs, and return when that is done.

        Waits up to ``grace_s`` for running requests. With ``keep_kv`` the KV blocks that would
        survive a restart survive the sleep; without, none does. One that sleeps already stays so.
        Raises ``ConflictError`` if requests still run then, or if one came meanwhile, and
        ``ReplicaLostError``.
        """
        ...

    async def wake(self) -> None:
        """Load the weights again, and return when the replica is ready; at once if it is.

        Raises what loading raised, and ``ReplicaLostError``; the replica then goes on sleeping.
        """
        ...
