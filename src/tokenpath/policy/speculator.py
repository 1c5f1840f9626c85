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


@dataclass(frozen=True, slots=True)
class _Known:
    """A guess about a sequence, to be compared with what comes."""

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

    def __init__(
        self, drafters: Seq[Drafter], *, most_tokens: int, forms: Forms | None = None
    ) -> None:
        """``most_tokens`` is the longest draft; of several drafters the likeliest guess counts."""
        self.most_tokens = most_tokens
        self.paused = False
        """Nothing is drafted meanwhile."""
        self.drafted_total = [0] * most_tokens
        """Drafted tokens that were computed, by their place in the draft."""
        self.accepted_total = [0] * most_tokens
        """Of them, those that were confirmed."""
        self.costs = StepCosts()
        self._drafters = drafters
        self._forms = forms
        kinds = [chance for drafter in drafters for chance in drafter.kinds]
        self._forced_kind = len(kinds)
        self._acceptance = Acceptance([*kinds, _FORCED_CHANCE])
        self._known: dict[str, list[_Known]] = {}
        self._probes = _Probes()

    def guess(self, sequences: Seq[Sequence], rows: int, budget: int) -> Mapping[str, Seq[int]]:
        """See ``Drafts``."""
        self._known.clear()
        if self.paused:
            return {}
        known, blind = self._offered(sequences)
        if not (known or blind) or self.costs.seconds(rows) is None:
            return {}
        lengths: dict[str, int] = {}
        if blind:
            lengths = self._lengths(known | blind, rows, len(sequences), budget)
        if not blind.keys() & lengths.keys():
            lengths = self._lengths(known, rows, len(sequences), budget)
        drafts = {name: known[name].tokens or () for name in lengths if name in known}
        if blind:
            drafts |= self._made(self._with_probe(lengths, blind, budget), blind)
        return {name: tokens[: lengths[name]] for name, tokens in drafts.items() if tokens}

    def verified(self, request_id: str, drafted: int, tokens: Seq[int]) -> None:
        """``tokens`` came after a sequence of which ``drafted`` were computed as a draft.

        All but the last of them are the draft's first ones.
        """
        for place in range(drafted):
            self.drafted_total[place] += 1
            self.accepted_total[place] += place < len(tokens) - 1
        for guess in self._known.pop(request_id, ()):
            for guessed, token in zip(guess.tokens, tokens, strict=False):
                self._acceptance.tried(request_id, guess.kind, confirmed=guessed == token)
                if guessed != token:
                    break

    def totals(self) -> tuple[list[int], list[int]]:
        """``drafted_total`` and ``accepted_total`` up to the last place that was ever drafted."""
        used = self.most_tokens - self.drafted_total.count(0)
        return self.drafted_total[:used], self.accepted_total[:used]

    def forget(self, request_id: str) -> None:
        """A sequence has ended."""
        self._known.pop(request_id, None)
        self._acceptance.forget(request_id)
        for drafter in self._drafters:
            drafter.forget(request_id)

    def _offered(self, sequences: Seq[Sequence]) -> tuple[dict[str, Guess], dict[str, Guess]]:
        """The likeliest known guess about each sequence, and those to be made that are likelier.

        Never of more tokens than a sequence may still have.
        """
        rooms = {sequence.request_id: self._room(sequence) for sequence in sequences}
        roomy = [sequence for sequence in sequences if rooms[sequence.request_id]]
        offered: list[tuple[str, Guess]] = []
        first_kind = 0
        for drafter in self._drafters:
            for request_id, guess in drafter.offers(roomy, self.most_tokens).items():
                kind, length = first_kind + guess.kind, min(rooms[request_id], guess.length)
                tokens = guess.tokens
                if tokens is not None:
                    tokens = self._fitting(request_id, tokens[:length])
                    length = len(tokens)
                offered.append((request_id, Guess(kind, length, tokens)))
            first_kind += len(drafter.kinds)
        for request_id, room in rooms.items():
            tokens = tuple(self._forms.forced(request_id)[:room]) if self._forms else ()
            offered.append((request_id, Guess(self._forced_kind, len(tokens), tokens)))
        known: dict[str, Guess] = {}
        blind: dict[str, Guess] = {}
        for request_id, guess in offered:
            if not guess.length:
                continue
            kept = known
            if guess.tokens is None:
                kept = blind
            else:
                self._known.setdefault(request_id, []).append(_Known(guess.kind, guess.tokens))
            if self._chance(request_id, guess) > self._chance(request_id, kept.get(request_id)):
                kept[request_id] = guess
        for request_id, guess in known.items():
            if self._chance(request_id, guess) >= self._chance(request_id, blind.get(request_id)):
                blind.pop(request_id, None)
        return known, blind

    def _chance(self, request_id: str, guess: Guess | None) -> float:
        return 0.0 if guess is None else self._acceptance.chance(request_id, guess.kind)

    def _lengths(
        self, guesses: Mapping[str, Guess], rows: int, sampling: int, budget: int
    ) -> dict[str, int]:
        blind = sum(guess.tokens is None for guess in guesses.values())
        return choose_lengths(
            [
                Offer(
                    request_id,
                    guess.length,
                    self._chance(request_id, guess),
                    costly=guess.tokens is None,
                )
                for request_id, guess in guesses.items()
            ],
            rows=rows,
            sampling=sampling,
            budget=budget,
            seconds=self._seconds,
            depth_s=sum(d.depth_s(blind) for d in self._drafters) if blind else 0.0,
        )

    def _with_probe(
        self, lengths: dict[str, int], blind: Mapping[str, Guess], budget: int
    ) -> dict[str, int]:
        """The lengths of drafts to be made, with one more now and then if there are none."""
        chosen = {name: lengths[name] for name in blind if name in lengths}
        if self._probes.due(chosen=bool(chosen)):
            probed = list(blind)[self._probes.made % len(blind)]
            length = min(_PROBE_TOKENS, blind[probed].length)
            if probed not in lengths and sum(lengths.values()) + length <= budget:
                lengths[probed] = chosen[probed] = length
        return chosen

    def _made(
        self, lengths: Mapping[str, int], blind: Mapping[str, Guess]
    ) -> dict[str, tuple[int, ...]]:
        """Have drafts made."""
        made: dict[str, tuple[int, ...]] = {}
        if not lengths:
            return made
        for drafter in self._drafters:
            for request_id, tokens in drafter.draft(lengths).items():
                made[request_id] = self._fitting(request_id, tuple(tokens))
                known = _Known(blind[request_id].kind, made[request_id])
                self._known.setdefault(request_id, []).append(known)
        return made

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
