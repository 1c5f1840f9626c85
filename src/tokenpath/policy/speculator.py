"""Speculation as an engine does it: a drafter's offers, lengths that pay, and an account of both.

Guesses whose tokens are known without a model cost nothing until they are computed. So they are
compared with what the model chose, whether they were computed or not, and speculation that was
turned off finds out by itself when it would pay again. Guesses that a model must make are made now
and then for the same end.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from tokenpath.policy.sequence import Sequence
from tokenpath.policy.speculation import Acceptance, Offer, choose_lengths
from tokenpath.policy.step_costs import StepCosts


@dataclass(frozen=True, slots=True)
class Guess:
    """What a drafter could draft for a sequence."""

    kind: int
    """An index into the drafter's ``kinds``."""
    length: int
    """At most so many tokens."""
    tokens: tuple[int, ...] | None = None
    """They, if they are known already."""


class Drafter(Protocol):
    """Makes guesses. Single-threaded."""

    @property
    def kinds(self) -> Seq[float]:
        """Kinds of guesses: the chance of each to be confirmed, before anything is known."""
        ...

    def offers(self, sequences: Seq[Sequence], most: int) -> Mapping[str, Guess]:
        """By request id, what could be drafted: at most ``most`` tokens each."""
        ...

    def depth_s(self, sequences: int) -> float:
        """Seconds that each token of the longest draft takes, made for so many sequences."""
        ...

    def draft(self, lengths: Mapping[str, int]) -> Mapping[str, Seq[int]]:
        """Tokens by request id, for offers whose tokens were not known; fewer are allowed."""
        ...

    def forget(self, request_id: str) -> None:
        """A sequence has ended."""
        ...


class Forms(Protocol):
    """What outputs must look like; see ``engine.grammar``."""

    def forced(self, request_id: str) -> Seq[int]:
        """Tokens that must come next in a sequence."""
        ...

    def allowed(self, request_id: str, tokens: Seq[int]) -> int:
        """How many of the tokens may come next, one after the other."""
        ...


@dataclass(slots=True)
class _Pending:
    """A guess about a sequence until the next of its tokens is there."""

    kind: int
    tokens: Seq[int]


_FORCED_CHANCE = 0.9
"""Of forced tokens. The text is certain; that the model cuts it into the same tokens is not."""


_PROBE_TOKENS = 4
_FIRST_WAIT, _LAST_WAIT = 16, 256
"""Steps before a drafter whose guesses cost something is tried again."""


class _Probes:
    """When to draft although it does not seem to pay: what is never made is never compared."""

    def __init__(self) -> None:
        self.made = 0
        self._idle = 0
        self._wait = _FIRST_WAIT

    def due(self, *, chosen: bool) -> bool:
        """Whether to try in this step; ``chosen`` says that drafts are made anyway."""
        if chosen:
            self._idle, self._wait = 0, _FIRST_WAIT
            return False
        self._idle += 1
        if self._idle < self._wait:
            return False
        self._idle, self._wait = 0, min(2 * self._wait, _LAST_WAIT)
        self.made += 1
        return True


class Speculator:
    """The ``Drafts`` of one scheduler."""

    def __init__(self, drafter: Drafter, *, most_tokens: int, forms: Forms | None = None) -> None:
        """``most_tokens`` is the longest draft."""
        self.most_tokens = most_tokens
        self.paused = False
        """Nothing is drafted meanwhile."""
        self.drafted_total = [0] * most_tokens
        """Drafted tokens that were computed, by their place in the draft."""
        self.accepted_total = [0] * most_tokens
        """Of them, those that were confirmed."""
        self.costs = StepCosts()
        self._drafter = drafter
        self._forms = forms
        self._forced_kind = len(drafter.kinds)
        self._acceptance = Acceptance([*drafter.kinds, _FORCED_CHANCE])
        self._pending: dict[str, _Pending] = {}
        self._probes = _Probes()

    def guess(self, sequences: Seq[Sequence], rows: int, budget: int) -> Mapping[str, Seq[int]]:
        """See ``Drafts``."""
        if self.paused:
            self._pending.clear()
            return {}
        guesses = self._offered(sequences)
        self._pending = {
            request_id: _Pending(guess.kind, guess.tokens)
            for request_id, guess in guesses.items()
            if guess.tokens
        }
        if not guesses or self.costs.seconds(rows) is None:
            return {}
        unknown = sum(guess.tokens is None for guess in guesses.values())
        lengths = choose_lengths(
            [
                Offer(request_id, guess.length, self._acceptance.chance(request_id, guess.kind))
                for request_id, guess in guesses.items()
            ],
            rows=rows,
            sampling=len(sequences),
            budget=budget,
            seconds=self._seconds,
            depth_s=self._drafter.depth_s(unknown) if unknown else 0.0,
        )
        blind = [name for name, guess in guesses.items() if guess.tokens is None and guess.length]
        if blind and self._probes.due(chosen=any(name in lengths for name in blind)):
            probed = blind[self._probes.made % len(blind)]
            if sum(lengths.values()) + _PROBE_TOKENS <= budget:
                lengths[probed] = min(_PROBE_TOKENS, guesses[probed].length)
        made = self._drafter.draft(
            {name: length for name, length in lengths.items() if guesses[name].tokens is None}
        )
        drafts: dict[str, Seq[int]] = {}
        for request_id, length in lengths.items():
            guess = guesses[request_id]
            tokens = guess.tokens or ()
            if guess.tokens is None:
                tokens = self._fitting(request_id, tuple(made.get(request_id, ())))
                self._pending[request_id] = _Pending(guess.kind, tokens)
            if tokens:
                drafts[request_id] = tokens[:length]
        return drafts

    def verified(self, request_id: str, drafted: int, tokens: Seq[int]) -> None:
        """``tokens`` came after a sequence of which ``drafted`` were computed as a draft.

        All but the last of them are the draft's first ones.
        """
        for place in range(drafted):
            self.drafted_total[place] += 1
            self.accepted_total[place] += place < len(tokens) - 1
        pending = self._pending.pop(request_id, None)
        if pending is None:
            return
        for guessed, token in zip(pending.tokens, tokens, strict=False):
            self._acceptance.tried(request_id, pending.kind, confirmed=guessed == token)
            if guessed != token:
                return

    def forget(self, request_id: str) -> None:
        """A sequence has ended."""
        self._pending.pop(request_id, None)
        self._acceptance.forget(request_id)
        self._drafter.forget(request_id)

    def _offered(self, sequences: Seq[Sequence]) -> dict[str, Guess]:
        """What could be drafted; never more than a sequence may still have."""
        rooms = {sequence.request_id: self._room(sequence) for sequence in sequences}
        guesses: dict[str, Guess] = {}
        roomy = [sequence for sequence in sequences if rooms[sequence.request_id]]
        for request_id, guess in self._drafter.offers(roomy, self.most_tokens).items():
            room, fitting = rooms[request_id], None
            if guess.tokens is not None:
                fitting = self._fitting(request_id, guess.tokens[:room])
                room = len(fitting)
            guesses[request_id] = Guess(guess.kind, min(room, guess.length), fitting)
        if self._forms is None:
            return guesses
        for request_id, room in rooms.items():
            tokens = tuple(self._forms.forced(request_id)[:room])
            if tokens:
                forced = Guess(self._forced_kind, len(tokens), tokens)
                guesses[request_id] = self._likelier(request_id, forced, guesses.get(request_id))
        return guesses

    def _likelier(self, request_id: str, one: Guess, other: Guess | None) -> Guess:
        if other is None or not other.length:
            return one
        chances = [self._acceptance.chance(request_id, guess.kind) for guess in (one, other)]
        return one if chances[0] >= chances[1] else other

    def _room(self, sequence: Sequence) -> int:
        """Tokens that may be drafted before the sequence must end."""
        return max(0, min(self.most_tokens, sequence.max_tokens - sequence.output_tokens - 1))

    def _fitting(self, request_id: str, tokens: tuple[int, ...]) -> tuple[int, ...]:
        if self._forms is None or not tokens:
            return tokens
        return tokens[: self._forms.allowed(request_id, tokens)]

    def _seconds(self, rows: int) -> float:
        found = self.costs.seconds(rows)
        assert found is not None, "checked before lengths are chosen"
        return found
