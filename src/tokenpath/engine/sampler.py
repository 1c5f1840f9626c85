"""From logits to tokens: one pass over a batch whose rows have different sampling parameters.

The order of operations, per row:

1. ``logit_bias`` is added;
2. log probabilities, if asked for, are taken here;
3. the repetition penalty, then the frequency and presence penalties;
4. end and stop tokens are masked while fewer than ``min_tokens`` were generated, and what the
   grammar does not allow;
5. temperature 0 takes the largest logit, the lowest id on a tie; otherwise
6. logits are divided by the temperature, and top-k, top-p (over what top-k left) and min-p cut;
7. uniform numbers of (seed, position) pick a token by the inverse of the cumulative distribution:
   in order of probability (id on a tie) after a cut; without one, first a chunk of ids and then,
   by a number of its own, a token of the chunk.

The two stages of an uncut draw are what makes a seeded answer survive rounding. Along a single sum
over 262,144 tokens the boundaries lie closer together than float32 logits of two batches agree,
and one draw in a hundred would fall to a neighbour.

Passes over the whole vocabulary are batched and done only if some row needs them; what remains is
small, and computed per row in float64. A row's result never depends on the other rows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import torch

from tokenpath.engine.adjust import add_bias, mask_ends, mask_grammars, penalize
from tokenpath.engine.logprobs import ScoreTable, TokenScores
from tokenpath.engine.randomness import uniform
from tokenpath.engine.rows import (
    CHUNK,
    TORCH,
    Doubles,
    Floats,
    Ints,
    Reducer,
    Rows,
    select,
    to_numpy,
)
from tokenpath.engine.sampling_state import SamplingState
from tokenpath.protocol.errors import EngineError, TokenpathError
from tokenpath.protocol.request import SamplingParams

_COLDEST = 1e-5
"""Below this temperature float32 quotients may overflow, and the draw is as good as greedy."""
_NUCLEUS_STEPS = (2.0**-10, 2.0**-14, 2.0**-18)
"""Probabilities down to which a nucleus is looked for before the whole vocabulary is sorted; no
more than 1/p tokens can have a probability of p."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was drawn for one row."""

    token_id: int
    scores: TokenScores | None
    """None unless the request asked for logprobs."""


@torch.inference_mode()
def sample(
    logits: torch.Tensor, states: Sequence[SamplingState], reducer: Reducer = TORCH
) -> list[Sampled | TokenpathError]:
    """Draw one token per row of float32 ``[rows, vocab]`` logits, which are overwritten.

    A row whose logits allow no choice (NaN, +inf, or nothing above -inf) yields an ``EngineError``
    in its place, and one whose grammar cannot go on the error that says so. The states are read,
    not advanced: ``SamplingState.record`` does that.
    """
    add_bias(logits, states)
    scores = ScoreTable(logits, states, reducer)
    penalize(logits, states)
    mask_ends(logits, states)
    stuck = mask_grammars(logits, states)
    groups: defaultdict[_Method, list[int]] = defaultdict(list)
    for row, state in enumerate(states):
        groups[_method(state.params)].append(row)
    tokens: dict[int, int | TokenpathError] = {}
    for method, rows in groups.items():
        drawn = method(Rows(select(logits, rows), reducer), [states[row] for row in rows])
        tokens.update(zip(rows, drawn, strict=True))
    tokens.update(stuck)
    return [
        token if isinstance(token, TokenpathError) else Sampled(token, scores.of(row, token))
        for row, token in sorted(tokens.items(), key=itemgetter(0))
    ]


def confirmed(
    drafted: Sequence[int], drawn: Sequence[Sampled | TokenpathError]
) -> list[Sampled] | TokenpathError:
    """The tokens that a sequence goes on with: what its rows have drawn, while they belong to it.

    ``drawn`` has a row more than ``drafted`` has tokens: what was drawn before each of them, and
    after the last. A drafted token is confirmed if it is the very token that was drawn in its
    place; then the next row is the sequence's, too. So the output is what it would be without a
    draft, token for token, whatever the sampling parameters are.
    """
    tokens: list[Sampled] = []
    for place, one in enumerate(drawn):
        if isinstance(one, TokenpathError):
            # A later row's failure is found again, as the first row of the next step.
            return tokens or one
        tokens.append(one)
        if place < len(drafted) and one.token_id != drafted[place]:
            break
    return tokens


_Draws = list[int | TokenpathError]
_Method = Callable[[Rows, list[SamplingState]], _Draws]


def _method(params: SamplingParams) -> _Method:
    if params.temperature < _COLDEST:
        return _greedy
    if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
        return _filtered
    return _unfiltered


def _greedy(rows: Rows, _: list[SamplingState]) -> _Draws:
    return [
        token if math.isfinite(best) else _no_choice(best)
        for token, best in zip(rows.argmax().tolist(), rows.best.tolist(), strict=True)
    ]


def _unfiltered(rows: Rows, states: list[SamplingState]) -> _Draws:
    """Draw from the whole distribution, a chunk and then a token of it; nothing is sorted."""
    temperatures = [state.params.temperature for state in states]
    draws: _Draws = []
    for row, sums in enumerate(rows.sums(range(len(states)), temperatures)):
        best, state = float(rows.best[row]), states[row]
        if not math.isfinite(best):
            draws.append(_no_choice(best))
            continue
        chunk = _invert(sums, _uniform(state) * sums.sum())
        weights = _weights(to_numpy(rows.chunks[row, chunk]), best, temperatures[row])
        draws.append(chunk * CHUNK + _invert(weights, _uniform(state, 1) * weights.sum()))
    return draws


def _filtered(rows: Rows, states: list[SamplingState]) -> _Draws:
    nuclei = [i for i, s in enumerate(states) if s.params.top_p < 1 and s.params.top_k <= 0]
    masses: dict[int, float] = {}
    if nuclei:
        sums = rows.sums(nuclei, [states[row].params.temperature for row in nuclei])
        masses = dict(zip(nuclei, sums.sum(-1).tolist(), strict=True))
    draws: _Draws = []
    for row, state in enumerate(states):
        if not np.isfinite(rows.best[row]):
            draws.append(_no_choice(rows.best[row]))
            continue
        ids, weights = _candidates(rows, row, state.params, masses.get(row))
        draws.append(int(ids[_invert(weights, _uniform(state) * weights.sum())]))
    return draws


def _candidates(
    rows: Rows, row: int, params: SamplingParams, mass: float | None
) -> tuple[Ints, Doubles]:
    """Ids and weights (relative to the likeliest token's) of what the cuts leave, in order.

    ``mass`` is the sum of all the row's weights; needed for top-p without top-k only.
    """
    best = float(rows.best[row])
    floor = -np.inf
    if params.min_p > 0:
        exact = np.float32(best + params.temperature * np.log(params.min_p))
        floor = float(np.nextafter(exact, np.float32(-np.inf)))  # the exact cut follows below
    if params.top_k > 0:
        ids, values = rows.largest(row, params.top_k)
        weights = _weights(values, best, params.temperature)
        mass = float(weights.sum())
    elif mass is None:
        ids, values = rows.at_least(row, floor)
        weights = _weights(values, best, params.temperature)
    else:
        ids, weights = _nucleus(rows, row, params, mass, floor)
    keep = len(ids)
    if params.top_p < 1 and mass is not None:
        keep = 1 + int(np.searchsorted(weights.cumsum(), params.top_p * mass))
    keep = min(keep, int((weights >= params.min_p).sum()))
    return ids[:keep], weights[:keep]


def _nucleus(
    rows: Rows, row: int, params: SamplingParams, mass: float, floor: float
) -> tuple[Ints, Doubles]:
    """The likeliest tokens, at least down to where top-p or min-p (``floor``) cuts."""
    best = float(rows.best[row])
    for probability in _NUCLEUS_STEPS:
        threshold = best + params.temperature * np.log(min(1.0, probability * mass))
        ids, values = rows.at_least(row, max(threshold, floor))
        weights = _weights(values, best, params.temperature)
        if threshold <= floor or weights.sum() >= params.top_p * mass:
            return ids, weights
    ids, values = rows.at_least(row, floor)
    return ids, _weights(values, best, params.temperature)


def _weights(values: Floats, best: float, temperature: float) -> Doubles:
    """Probabilities relative to the largest, in float64."""
    weights: Doubles = np.exp((values.astype(np.float64) - best) / temperature)
    return weights


def _invert(weights: Doubles, target: float) -> int:
    """The first index at which the running sum of ``weights`` exceeds ``target``.

    ``target`` is below the sum up to rounding; then it is the last index of positive weight.
    """
    cumulative = weights.cumsum()
    index = int(np.searchsorted(cumulative, target, side="right"))
    return index if index < len(weights) else int(np.flatnonzero(weights)[-1])


def _uniform(state: SamplingState, stage: int = 0) -> float:
    return uniform(state.seed, state.generated, stage)


def _no_choice(best: float) -> EngineError:
    found = "nothing but -inf" if best == -np.inf else "NaN or infinity"
    return EngineError(f"the model produced {found} for this sequence, so no token can be chosen")
