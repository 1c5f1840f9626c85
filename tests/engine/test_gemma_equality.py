"""The real Gemma 270M writes what transformers writes, however its tokens are scheduled.

One pass of the reference checks 20 texts of 64 greedy tokens and every logit they were chosen
from; each way of scheduling must then give those very tokens. `make soak` has every schedule write
all the texts; `make test` takes fewer of them where a schedule is slow.
"""

from __future__ import annotations

import os

import pytest
import torch
from driver import Driver
from reference import gemma_reference, reference_logits

from tokenpath import Engine, SamplingParams
from tokenpath.engine.runner import ModelRunner
from tokenpath.models.local import open_model

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(900)]

NEW_TOKENS = 64
GEMMA_TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "Die Hauptstadt von Deutschland ist",
    "1, 1, 2, 3, 5, 8,",
    "Q: What is photosynthesis?\nA:",
    "The quick brown fox",
    "SELECT name FROM users WHERE",
    "Dear Sir or Madam,\n\nI am writing to",
    "En un lugar de la Mancha,",
    "The mitochondria is",
    "Ingredients:\n- 2 cups of flour\n",
    "Water boils at",
    "import numpy as np\n\n",
    "To be, or not to be,",
    "In 1969, the first humans",
    "東京は",
    "The three laws of motion are",
    "<html>\n<head>\n",
    "A haiku about autumn:\n",
)

AT_LENGTH = os.environ.get("HYPOTHESIS_PROFILE") == "soak"
TOGETHER = 4
"""Texts checked at a time: the logits of one take 70 MB, and there are two sides."""

SCHEDULES = {
    # settings, how many of the texts
    "alone": ({"max_running": 1}, 2),
    "batch of 16": ({"max_running": 16}, 20),
    "no prefix cache": ({"max_running": 16, "prefix_cache": False}, 16),
    "steps of 7 tokens": ({"max_running": 16, "max_step_tokens": 7}, 16),
    "steps of 1 token": ({"max_running": 16, "max_step_tokens": 1}, 1),
    "little memory": ({"max_running": 16, "kv_cache_tokens": 320}, 20),
}


@pytest.fixture(scope="module")
def reference_tokens(gemma_path) -> dict[str, list[int]]:
    """Text -> the 64 tokens that transformers chooses greedily after it.

    The reference reads our output in one pass: its choice at each place being the token that
    follows is the same as its generating that text itself.
    """
    model = open_model(gemma_path)
    runner = ModelRunner(model, dtype=torch.float32, device="cpu", num_blocks=200, block_tokens=16)
    tokenizer = model.tokenizer()
    driver = Driver(runner)
    reference = gemma_reference(gemma_path)
    tokens = {}
    for begin in range(0, len(GEMMA_TEXTS), TOGETHER):
        texts = GEMMA_TEXTS[begin : begin + TOGETHER]
        sequences = [driver.sequence(text, tokenizer.encode(text)) for text in texts]
        logits = driver.generate(sequences, new_tokens=NEW_TOKENS, chunk=512)
        for text, sequence in zip(texts, sequences, strict=True):
            expected = reference_logits(reference, sequence.token_ids[:-1])
            expected = expected[sequence.prompt_tokens - 1 :]
            torch.testing.assert_close(logits[text], expected, atol=1e-3, rtol=0)
            tokens[text] = expected.argmax(-1).tolist()
            assert sequence.token_ids[sequence.prompt_tokens :] == tokens[text]
    return tokens


def generate(engine: Engine, count: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    done = engine.generate(list(GEMMA_TEXTS[:count]), params, progress=False)
    return [completion.token_ids for completion in done]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_writes_the_reference(gemma_path, reference_tokens, schedule):
    settings, count = SCHEDULES[schedule]
    if AT_LENGTH:
        count = len(GEMMA_TEXTS)
    settings = {"kv_cache_tokens": 4096, "max_step_tokens": 512, "block_tokens": 4} | settings
    expected = list(reference_tokens.values())[:count]
    with Engine(gemma_path, dtype="float32", progress=False, **settings) as engine:
        assert generate(engine, count) == expected
        assert (engine.stats().preemptions_total > 0) == (schedule == "little memory")
        assert engine.stats().kv_blocks_used == 0


def test_a_cached_prefix_changes_nothing(gemma_path, reference_tokens):
    expected = list(reference_tokens.values())[:8]
    settings = {"kv_cache_tokens": 4096, "block_tokens": 4, "max_running": 16}
    with Engine(gemma_path, dtype="float32", progress=False, **settings) as engine:
        assert generate(engine, 8) == expected
        before = engine.stats().cached_prompt_tokens_total
        assert generate(engine, 8) == expected
        assert engine.stats().cached_prompt_tokens_total - before >= 8
