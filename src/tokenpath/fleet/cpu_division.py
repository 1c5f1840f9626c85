"""Divides the CPUs that this server may use among its engines, beside other servers' engines.

What is decided is in ``policy.cpu_shares``; here are the machine, the claims of others and what is
said about it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence

from tokenpath.engine.cpus import cpu_limit, usable_cpus, write_cpu_list
from tokenpath.fleet.cpu_claims import CpuClaims, usual_claims
from tokenpath.policy.cpu_shares import Cpu, Division, divide

log = logging.getLogger("tokenpath.fleet")


@contextlib.contextmanager
def divided_cpus(engines: Mapping[str, int | None]) -> Iterator[Division]:
    """Each engine's CPUs, in the order of ``engines``: their names and the threads they want.

    CPUs that it gives are claimed until the context ends. Logs each share, and a warning if
    engines will take each other's time.
    """
    cpus = usable_cpus()
    limit = cpu_limit(len(cpus))
    # With a quota the CPUs are shared with others anyway, whom nobody here knows.
    claims = usual_claims() if limit == len(cpus) else None
    with contextlib.ExitStack() as cleanup:
        taken: set[int] = set()
        if claims is None:
            division = divide(cpus, list(engines.values()), limit=limit)
        else:
            cleanup.enter_context(claims)
            division, taken = _beside_others(cpus, list(engines.values()), claims)
        _report(engines, division, taken, every=[cpu.number for cpu in cpus])
        yield division


def _beside_others(
    cpus: Sequence[Cpu], wanted: Sequence[int | None], claims: CpuClaims
) -> tuple[Division, set[int]]:
    """A division of what others have left, or of everything if that is too little.

    With it the CPUs of others that it uses too, although they are claimed.
    """
    numbers = {cpu.number for cpu in cpus}
    with claims.choosing():
        taken = claims.of_others(numbers)
        free = [cpu for cpu in cpus if cpu.number not in taken]
        if free:
            division = divide(free, wanted, limit=len(free), leave_rest=True)
            taken = taken if division.oversubscribed else set()
        if taken or not free:
            division = divide(cpus, wanted, limit=len(cpus), leave_rest=True)
        claims.claim({number for share in division.shares for number in share.cpus})
    return division, taken


def _report(
    engines: Mapping[str, int | None], division: Division, taken: set[int], *, every: Sequence[int]
) -> None:
    for name, share in zip(engines, division.shares, strict=True):
        log.info("%s computes on CPUs %s (threads: %d)", name,
                 write_cpu_list(share.cpus), share.threads)  # fmt: skip
    each = ", ".join(
        f"{name} {share.threads}" for name, share in zip(engines, division.shares, strict=True)
    )
    advice = (
        f"set engine.threads so that they add up to {division.capacity} or fewer, or serve fewer "
        "models on this machine"
    )
    if taken:
        log.warning(
            "%d compute threads (%s) share CPUs %s with other tokenpath servers, which have "
            "claimed %s; they take each other's time: in all servers together, %s",
            division.threads,
            each,
            write_cpu_list(every),
            write_cpu_list(taken),
            advice,
        )
    elif division.oversubscribed:
        log.warning(
            "%d compute threads (%s) for %d CPUs; they take each other's time: %s",
            division.threads,
            each,
            division.capacity,
            advice,
        )
