"""Whether a call may join a replica's queue, or is told at once to come back later.

Two signals are combined, since each alone fails: the replica's own report is true but old during a
burst, and the gateway's count of what it sent is new but knows nothing of other gateways or of the
engine's memory. Everything here is arithmetic on plain numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

RETRY_AFTER_S = 1.0
"""What a refused client is told to wait. A place is free as soon as any running sequence ends, so
a short time; clients add their own back-off on top."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Bounds on what may wait in one replica, from the spec."""

    requests: int
    tokens: int
    tenant_share: float = 1.0
    """Of both, what one tenant may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is known of one replica at this moment."""

    slots: int
    """Sequences it can run at once."""
    running: int = 0
    """Reported: sequences in its batch."""
    waiting: int = 0
    """Reported: sequences in its queue."""
    waiting_tokens: int = 0
    """Reported: their prompt tokens."""
    in_flight: int = 0
    """Own count: sequences this gateway has there now."""
    unreported: int = 0
    """Own count: sequences sent since the report."""
    unreported_tokens: int = 0
    """Own count: their prompt tokens."""
    tenant_in_flight: int = 0
    """Own count: sequences there now of the tenant who asks."""
    tenant_tokens: int = 0
    """Own count: their prompt tokens."""

    @property
    def sequences(self) -> int:
        """All sequences believed to be there: the larger of what the two signals say."""
        return max(self.in_flight, self.running + self.waiting + self.unreported)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a call was not admitted."""

    reason: str
    retry_after_s: float


def waiting_after(load: Load, sequences: int) -> int:
    """How many sequences would wait if ``sequences`` more were sent now.

    By the report: those that wait, and the new ones beyond the free slots (none are free while
    anything waits, since then memory is what is short). By the own count: everything beyond the
    slots. The larger of the two.
    """
    free = max(0, load.slots - load.running) if load.waiting == 0 else 0
    by_report = load.waiting + max(0, load.unreported + sequences - free)
    by_count = load.in_flight + sequences - load.slots
    return max(by_report, by_count, 0)


def admit(
    load: Load,
    limits: QueueLimits,
    *,
    sequences: int,
    prompt_tokens: int,
    has_tenant: bool = False,
) -> Refusal | None:
    """Judge one call of ``sequences`` sequences with ``prompt_tokens`` tokens in all.

    None: admitted. A call larger than the limits themselves is admitted to an idle replica, or it
    could never run at all. With ``has_tenant`` it is also held to a tenant's share: how much of
    what waits is the tenant's is not known exactly, but never more than all that waits, nor than
    all that the tenant has there.
    """
    if load.sequences == 0:
        return None
    waiting = waiting_after(load, sequences)
    if waiting == 0:
        return None
    if waiting > limits.requests:
        return Refusal(
            f"The queue is full: {waiting} requests would wait, and {limits.requests} may.",
            RETRY_AFTER_S,
        )
    tokens = load.waiting_tokens + load.unreported_tokens + prompt_tokens
    if tokens > limits.tokens:
        return Refusal(
            f"The queue is full: {tokens} prompt tokens would wait, and {limits.tokens} may.",
            RETRY_AFTER_S,
        )
    if has_tenant and load.tenant_in_flight:
        return _beyond_share(load, limits, waiting, tokens, sequences, prompt_tokens)
    return None


def _beyond_share(
    load: Load, limits: QueueLimits, waiting: int, tokens: int, sequences: int, prompt_tokens: int
) -> Refusal | None:
    """Whether a tenant that has sequences there already would have too much of the queue."""
    most_requests = max(1, int(limits.requests * limits.tenant_share))
    most_tokens = max(1, int(limits.tokens * limits.tenant_share))
    its = min(waiting, load.tenant_in_flight + sequences)
    if its > most_requests:
        return Refusal(
            f"This API key's part of the queue is full: up to {its} of its requests would wait, "
            f"and {most_requests} may.",
            RETRY_AFTER_S,
        )
    its = min(tokens, load.tenant_tokens + prompt_tokens)
    if its > most_tokens:
        return Refusal(
            f"This API key's part of the queue is full: up to {its} of its prompt tokens would "
            f"wait, and {most_tokens} may.",
            RETRY_AFTER_S,
        )
    return None
