"""Which tokens are guessed, how many of them, and what is learnt from them."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenpath.policy.lookup import LookupDrafter
from tokenpath.policy.ngrams import NgramIndex
from tokenpath.policy.sequence import Sequence
from tokenpath.policy.speculation import Acceptance, Offer, choose_lengths
from tokenpath.policy.speculator import Guess, Speculator
from tokenpath.policy.step_costs import SLOPE, StepCosts


def found_slowly(tokens, longest=16):
    """The longest common past of the end and any earlier place."""

    def common(place):
        back = 0
        while back < min(place, longest) and tokens[place - 1 - back] == tokens[-1 - back]:
            back += 1
        return back

    return max(map(common, range(2, len(tokens))), default=0)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 8))
def test_the_longest_common_past_is_found(tokens, most):
    """Also when the text grows by several tokens between two look-ups."""
    index = NgramIndex()
    for end in range(1, len(tokens) + 1, 3):
        text = tokens[:end]
        match = index.find(text, most)
        slowly = found_slowly(text)
        if slowly < 2:
            assert match is None
            continue
        # Of many places only the most recent are looked at.
        assert 2 <= match.matched <= slowly
        if end <= 30:
            assert match.matched == slowly
        assert len(match.tokens) == most
        grown = text + list(match.tokens)
        place = next(
            p
            for p in range(2, end)
            if grown[p : p + most] == grown[end:]
            and text[p - match.matched : p] == text[-match.matched :]
        )
        assert place


def test_a_period_goes_on():
    assert NgramIndex().find([7, 1, 2, 3, 1, 2, 3, 1, 2], 7).tokens == (3, 1, 2, 3, 1, 2, 3)


def test_a_copied_text_keeps_its_source_among_many_places():
    source = [n for pair in zip(range(100, 140), [1, 2] * 20, strict=True) for n in pair]
    noise = [5, 9] * 60
    copied = source[:30]
    text = source + noise + copied
    index = NgramIndex()
    index.find(text, 4)
    assert index.find([*text, *source[30:32]], 4).tokens == tuple(source[32:36])


def test_a_long_prompt_is_indexed_over_several_steps():
    text = [*range(20_000), 5, 6]
    index = NgramIndex()
    found = [index.find(text, 2) for _ in range(3)]
    assert found[:2] == [None, None]
    assert found[2].tokens == (7, 8)


def sequence(name, tokens, max_tokens=100):
    return Sequence(
        name, list(tokens), len(tokens), max_tokens=max_tokens, computed=len(tokens) - 1
    )


def test_longer_common_pasts_are_better_kinds():
    drafter = LookupDrafter()
    found = [
        drafter.offers([sequence(str(n), [99, *range(n), 98, *range(n)])], 3)[str(n)].kind
        for n in (2, 3, 5, 9, 40)
    ]
    assert found == [0, 1, 2, 3, 3]
    assert list(drafter.kinds) == sorted(drafter.kinds)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.3, 0.8, 1.0])), max_size=3),
    st.integers(1, 40),
    st.integers(0, 8),
    st.sampled_from([0.0, 0.05, 0.3, 1.5]),
    st.sampled_from([0.0, 0.2]),
)
def test_lengths_promise_the_best_rate(offered, rows, budget, slope, depth_s):
    offers = [Offer(str(i), length, chance) for i, (length, chance) in enumerate(offered)]
    sampling = max(1, len(offers))

    def seconds(count):
        return 1 + slope * count

    def rate(lengths):
        tokens = sampling + sum(
            offer.chance**place
            for offer, length in zip(offers, lengths, strict=True)
            for place in range(1, length + 1)
        )
        return tokens / (seconds(rows + sum(lengths)) + max(lengths, default=0) * depth_s)

    lengths = choose_lengths(
        offers,
        rows=rows,
        sampling=sampling,
        budget=budget,
        seconds=seconds,
        depth_s=depth_s,
        margin=0.02,
    )
    chosen = [lengths.get(offer.request_id, 0) for offer in offers]
    assert sum(chosen) <= budget
    plain = rate([0] * len(offers))
    assert not any(chosen) or rate(chosen) > plain * 1.02
    if not depth_s:
        every = product(*(range(offer.length + 1) for offer in offers))
        best = max(rate(one) for one in every if sum(one) <= budget)
        if best > plain * 1.0201:
            assert rate(chosen) == pytest.approx(best)


def test_a_sequence_is_judged_by_its_own_guesses_and_a_new_one_by_all():
    acceptance = Acceptance([0.5])
    for _ in range(40):
        acceptance.tried("good", 0, confirmed=True)
        acceptance.tried("bad", 0, confirmed=False)
    assert acceptance.chance("good", 0) > 0.9
    assert acceptance.chance("bad", 0) < 0.1
    assert 0.4 < acceptance.chance("new", 0) < 0.6
    acceptance.forget("bad")
    assert 0.4 < acceptance.chance("bad", 0) < 0.6


def test_costs_are_learnt_by_rows_and_follow_the_machine():
    costs = StepCosts()
    assert costs.seconds(1) is None
    costs.measured(1, 0.1)
    assert costs.seconds(1) == pytest.approx(0.1)
    assert costs.seconds(9) == pytest.approx(0.1 * (1 + 8 * SLOPE))
    for _ in range(30):
        costs.measured(8, 0.3)
    assert costs.seconds(8) == pytest.approx(0.3)
    # Everything gets slower: what is not measured follows, by and by.
    before = costs.seconds(8)
    for _ in range(60):
        costs.measured(1, 0.2)
    assert costs.seconds(1) == pytest.approx(0.2, rel=0.05)
    assert costs.seconds(8) > 1.15 * before
    # One step that was disturbed changes little.
    costs.measured(1, 100.0)
    assert costs.seconds(1) < 0.25
    # What is not measured for long is tried again.
    for _ in range(1100):
        costs.measured(1, 0.2)
    assert costs.seconds(8) == pytest.approx(costs.seconds(1) * (1 + 7 * SLOPE))


class Fixed:
    """Offers one known draft, or one of its length."""

    kinds = (0.9,)

    def __init__(self, tokens, known=True):
        self.tokens, self.known = tuple(tokens), known

    def offers(self, sequences, most):
        tokens = self.tokens[:most]
        guess = Guess(0, len(tokens), tokens if self.known else None)
        return {one.request_id: guess for one in sequences}

    def depth_s(self, sequences):
        return 0.01

    def draft(self, lengths):
        return {name: self.tokens[:length] for name, length in lengths.items()}

    def forget(self, request_id):
        pass


@pytest.mark.parametrize("known", [True, False])
def test_speculation_turns_itself_off_and_on_again(known):
    """A guess that is known without cost is compared with what came, computed or not."""
    speculator = Speculator(Fixed([1, 2, 3], known), most_tokens=3)
    text = sequence("a", [9, 9])
    assert not speculator.guess([text], 1, 10), "nothing was measured yet"
    speculator.costs.measured(1, 1.0)
    assert speculator.guess([text], 1, 10)["a"] == (1, 2, 3)
    speculator.verified("a", 3, [1, 2, 7])
    assert (speculator.drafted_total, speculator.accepted_total) == ([1, 1, 1], [1, 1, 0])
    for _ in range(400):
        speculator.verified("a", len(speculator.guess([text], 1, 10).get("a", ())), [7])
    drafted = sum(speculator.drafted_total)
    probes = 0
    for _ in range(600):
        made = speculator.guess([text], 1, 10)
        probes += bool(made)
        speculator.verified("a", len(made.get("a", ())), [7])
    assert probes == 0 if known else 0 < probes < 10
    for _ in range(4000):
        made = speculator.guess([text], 1, 10).get("a", ())
        speculator.verified("a", len(made), [1, 2, 3, 4][: len(made) + 1])
    assert len(made) == 3
    assert sum(speculator.drafted_total) > drafted


def test_a_draft_ends_where_the_sequence_must():
    speculator = Speculator(Fixed([1, 2, 3]), most_tokens=3)
    speculator.costs.measured(1, 1.0)
    assert speculator.guess([sequence("a", [9], max_tokens=3)], 1, 10)["a"] == (1, 2)
    assert not speculator.guess([sequence("a", [9], max_tokens=1)], 1, 10)
    assert speculator.guess([sequence("a", [9])], 1, 1)["a"] == (1,)


class Rules:
    """A grammar that forces 4 5 and forbids 2."""

    def forced(self, request_id):
        return [4, 5] if request_id == "forced" else []

    def allowed(self, request_id, tokens):
        return list(tokens).index(2) if 2 in tokens else len(tokens)


def test_a_grammar_cuts_drafts_and_makes_its_own():
    speculator = Speculator(Fixed([1, 2, 3]), most_tokens=3, forms=Rules())
    speculator.costs.measured(2, 1.0)
    made = speculator.guess([sequence("forced", [9]), sequence("free", [9])], 2, 10)
    assert made == {"forced": (4, 5), "free": (1,)}
    for _ in range(60):  # forced text that the model cuts into other tokens
        speculator.verified("forced", 2, [1])
        speculator.guess([sequence("forced", [9])], 2, 10)
    assert speculator.guess([sequence("forced", [9])], 2, 10)["forced"] == (1,)
