"""How much of one engine a tenant may hold: sequences that run, and blocks of keys and values.

Whatever a running sequence holds counts, wherever it came from: computed, found cached, restored
from a tier, or taken for drafted tokens. A block that several of a tenant's sequences share counts
once. A tenant that runs a single sequence may always go on with it, so that a cap delays but never
ends anything; and what was preempted holds nothing, so it counts again only once it is admitted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tokenpath.policy.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantCaps:
    """The caps, which are the same for every tenant; None: no cap."""

    max_running: int | None = None
    max_blocks: int | None = None

    def may_start(
        self,
        tenant: str,
        running: Iterable[Sequence],
        *,
        promised: int,
        shared: Collection[int],
        fresh: int,
    ) -> bool:
        """Whether one more sequence of a tenant may run beside those that run.

        ``promised`` are the blocks that the tenant's running sequences still need for the tokens
        they have, ``shared`` those that the new one would hold because they are cached, and
        ``fresh`` how many it needs besides.
        """
        mine = [sequence for sequence in running if sequence.tenant == tenant]
        if not mine:
            return True
        if self.max_running is not None and len(mine) >= self.max_running:
            return False
        if self.max_blocks is None:
            return True
        return self._fits(mine, promised + fresh, shared)

    def must_yield(
        self, sequence: Sequence, running: Iterable[Sequence], missing: int
    ) -> Sequence | None:
        """Who of a tenant has to give up its blocks before ``sequence`` may take ``missing`` more.

        The last of the tenant's in the order of ``running``, which may be ``sequence`` itself; None
        if nobody has to.
        """
        if self.max_blocks is None or missing <= 0:
            return None
        mine = [other for other in running if other.tenant == sequence.tenant]
        if len(mine) <= 1 or self._fits(mine, missing, ()):
            return None
        return mine[-1]

    def _fits(self, mine: Iterable[Sequence], more: int, shared: Collection[int]) -> bool:
        assert self.max_blocks is not None, "only asked where there is a cap"
        listed = sum(len(other.blocks) for other in mine) + len(shared)
        if listed + more <= self.max_blocks:
            return True
        held = set(shared).union(*(other.blocks for other in mine))
        return len(held) + more <= self.max_blocks
