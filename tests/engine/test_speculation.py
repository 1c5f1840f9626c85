"""Speculation changes when tokens come, and nothing else."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch
from engine_fakes import FreeRows

from tokenpath import Engine, Grammar, SamplingParams
from tokenpath.engine.kernels.native_module import native_module
from tokenpath.engine.sampler import confirmed, sample
from tokenpath.engine.sampling_state import SamplingState, states_along
from tokenpath.protocol.events import FinishReason

needs_native = pytest.mark.skipif(native_module() is None, reason="no C++ compiler when installed")

LIST = "one apple, two pears, three plums, four figs, five limes, six dates, "
LONG = LIST * 30
"""Longer than Gemma's sliding window of 512 tokens, and so repetitive that drafts are long."""
SCHEMA = {
    "type": "array",
    "minItems": 3,
    "maxItems": 3,
    "items": {
        "type": "object",
        "properties": {"fruit": {"type": "string", "maxLength": 8}, "count": {"enum": [1, 2, 3]}},
        "required": ["fruit", "count"],
        "additionalProperties": False,
    },
}
CASES: dict[str, tuple[str, SamplingParams]] = {
    "greedy": (LONG, SamplingParams(max_tokens=28, temperature=0, ignore_eos=True)),
    "sampled": (LONG, SamplingParams(max_tokens=28, temperature=1.3, seed=1, ignore_eos=True)),
    "nucleus": (LONG, SamplingParams(max_tokens=28, temperature=1, top_p=0.9, seed=2, logprobs=3)),
    "top-k": (LIST, SamplingParams(max_tokens=40, temperature=0.8, top_k=5, seed=3, logprobs=0)),
    "penalties": (
        LIST,
        SamplingParams(
            max_tokens=40,
            temperature=0.7,
            seed=4,
            repetition_penalty=1.1,
            presence_penalty=0.3,
            frequency_penalty=0.2,
            logprobs=2,
            ignore_eos=True,
        ),
    ),
    "bias": (
        LIST,
        SamplingParams(max_tokens=30, temperature=0, logit_bias={1: 50.0}, min_tokens=9),
    ),
    "stop string": (LIST * 3, SamplingParams(max_tokens=60, temperature=0, stop=("0 limes",))),
    "form": (
        f"{LIST}as JSON:",
        SamplingParams(
            max_tokens=120, temperature=0.5, seed=5, grammar=Grammar.json_schema(SCHEMA)
        ),
    ),
}


@pytest.fixture(scope="module")
def engine():
    """A pool so small that long sequences preempt each other, and tiers for what it evicts."""
    with Engine(
        "gemma-3-270m",
        dtype="int8",
        threads=2,
        kv_cache_tokens=672,
        kv_tiers={"host_bytes": 64 << 20},
        speculation={"draft_tokens": 6},
        progress=False,
    ) as made:
        yield made


def answers(engine: Engine, *, speculating: bool) -> dict[str, tuple]:
    core = engine._core
    core.speculator.costs = FreeRows()
    core.speculator.paused = not speculating
    prompts, params = zip(*CASES.values(), strict=True)
    made = engine.generate(list(prompts), list(params), progress=False)
    core.check_integrity()
    told = [(c.token_ids, c.text, c.finish_reason, c.matched_stop, c.logprobs) for c in made]
    usage = [c.usage.completion_tokens for c in made]
    return dict(zip(CASES, zip(told, usage, strict=True), strict=True))


@pytest.mark.real_model
@needs_native
def test_the_answers_are_the_same_bits(engine):
    """Any sampling, stop strings, a grammar, preemption, tiers, and a window that is left behind."""
    plain = answers(engine, speculating=False)
    before = engine.stats()
    fast = answers(engine, speculating=True)
    after = engine.stats()
    assert fast == plain
    assert plain["stop string"][0][2:4] == (FinishReason.STOP, "0 limes")
    assert len(json.loads(plain["form"][0][1])) == 3
    assert after.preemptions_total > before.preemptions_total
    assert after.kv_restored_tokens_total > 0
    drafted, accepted = sum(after.drafted_tokens_total), sum(after.accepted_tokens_total)
    assert drafted > accepted > 20, "both kinds of drafts were there"
    assert len(after.drafted_tokens_total) == 6
    tokens = after.generated_tokens_total - before.generated_tokens_total
    assert tokens == sum(usage for _, usage in plain.values())
    assert after.steps_total - before.steps_total < 0.75 * before.steps_total


@pytest.mark.real_model
@needs_native
def test_a_draft_that_goes_back_behind_the_window_is_no_fault(engine):
    """A window of 512: a draft of 6 computed past it and taken back leaves no trace.

    All keys and values of a layer with a window are kept, so going back needs none again.
    """
    core = engine._core
    core.speculator.costs = FreeRows()
    wrong = engine.tokenizer.encode("So: " + LIST * 30)
    params = SamplingParams(max_tokens=24, temperature=1.5, seed=9, ignore_eos=True, logprobs=1)
    made = {}
    for paused in (True, False):
        core.speculator.paused = paused
        made[paused] = engine.generate([wrong], params, progress=False)[0]
    drafted, accepted = core.speculator.drafted_total, core.speculator.accepted_total
    assert sum(drafted) > sum(accepted)
    assert (made[True].token_ids, made[True].logprobs) == (
        made[False].token_ids,
        made[False].logprobs,
    )


@pytest.mark.parametrize("params", [{}, {"top_k": 4}, {"repetition_penalty": 1.4}, {"top_p": 0.8}])
def test_the_distribution_is_that_of_plain_sampling(params):
    """Two tokens of a vocabulary of six, drawn with a draft, against their exact probabilities."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(3)
    first = torch.tensor(rng.normal(size=6), dtype=torch.float32)
    after = torch.tensor(rng.normal(size=(6, 6)), dtype=torch.float32)
    count, draft = 6_000, 2
    settings = SamplingParams(max_tokens=2, temperature=0.9, **params)
    states = [SamplingState(settings, prompt=[0], seed=seed) for seed in range(count)]
    rows = [row for state in states for row in states_along(state, [draft])]
    drawn = sample(torch.stack([first, after[draft]] * count), rows)
    assert all(state.generated == 0 for state in states)
    pairs, late = [], []
    for index, state in enumerate(states):
        tokens = [one.token_id for one in confirmed([draft], drawn[2 * index : 2 * index + 2])]
        pairs.append(tokens)
        state.record(tokens[0])
        if len(tokens) == 1:
            late.append(index)
    again = sample(after[[pairs[i][0] for i in late]].clone(), [states[i] for i in late])
    for index, one in zip(late, again, strict=True):
        pairs[index].append(one.token_id)
    found = Counter(map(tuple, pairs))
    chi_square, kinds = 0.0, 0
    expected = exact(settings, first, after)
    assert set(found) <= set(expected)
    for pair, probability in expected.items():
        if probability * count >= 5:
            chi_square += (found[pair] - probability * count) ** 2 / (probability * count)
            kinds += 1
    # Far in the tail: the mean is ``kinds``, the variance twice that.
    assert chi_square < kinds + 4 * (2 * kinds) ** 0.5


def exact(settings: SamplingParams, first: torch.Tensor, after: torch.Tensor) -> dict:
    """Probabilities of all pairs, computed the plain way."""

    def distribution(logits: torch.Tensor, seen: set[int]) -> torch.Tensor:
        logits = logits.double().clone()
        for token in seen:
            penalty = settings.repetition_penalty
            logits[token] = (
                logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
            )
        chances = torch.softmax(logits / settings.temperature, 0)
        order = chances.argsort(descending=True)
        kept = len(order) if not settings.top_k else settings.top_k
        if settings.top_p < 1:
            kept = min(kept, 1 + int((chances[order].cumsum(0) < settings.top_p).sum()))
        chances[order[kept:]] = 0
        return chances / chances.sum()

    start = distribution(first, {0})
    return {
        (a, b): float(start[a] * second)
        for a in range(6)
        if start[a] > 0
        for b, second in enumerate(distribution(after[a], {0, a}))
        if second > 0
    }
