"""However the tokens of a sequence are cut, batched and cached, its logits are the reference's."""

from __future__ import annotations

import pytest
import torch
from driver import Driver
from reference import CONTEXT, SMALL_MODELS, VOCAB, reference_logits, small_reference, small_runner

from tokenpath.engine.runner import ModelRunner
from tokenpath.policy.scheduler import Scheduler, SchedulerConfig
from tokenpath.policy.sequence import Chunk, Sequence, StepPlan

TOLERANCE = 1e-4
PROMPT_LENGTHS = (1, 2, 15, 16, 17, 31, 33, 40, 64, 65, 70, 90, 100, 111, 128, 150)
NEW_TOKENS = 6


@pytest.fixture(params=sorted(SMALL_MODELS), scope="module")
def family(request):
    return request.param


@pytest.fixture(scope="module")
def runner(family, tmp_path_factory) -> ModelRunner:
    return small_runner(family, tmp_path_factory.mktemp(family))


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(VOCAB, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS
    ]


def assert_as_reference(family: str, sequence: Sequence, logits: torch.Tensor) -> None:
    """Logits within the tolerance, and every output token the reference's own greedy choice."""
    full = reference_logits(small_reference(family), sequence.token_ids[:-1])
    expected = full[sequence.prompt_tokens - 1 :]
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    assert sequence.token_ids[sequence.prompt_tokens :] == expected.argmax(-1).tolist()


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_alone(family, runner, chunk):
    driver = Driver(runner)
    sequence = driver.sequence("a", prompts()[-1])
    logits = driver.generate([sequence], new_tokens=NEW_TOKENS, chunk=chunk)
    assert_as_reference(family, sequence, logits["a"])


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_batch_of_16_with_prefill_and_decode_mixed(family, runner, chunk):
    driver = Driver(runner)
    sequences = [driver.sequence(str(i), prompt) for i, prompt in enumerate(prompts())]
    logits = driver.generate(sequences, new_tokens=NEW_TOKENS, chunk=chunk, stagger=1)
    for sequence in sequences:
        assert_as_reference(family, sequence, logits[sequence.request_id])


def test_prefix_blocks_shared_far_beyond_a_window(family, runner):
    driver = Driver(runner)
    first = driver.sequence("first", prompts()[-1])
    driver.generate([first], new_tokens=1, chunk=512)
    common = first.token_ids[:120]
    others = [
        driver.sequence("branch", [*common, 1, 2, 3], prefix=first),
        driver.sequence("cut", common[:97], prefix=first),
        driver.sequence("whole", first.token_ids[: first.prompt_tokens], prefix=first),
    ]
    assert [s.computed for s in others] == [112, 96, 144]
    logits = driver.generate(others, new_tokens=NEW_TOKENS, chunk=7)
    for sequence in others:
        assert_as_reference(family, sequence, logits[sequence.request_id])


def test_the_same_plan_twice_gives_the_same(runner):
    driver = Driver(runner)
    sequences = [driver.sequence(str(i), prompt) for i, prompt in enumerate(prompts()[:6])]
    driver.generate(sequences, new_tokens=2, chunk=512)
    for sequence in sequences:
        driver.blocks.cover(sequence, len(sequence.token_ids), runner.block_tokens)
    plan = StepPlan(tuple(Chunk(s, s.computed, s.uncomputed) for s in sequences))
    assert torch.equal(runner.run(plan), runner.run(plan))


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("num_blocks", [256, 14])
def test_under_the_scheduler(family, tmp_path, prefix_cache, num_blocks):
    """With few blocks sequences are preempted and computed again; nothing of it shows."""
    runner = small_runner(family, tmp_path, num_blocks=num_blocks, block_tokens=8)
    scheduler = Scheduler(
        SchedulerConfig(
            max_step_tokens=40,
            max_running=8,
            block_tokens=8,
            num_blocks=num_blocks,
            max_context_tokens=CONTEXT,
            prefix_cache=prefix_cache,
        )
    )
    prefix = prompts()[8][:33]
    new_tokens = 20
    texts = [prefix + prompt[: 3 + 5 * i] for i, prompt in enumerate(prompts()[4:10])]
    sequences = [scheduler.add(str(i), text, max_tokens=new_tokens) for i, text in enumerate(texts)]
    logits: dict[str, list[torch.Tensor]] = {s.request_id: [] for s in sequences}
    while scheduler.running or scheduler.waiting:
        plan = scheduler.plan()
        rows = runner.run(plan)
        sampling = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        assert len(rows) == len(sampling)
        for sequence, row in zip(sampling, rows, strict=True):
            logits[sequence.request_id].append(row)
        scheduler.commit(
            plan,
            {s.request_id: [int(row.argmax())] for s, row in zip(sampling, rows, strict=True)},
        )
        scheduler.check_integrity()
        for sequence in sampling:
            if sequence.output_tokens == new_tokens:
                scheduler.finish(sequence.request_id)
    assert (scheduler.preemptions_total > 0) == (num_blocks == 14)
    assert (scheduler.cached_prompt_tokens_total > 0) == prefix_cache
    for sequence in sequences:
        assert_as_reference(family, sequence, torch.stack(logits[sequence.request_id]))
