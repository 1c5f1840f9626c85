"""What each request asks: made-up prompts of stated lengths that share exactly what they should.

A server's prefix cache makes a repeated prompt nearly free, so a benchmark that repeats prompts by
accident measures the cache. Here a prompt is a list of segments. A segment's content is a function
of the seed and its key alone: equal keys give equal content, different keys differ from their
first tokens on, because these spell the key.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenpath.bench.trace import ScaledRow
from tokenpath.protocol.errors import SpecError

_STREAM = 2
"""Keeps the lengths' random stream apart from the arrivals' under one seed."""
_KEY_LIMIT = 1 << 36
"""Keys are below this: sixty billion requests or blocks."""

_WORDS = """
    able about above act add after again age ago air all also always among animal answer any appear
    area arm art ask away back ball bank base bear beat bed begin behind best better big bird black
    blood blue board boat body bone book born both box boy break bring brother build burn bus busy
    buy call came camp can capital car card care carry case cat catch cause cell cent center chair
    chance change check chief child choose church circle city claim class clean clear climb clock
    close cloud coast coat cold collect color come common company compare contain cook cool copy
    corn corner cost cotton could count country course cover create cross crowd cry current cut
    dance danger dark day dead deal dear death decide deep degree depend desert design develop die
    differ dinner direct discuss distant doctor dog dollar door double down draw dream dress drink
    drive drop dry during each early ear earth ease east eat edge effect egg eight either electric
    else end enemy energy engine enough enter equal even evening event ever every exact example
    except expect eye face fact fair fall family famous far farm fast fat father favor fear feed
    feel feet fell few field fig fight figure fill final find fine finger finish fire first fish
    fit five flat floor flow flower fly follow food foot force forest form forward four free fresh
    """
WORDS = tuple(_WORDS.split())
"""Common English words, one token each for most tokenizers. Fixed: a changed list would change the
prompts of a seed."""


class Domain(enum.IntEnum):
    """Kinds of content, so that equal numbers in different kinds are different keys."""

    UNIQUE = 0
    """Of one request; the number is the request's."""
    BLOCK = 1
    """Of a Mooncake block; the number is its hash id."""
    SHARED = 2
    """The prefix that all requests share."""
    WARMUP = 3
    """Of one warm-up request."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a prompt: the first ``tokens`` tokens of the content named by its key."""

    domain: Domain
    number: int
    tokens: int


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request, decided before the run."""

    index: int
    segments: tuple[Segment, ...]
    output_tokens: int
    offset_s: float | None = None
    """Seconds from the start at which it is due; None in a closed loop."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens that the prompt is meant to have (exact only for token id prompts)."""
        return sum(segment.tokens for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Length:
    """A number of tokens, drawn uniformly from ``low`` to ``high``, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, option: str) -> Length:
        """Read ``128`` or ``uniform:16-64``. Raises ``SpecError`` naming ``option``."""
        found = re.fullmatch(r"(\d{1,9})|uniform:(\d{1,9})-(\d{1,9})", text.strip())
        if found is None:
            raise SpecError(f"{option} must be like 128 or uniform:16-64, not {text[:40]!r}")
        fixed, low, high = found.groups()
        length = cls(int(fixed or low), int(fixed or high))
        if not 1 <= length.low <= length.high:
            raise SpecError(f"{option} must be at least 1 and not run downwards, not {text!r}")
        return length

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"uniform:{self.low}-{self.high}"


def synthetic(
    prompt: Length,
    output: Length,
    *,
    shared_prefix_tokens: int,
    seed: int,
    offsets: Iterable[float] | None = None,
    domain: Domain = Domain.UNIQUE,
) -> Iterator[PlannedRequest]:
    """Plan requests with drawn lengths; endless unless ``offsets`` ends.

    ``prompt`` counts the whole prompt; of it, ``shared_prefix_tokens`` are the same in every
    request, the rest is the request's own.
    """
    rng = np.random.default_rng([seed, _STREAM, domain])
    moments = iter(offsets) if offsets is not None else None
    index = 0
    while True:
        due = next(moments, None) if moments is not None else None
        if moments is not None and due is None:
            return
        total = int(rng.integers(prompt.low, prompt.high, endpoint=True))
        shared = min(shared_prefix_tokens, total - 1)
        segments = [Segment(Domain.SHARED, 0, shared)] if shared > 0 else []
        segments.append(Segment(domain, index, total - shared))
        answer = int(rng.integers(output.low, output.high, endpoint=True))
        yield PlannedRequest(index, tuple(segments), answer, due)
        index += 1


def from_trace(rows: Iterable[ScaledRow]) -> Iterator[PlannedRequest]:
    """Plan the requests of a trace: its moments, its lengths and its shared blocks."""
    for index, row in enumerate(rows):
        segments = tuple(
            Segment(Domain.UNIQUE, index, tokens)
            if block_id is None
            else Segment(Domain.BLOCK, block_id, tokens)
            for block_id, tokens in row.blocks
        )
        yield PlannedRequest(index, segments, row.output_tokens, row.offset_s)


def content(segments: Iterable[Segment], *, alphabet: int, seed: int) -> NDArray[np.int64]:
    """Return the prompt as symbols, int64 of shape [tokens], each in ``0 .. alphabet - 1``.

    A segment begins with its key in the alphabet's digits, lowest first, each turned by the seed;
    the rest is a hash of seed, key and position. Segments of different keys therefore differ
    whenever they are long enough to hold a key's digits (``key_symbols``), and mostly before.
    """
    return np.concatenate([_segment(s, alphabet, seed) for s in segments])


def key_symbols(alphabet: int) -> int:
    """Return how many symbols of an alphabet (2 or more) it takes to spell any key."""
    count, reach = 0, 1
    while reach < _KEY_LIMIT:
        count, reach = count + 1, reach * alphabet
    return count


def words(symbols: NDArray[np.int64]) -> str:
    """Spell symbols of the alphabet ``len(WORDS)`` as text."""
    return " ".join([WORDS[symbol] for symbol in symbols.tolist()])


def _segment(segment: Segment, alphabet: int, seed: int) -> NDArray[np.int64]:
    key = segment.number * len(Domain) + segment.domain
    if not 0 <= key < _KEY_LIMIT:
        raise SpecError(f"a hash id of the trace is too large: {segment.number}")
    positions = np.arange(segment.tokens, dtype=np.uint64)
    symbols = _hash(positions, _scalar_hash(seed, key)) % np.uint64(alphabet)
    rest = key
    for place in range(min(key_symbols(alphabet), segment.tokens)):
        rest, digit = divmod(rest, alphabet)
        symbols[place] = (digit + _scalar_hash(seed, _KEY_LIMIT + place)) % alphabet
    return symbols.astype(np.int64)


_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def _hash(values: NDArray[np.uint64], salt: int) -> NDArray[np.uint64]:
    """SplitMix64's output function over ``salt`` plus each value's step; wraps at 2**64."""
    mixed = values * np.uint64(_GOLDEN) + np.uint64(salt)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_MIX_1)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MIX_2)
    return mixed ^ (mixed >> np.uint64(31))


def _scalar_hash(seed: int, value: int) -> int:
    mixed = (seed * _MIX_1 + (value + 1) * _GOLDEN) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * _MIX_1) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * _MIX_2) & _MASK
    return mixed ^ (mixed >> 31)
