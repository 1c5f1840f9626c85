"""The scheduler and its block pool under random use, against a model of what the KV blocks hold.

The machine plays the engine: it "computes" each planned chunk by writing, for every token, what
its KV depends on (cache key and all tokens up to it) into the block's slot, and checks that every
slot a chunk relies on holds exactly that. Block hashes are cut to one bit or none, so that collisions are
the rule. The sampled token is a function of the tokens so far, so the output of every sequence is
known in advance, whatever is preempted on the way.
"""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tokenpath.policy.prefix import block_hash
from tokenpath.policy.scheduler import Scheduler, SchedulerConfig
from tokenpath.policy.sequence import StepPlan
from tokenpath.protocol.errors import ContextLengthError

BLOCK = 2


def next_token(tokens):
    return (31 * sum(tokens) + len(tokens)) % 3


def expected_output(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Guesses:
    """Drafts tokens of which a random number are right."""

    def __init__(self, most, seed):
        self.most, self.random = most, random.Random(seed)

    def guess(self, sequences, rows, budget):
        drafts = {}
        for sequence in sequences:
            assert sequence.uncomputed == 1
            right = self.random.randint(0, self.most)
            tokens = expected_output(sequence.token_ids, right)
            drafts[sequence.request_id] = tokens + [3] * (self.most - right)
        return drafts


def confirmed(chunk):
    """What sampling makes of a chunk."""
    tokens = list(chunk.sequence.token_ids)
    drawn = []
    for token in (*chunk.drafted, None):
        drawn.append(next_token(tokens))
        tokens.append(drawn[-1])
        if drawn[-1] != token:
            return drawn
    return None


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(2, 12),
        budget=st.integers(1, 9),
        running=st.integers(1, 5),
        prefix_cache=st.booleans(),
        bits=st.sampled_from([0, 1, 64]),
        most=st.integers(0, 5),
        seed=st.integers(0, 99),
    )
    def start(self, blocks, budget, running, prefix_cache, bits, most, seed):
        self.slots = {}
        self.live = {}
        self.ids = 0
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_step_tokens=budget,
                max_running=running,
                block_tokens=BLOCK,
                num_blocks=blocks,
                max_context_tokens=1000,
                prefix_cache=prefix_cache,
            ),
            hasher=lambda parent, tokens: block_hash(parent, tokens) % (1 << bits),
            tiers=self.tiers(),
            drafts=Guesses(most, seed) if most else None,
        )

    def tiers(self):
        """What keeps evicted blocks; ``test_tiers_machine`` has some."""
        return

    def waits(self):
        """Whether a plan may have nothing to compute."""
        return False

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=14)
        | st.integers(1, 12).map(lambda length: [0] * length),
        max_tokens=st.integers(1, 8),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "other"]),
    )
    def add(self, prompt, max_tokens, priority, salt):
        name = f"r{self.ids}"
        self.ids += 1
        fits = len(prompt) + max_tokens <= self.scheduler.capacity_tokens
        if not fits:
            with pytest.raises(ContextLengthError):
                self.scheduler.add(name, prompt, max_tokens=max_tokens)
            return
        self.scheduler.add(
            name, prompt, max_tokens=max_tokens, priority=priority, cache_key=(salt, "")
        )
        self.live[name] = prompt, max_tokens

    @rule(data=st.data(), failing=st.booleans())
    @precondition(lambda self: self.live)
    def step(self, data, failing):
        plan = self.scheduler.plan()
        assert plan.chunks or self.waits(), "live sequences, but nothing planned"
        assert plan.tokens <= self.scheduler.config.max_step_tokens
        for chunk in plan.chunks:
            self.compute(chunk)
        if failing:
            kept = tuple(c for c in plan.chunks if data.draw(st.booleans()))
            plan = StepPlan(kept, plan.preempted, plan.admitted)
        sampled = {c.sequence.request_id: confirmed(c) for c in plan.chunks if c.samples}
        self.scheduler.commit(plan, sampled)
        for name in sampled:
            sequence = self.scheduler.get(name)
            prompt, max_tokens = self.live[name]
            assert sequence.token_ids[len(prompt) :] == expected_output(
                prompt, sequence.output_tokens
            )
            if sequence.output_tokens == max_tokens:
                assert self.scheduler.finish(name)
                del self.live[name]

    def compute(self, chunk):
        sequence = chunk.sequence
        assert chunk.start == sequence.computed
        assert chunk.length >= 1
        assert chunk.samples or not chunk.drafted
        assert sequence.output_tokens + chunk.sampled_rows <= sequence.max_tokens
        tokens = sequence.token_ids[: chunk.start] + chunk.token_ids
        for position in range(chunk.start + chunk.length):
            slot = sequence.blocks[position // BLOCK], position % BLOCK
            depends_on = sequence.cache_key, tuple(tokens[: position + 1])
            if position < chunk.start:
                assert self.slots[slot] == depends_on, "reused KV of another prefix"
            else:
                self.slots[slot] = depends_on

    @rule(data=st.data())
    @precondition(lambda self: self.live)
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.live)))
        assert self.scheduler.finish(name)
        assert not self.scheduler.finish(name)
        del self.live[name]

    @rule()
    def forget_prefixes(self):
        self.scheduler.pool.clear_cache()

    @invariant()
    def sound(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            assert self.scheduler.running + self.scheduler.waiting == len(self.live)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            if not self.live:
                break
            self.step(data=None, failing=False)
        assert not self.live, "the queue did not drain"
        self.scheduler.check_integrity()
        assert self.scheduler.blocks_used == 0
        assert self.scheduler.waiting_tokens == 0


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=max(400, settings.default.max_examples))
