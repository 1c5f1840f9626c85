"""A real model's answer does not depend on its company: the same ids and logprobs, bit for bit.

Gemma is tried in every run of the suite; `make soak` tries Qwen 1.5B too.
"""

from __future__ import annotations

import os

import pytest

from tokenpath import Engine, SamplingParams
from tokenpath.engine.kernels.native_module import native_module

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(native_module() is None, reason="no C++ compiler when installed"),
]

BEGINNING = (
    "# Notes on how a cache of computed prefixes is kept, and when it may be used again.\n" * 9
)
PROMPTS = [f"{BEGINNING if n % 2 else ''}{n}. The capital of country number {n}" for n in range(32)]
PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=3)


def answers(model: str, prompts: list[str], *, one_by_one: bool = False, **settings) -> list:
    """Ids and logprobs of every prompt's answer."""
    chosen = {"dtype": "int8", "kv_cache_tokens": 16_384, "prefix_cache": False} | settings
    with Engine(model, progress=False, **chosen) as engine:
        if one_by_one:
            found = [engine.generate(p, PARAMS, progress=False)[0] for p in prompts]
        else:
            found = engine.generate(prompts, PARAMS, progress=False)
    return [told(completion) for completion in found]


def told(completion) -> tuple:
    return completion.token_ids, completion.logprobs


@pytest.fixture(params=["gemma-3-270m", "qwen2.5-coder-1.5b"], scope="module")
def model(request) -> str:
    if request.param.startswith("qwen") and os.environ.get("HYPOTHESIS_PROFILE") != "soak":
        pytest.skip("Qwen is tried by make soak")
    return request.param


@pytest.fixture(
    params=[("int8", "bfloat16"), ("int4", "bfloat16"), ("int8", "int8")],
    ids=lambda types: f"{types[0]}, KV {types[1]}",
    scope="module",
)
def types(request) -> dict[str, str]:
    dtype, kv_dtype = request.param
    return {"dtype": dtype, "kv_dtype": kv_dtype}


@pytest.fixture(scope="module")
def together(model, types) -> list:
    """All 32 in one batch."""
    return answers(model, PROMPTS, threads=2, **types)


def test_alone(model, types, together):
    some = [0, 1, 17, 31]
    alone = answers(model, [PROMPTS[n] for n in some], one_by_one=True, **types)
    assert alone == [together[n] for n in some]


def test_a_long_prompt_shared_by_threads(model, types):
    """Its keys are attended to in parts: with two threads the parts of one token are shared."""
    long = [BEGINNING * 4 + "And so on."]
    two = answers(model, long, threads=2, max_step_tokens=512, **types)
    assert answers(model, long, threads=1, max_step_tokens=100, **types) == two


def test_one_thread_and_short_chunks(model, types, together):
    cut = answers(model, PROMPTS[:6], threads=1, max_step_tokens=48, max_running=3, **types)
    assert cut == together[:6]


def test_a_prefix_from_the_cache(model, types, together):
    """The second time round most of each long prompt is found in the cache."""
    settings = types | {"kv_cache_tokens": 16_384, "prefix_cache": True}
    with Engine(model, progress=False, **settings) as engine:
        missed = engine.generate(PROMPTS[:6], PARAMS, progress=False)
        hit = engine.generate(PROMPTS[:6], PARAMS, progress=False)
        assert sum(completion.usage.cached_prompt_tokens for completion in hit) > 300
    assert [told(c) for c in missed] == together[:6]
    assert [told(c) for c in hit] == together[:6]
