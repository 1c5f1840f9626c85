"""Streaming: any tokens, any stop strings; the pieces add up to what the whole text says."""

import codecs

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from tokenpath.models.detokenizer import IncrementalDetokenizer, Piece
from tokenpath.models.tokenizer import BYTE_ALPHABET, Tokenizer

LETTERS = {byte: letter for letter, byte in BYTE_ALPHABET.items()}
BYTES = [
    *[
        b"a",
        b"b",
        b"ab",
        b"ba",
        b"abc",
        b" ",
        b" a",
        "é".encode(),
        "你好".encode(),
        b"\n",
        b"x" * 9,
    ],
    *[b"\xe4", b"\xbd", b"\xa0", b"\xe4\xbd", b"\xa0b", b"\xf0\x9f", b"\x8e\x89", b"\x89a"],
    *[b"\xff", b"\xed\xa0\x80", b"\xc0", b"a\xe4", b"\xa0\xf0\x9f\x8e"],
]


def make_tokenizer():
    """A byte-level tokenizer of the tokens above, and a control token after them."""
    vocab = {"".join(LETTERS[byte] for byte in token): i for i, token in enumerate(BYTES)}
    backend = Backend(models.BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return Tokenizer(backend, bos_id=None, eos_ids=())


TOKENIZER = make_tokenizer()
SPECIAL = len(BYTES)
IDS = st.lists(st.integers(0, SPECIAL + 1), max_size=30)
STOPS = st.lists(
    st.one_of(
        st.text("ab", min_size=1, max_size=4),
        st.sampled_from(["", "你", "好b", "\ufffd", "a\ufffd", " a", "<|end|>", "|>a", "xxxx"]),
    ),
    max_size=4,
)


def first_stop(text, stops):
    """The reference: the first to be complete; among those, the longest."""
    found = [
        (position + len(stop), position, stop)
        for stop in stops
        if stop and (position := text.find(stop)) >= 0
    ]
    return min(found)[1:] if found else None


def run(ids, stops=(), *, skip_special=True, tokenizer=TOKENIZER):
    """All pieces, pushed one by one and flushed, as the engine does it."""
    detokenizer = IncrementalDetokenizer(tokenizer, stops, skip_special=skip_special)
    pieces = []
    for token_id in ids:
        pieces.append(detokenizer.push(token_id))
        if pieces[-1].matched_stop is not None:
            break
    pieces.append(detokenizer.flush())
    return pieces


@given(ids=IDS, stops=STOPS, skip_special=st.booleans())
@example(ids=[3, 0, 2], stops=["abab", "ba"], skip_special=True)
@example(ids=[12, 15], stops=["\ufffd"], skip_special=True)
def test_the_pieces_are_the_whole_text(ids, stops, skip_special):
    whole = TOKENIZER.decode(ids, skip_special=skip_special)
    pieces = run(ids, stops, skip_special=skip_special)
    text = "".join(piece.text for piece in pieces)
    matched = [piece.matched_stop for piece in pieces if piece.matched_stop is not None]
    expected = first_stop(whole, stops)
    if expected is None:
        assert (text, matched) == (whole, [])
    else:
        assert (text, matched) == (whole[: expected[0]], [expected[1]])


@given(ids=IDS, stops=STOPS)
def test_nothing_is_held_back_without_a_reason(ids, stops):
    """After each token all is out but a proper beginning of a stop string, and half a character."""
    detokenizer = IncrementalDetokenizer(TOKENIZER, stops)
    out = ""
    for count, token_id in enumerate(ids, start=1):
        piece = detokenizer.push(token_id)
        out += piece.text
        if piece.matched_stop is not None:
            break
        data = b"".join(map(TOKENIZER.token_bytes, (i for i in ids[:count] if i != SPECIAL)))
        decoded = whole_characters(data)
        held = decoded[len(out) :]
        assert decoded.startswith(out)
        beginnings = [""] + [stop[:k] for stop in stops for k in range(1, len(stop))]
        assert held == max((b for b in beginnings if decoded.endswith(b)), key=len)


def whole_characters(data):
    """The text of some bytes without a last character that more bytes could complete."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


@given(ids=IDS, stops=STOPS, skip_special=st.booleans())
def test_tokens_travel_with_their_text(ids, stops, skip_special):
    """At every moment all characters of the released tokens are out, and of no token more."""
    spans = character_spans(ids, skip_special=skip_special)
    pieces = run(ids, stops, skip_special=skip_special)
    released = out = 0
    for pushed, piece in enumerate(pieces[:-1], start=1):
        released += piece.released
        out += len(piece.text)
        kept = spans[released:pushed]
        if piece.matched_stop is not None:
            # What has text before the cut is out with it; what lies behind is dropped.
            assert all(start < out or end <= out for start, end in spans[:released])
            assert all(start >= out and end > out for start, end in kept)
        else:
            assert all(end <= out for _, end in spans[:released])
            assert not kept or kept[0][1] > out
    if all(piece.matched_stop is None for piece in pieces):
        assert sum(piece.released for piece in pieces) == len(ids)


def character_spans(ids, *, skip_special):
    """First character and end of every token, found by decoding each beginning of the whole."""
    spans, data = [], b""
    for token_id in ids:
        start = len(whole_characters(data))
        if not (skip_special and token_id == SPECIAL):
            data += TOKENIZER.token_bytes(token_id)
        unfinished = whole_characters(data) != data.decode("utf-8", "replace")
        spans.append((start, len(whole_characters(data)) + unfinished))
    return spans


def ids_of(*tokens):
    return [BYTES.index(token) for token in tokens]


def test_a_character_over_three_tokens():
    pieces = run(ids_of(b"a", b"\xe4", b"\xbd", b"\xa0"))
    assert pieces == [Piece("a", 1), Piece("", 0), Piece("", 0), Piece("你", 3), Piece("", 0)]


def test_a_stop_string_over_two_tokens_swallows_only_its_own():
    pieces = run(ids_of(b"b", b"a", b"b", b"a"), ["ab"])
    assert pieces == [Piece("b", 1), Piece("", 0), Piece("", 0, "ab"), Piece("", 0)]


def test_a_false_alarm_releases_what_was_held():
    pieces = run(ids_of(b"a", b" "), ["ab"])
    assert pieces == [Piece("", 0), Piece("a ", 2), Piece("", 0)]


def test_a_token_on_both_sides_of_the_cut_is_released():
    pieces = run(ids_of(b"ab"), ["b"])
    assert pieces == [Piece("a", 1, "b"), Piece("", 0)]


def test_the_first_complete_stop_wins_and_then_the_longest():
    assert run(ids_of(b"abc"), ["abc", "b"])[0] == Piece("a", 1, "b")
    assert run(ids_of(b"abc"), ["c", "bc", "abcd"])[0] == Piece("a", 1, "bc")


def test_the_end_gives_out_what_was_held():
    pieces = run(ids_of(b"a", b"\xe4"), ["ax"])
    assert pieces == [Piece("", 0), Piece("", 0), Piece("a\ufffd", 2)]
    assert run(ids_of(b"a", b"\xe4"), ["a\ufffd"])[-1] == Piece("", 0, "a\ufffd")


def test_control_tokens_have_no_text_unless_asked_for():
    assert run([SPECIAL, 0])[:2] == [Piece("", 1), Piece("a", 1)]
    assert run([SPECIAL, 0], skip_special=False)[:2] == [Piece("<|end|>", 1), Piece("a", 1)]
    # Behind held text they wait for it.
    assert run([0, SPECIAL, 5], ["ab"]) == [
        Piece("", 0),
        Piece("", 0),
        Piece("a ", 3),
        Piece("", 0),
    ]


def test_control_tokens_that_are_shown_have_their_text():
    detokenizer = IncrementalDetokenizer(TOKENIZER, shown=[SPECIAL])
    assert detokenizer.push(SPECIAL) == Piece("<|end|>", 1)


def test_nothing_follows_the_end():
    detokenizer = IncrementalDetokenizer(TOKENIZER, ["a"])
    detokenizer.push(0)
    assert detokenizer.flush() == Piece("", 0)
    with pytest.raises(AssertionError):
        detokenizer.push(0)


def test_memory_does_not_grow_with_the_text():
    detokenizer = IncrementalDetokenizer(TOKENIZER, ["xxxxxxxxxxxxab", "ab"])
    longest = 0
    for _ in range(2_000):
        for token_id in ids_of(b"x" * 9, b"a", b" "):
            detokenizer.push(token_id)
            longest = max(longest, len(detokenizer._held), len(detokenizer._pending))
    assert longest < 14


def test_sentencepiece_keeps_the_space_that_continues_a_prompt(tmp_path):
    from checkpoints import sentencepiece_vocabulary
    from test_tokenizer import gguf_with, tokenizer_of

    path = gguf_with(tmp_path, "llama", sentencepiece_vocabulary())
    tokenizer = tokenizer_of(path, tmp_path)
    ids = tokenizer.encode("the dog 🎉", add_special=False)
    assert tokenizer.decode(ids) == "the dog 🎉"
    pieces = run(ids, tokenizer=tokenizer)
    assert "".join(piece.text for piece in pieces) == " the dog 🎉"
    assert sum(piece.released for piece in pieces) == len(ids)
