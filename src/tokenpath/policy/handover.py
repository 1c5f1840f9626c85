"""Who prefills for whom, and when it is worth to have another replica do it.

A replica's *role* says what it computes. ``both`` computes whole requests, and prompts for others.
``decode`` takes requests, and lets another replica compute the keys and values of long prompts, so
that no prompt holds up its streams. ``prefill`` takes no requests of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Role = Literal["both", "prefill", "decode"]


def takes_requests(role: Role) -> bool:
    """Whether the gateway may send it requests."""
    return role != "prefill"


def gives(role: Role) -> bool:
    """Whether it may prefill for others."""
    return role != "decode"


def without_partner(roles: Sequence[Role], *, peers: bool, listens: bool) -> str | None:
    """What is wrong with a model's roles, and what would be right; None: nothing.

    ``peers``: prefilling replicas of other machines are named. ``listens``: decoding replicas of
    other machines may come.
    """
    if "decode" in roles and not peers and not any(gives(role) for role in roles):
        return (
            "a replica of role 'decode' has nobody to prefill for it; add one of role 'prefill' "
            "or 'both', or name another machine's in disaggregation.peers"
        )
    if "prefill" in roles and not listens and "decode" not in roles:
        return (
            "a replica of role 'prefill' has nobody to prefill for; add one of role 'decode', or "
            "let other machines' reach it by disaggregation.listen"
        )
    if peers and "decode" not in roles:
        return (
            "disaggregation.peers are for replicas of role 'decode', and there is none; add one "
            "or leave the peers out"
        )
    if listens and not any(gives(role) for role in roles):
        return (
            "disaggregation.listen is for a replica of role 'prefill' or 'both', and there is "
            "none; add one or leave it out"
        )
    return None


def worth_handing_over(missing_tokens: int, min_tokens: int) -> bool:
    """Whether another replica should compute so many tokens that are not cached here."""
    return missing_tokens >= min_tokens


def least_busy(prompt_tokens: Sequence[int | None]) -> int | None:
    """Which prefilling replica to ask: the place of the one with the fewest tokens under way.

    None stands for one that cannot be asked now; None comes back if none can.
    """
    usable = [(tokens, place) for place, tokens in enumerate(prompt_tokens) if tokens is not None]
    return min(usable)[1] if usable else None
