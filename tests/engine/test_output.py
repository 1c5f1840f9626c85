"""Sampled tokens to visible text, with the real detokenizer."""

from __future__ import annotations

from engine_fakes import PIECES, VOCAB
from hypothesis import given
from hypothesis import strategies as st

from tokenpath.engine.logprobs import TokenScores
from tokenpath.engine.output import End, OutputStream
from tokenpath.models.detokenizer import IncrementalDetokenizer
from tokenpath.protocol.events import FinishReason
from tokenpath.protocol.request import SamplingParams

EOS = 0
SPECIAL = VOCAB


class Tokens:
    """The part of a tokenizer that detokenizing needs."""

    special_ids = frozenset([EOS, SPECIAL])

    def token_bytes(self, token_id: int) -> bytes:
        return (*PIECES, b"<special>")[token_id]


def stream(max_tokens: int = 100, **params) -> OutputStream:
    tokens = Tokens()
    return OutputStream(
        SamplingParams(max_tokens=1000, **params),
        make_detokenizer=lambda stop: IncrementalDetokenizer(tokens, stop),
        tokenizer=tokens,
        eos_ids=[EOS],
        max_tokens=max_tokens,
    )


def feed(out: OutputStream, tokens: list[int]) -> tuple[list[int], str, list | None, End | None]:
    ids, text, logprobs = [], "", []
    for place, token in enumerate(tokens):
        output = out.push(token, TokenScores(-float(place), ((token, -float(place)),)))
        ids += output.token_ids
        text += output.text
        logprobs += output.logprobs or []
        if output.end:
            return ids, text, logprobs, output.end
    return ids, text, logprobs, None


def ids_of(text: str) -> list[int]:
    return [PIECES.index(character.encode()) for character in text]


def test_end_token_shows_nothing_and_counts():
    out = stream()
    assert feed(out, [*ids_of("ab"), EOS]) == (ids_of("ab"), "ab", [], End(FinishReason.STOP))
    assert out.generated == 3


def test_ignored_end_token_is_a_token_like_others():
    ids, text, _, end = feed(stream(ignore_eos=True), [*ids_of("a"), EOS, *ids_of("b")])
    assert (ids, text, end) == ([*ids_of("a"), EOS, *ids_of("b")], "ab", None)


def test_stop_token_is_reported_and_not_shown():
    stop = ids_of("c")[0]
    _, text, _, end = feed(stream(stop_token_ids=(stop,)), ids_of("abcd"))
    assert (text, end) == ("ab", End(FinishReason.STOP, stop))


def test_stop_string_ends_the_text_before_it():
    ids, text, logprobs, end = feed(stream(stop=("cd", "zz"), logprobs=1), ids_of("abcdef"))
    assert (ids, text, end) == (ids_of("ab"), "ab", End(FinishReason.STOP, "cd"))
    assert [entry.token_id for entry in logprobs] == ids


def test_beginning_of_a_stop_string_is_held_and_given_back():
    out = stream(stop=("bcx",))
    shown = [out.push(token, None).text for token in ids_of("abcd")]
    assert shown == ["a", "", "", "bcd"]
    out = stream(stop=("bcx",))
    assert feed(out, [*ids_of("abc"), EOS])[:2] == (ids_of("abc"), "abc")
    out = stream(stop=("bcx",), max_tokens=3)
    assert feed(out, ids_of("abc")) == (ids_of("abc"), "abc", [], End(FinishReason.LENGTH))


def test_stop_string_on_the_last_token_is_a_stop():
    assert feed(stream(stop=("c",), max_tokens=3), ids_of("abc"))[3] == End(FinishReason.STOP, "c")


def test_characters_come_whole_and_a_cut_one_is_marked_at_the_end():
    smile = [PIECES.index(bytes([byte])) for byte in "🙂".encode()]
    out = stream()
    assert [out.push(token, None).text for token in smile] == ["", "", "", "🙂"]
    ids, text, _, _ = feed(stream(max_tokens=3), [*ids_of("a"), *smile[:2]])
    assert text == "a\ufffd"
    assert ids == [*ids_of("a"), *smile[:2]]


def test_special_tokens_have_no_text():
    ids, text, _, _ = feed(stream(max_tokens=3), [SPECIAL, *ids_of("a"), SPECIAL])
    assert (ids, text) == ([SPECIAL, *ids_of("a"), SPECIAL], "a")


def test_stop_strings_are_looked_for_after_min_tokens():
    assert feed(stream(stop=("b",), min_tokens=2), ids_of("abab"))[:2] == (ids_of("aba"), "aba")
    assert feed(stream(stop=("b",), min_tokens=1), ids_of("abab"))[:2] == (ids_of("a"), "a")
    # One that began before is not one.
    assert feed(stream(stop=("ab",), min_tokens=1), ids_of("abab"))[1] == "ab"


def test_a_character_across_min_tokens_is_not_cut():
    smile = [PIECES.index(bytes([byte])) for byte in "🙂".encode()]
    _, text, _, end = feed(stream(stop=("b",), min_tokens=2), [*smile, *ids_of("ab")])
    assert (text, end) == ("🙂a", End(FinishReason.STOP, "b"))


@given(
    st.lists(st.integers(1, VOCAB - 1), max_size=40),
    st.lists(st.text("abc\n 🙂é", min_size=1, max_size=4), max_size=4),
    st.booleans(),
)
def test_pieces_add_up_to_the_whole(tokens, stops, with_logprobs):
    out = stream(max_tokens=len(tokens), stop=tuple(stops), logprobs=0 if with_logprobs else None)
    ids, text, logprobs, end = feed(out, tokens)
    whole = b"".join(PIECES[token] for token in tokens).decode(errors="replace")
    ends = [(whole.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in whole]
    if not tokens:
        return
    if ends:
        cut, _, stop = min(ends)
        assert text == whole[: cut - len(stop)]
        assert end == End(FinishReason.STOP, stop)
    else:
        assert (ids, text) == (tokens, whole)
        assert end == End(FinishReason.LENGTH)
    assert ids == tokens[: len(ids)]
    assert out.generated <= len(tokens)
    if with_logprobs:
        assert [(entry.token_id, entry.logprob) for entry in logprobs] == [
            (token, -float(place)) for place, token in enumerate(ids)
        ]
