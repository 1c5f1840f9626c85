"""The drafter that looks up how a text went on earlier; see ``policy.ngrams``."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from tokenpath.policy.ngrams import NgramIndex
from tokenpath.policy.sequence import Sequence
from tokenpath.policy.speculator import Guess

_KINDS = ((3, 0.3), (5, 0.5), (9, 0.7), (17, 0.9))
"""(common tokens below which a match is of this kind, its chance before anything is known)"""


class LookupDrafter:
    """A ``Drafter`` that needs no model: a sequence is its own."""

    kinds: Seq[float] = tuple(chance for _, chance in _KINDS)

    def __init__(self) -> None:
        self._indices: dict[str, NgramIndex] = {}

    def offers(self, sequences: Seq[Sequence], most: int) -> Mapping[str, Guess]:
        """See ``Drafter``; the longer the common past, the better the kind."""
        offered: dict[str, Guess] = {}
        for sequence in sequences:
            index = self._indices.setdefault(sequence.request_id, NgramIndex())
            match = index.find(sequence.token_ids, most)
            if match is not None:
                kind = next(i for i, (below, _) in enumerate(_KINDS) if match.matched < below)
                offered[sequence.request_id] = Guess(kind, len(match.tokens), match.tokens)
        return offered

    def depth_s(self, sequences: int) -> float:  # noqa: ARG002 - part of the contract
        """Nothing that could be felt."""
        return 0.0

    def draft(self, lengths: Mapping[str, int]) -> Mapping[str, Seq[int]]:  # noqa: ARG002 - as above
        """Nothing: all offers have their tokens."""
        return {}

    def forget(self, request_id: str) -> None:
        """See ``Drafter``."""
        self._indices.pop(request_id, None)
