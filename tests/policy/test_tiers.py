"""What comes back from the tiers, and when: decisions, and one readable case for each promise."""

from hypothesis import given
from hypothesis import strategies as st
from test_tiers_machine import FakeTiers

from tokenpath.policy.prefix import block_identity, identity_root
from tokenpath.policy.scheduler import Scheduler, SchedulerConfig
from tokenpath.policy.tiers import Costs, Rate, worth_restoring

BLOCK = 2
SECONDS = st.floats(0, 10)


@given(
    places=st.lists(st.sampled_from(["host", "disk"]), max_size=12),
    compute_s=SECONDS,
    host_s=SECONDS,
    disk_s=SECONDS,
    backlog_s=SECONDS,
)
def test_the_cut_saves_the_most_time(places, compute_s, host_s, disk_s, backlog_s):
    def takes(count):
        copied = places[:count]
        waits = backlog_s if "disk" in copied else 0.0
        return (
            waits
            + host_s * count
            + disk_s * copied.count("disk")
            + compute_s * (len(places) - count)
        )

    costs = Costs(compute_s, host_s=host_s, disk_s=disk_s, backlog_s=backlog_s)
    chosen = worth_restoring(places, costs)
    assert takes(chosen) <= min(takes(n) for n in range(len(places) + 1)) + 1e-9


def test_before_anything_is_measured_everything_is_tried():
    assert worth_restoring(["host", "disk"], Costs(None, host_s=9.0, disk_s=9.0)) == 2
    assert worth_restoring(["host", "disk"], Costs(1.0)) == 2


def test_a_rate_follows_what_was_seen_last_and_does_not_believe_itself_for_ever():
    rate = Rate(doubts=3)
    assert rate.per_second is None
    assert rate.seconds_for(5) is None
    rate.observe(10, 1.0)
    assert rate.per_second == 10
    for _ in range(40):
        rate.observe(100, 1.0)
    assert 99 < rate.per_second <= 100
    rate.observe(0, 1.0)
    rate.observe(1, 0.0)
    assert rate.seconds_for(100) > 0.9
    rate.doubt()
    rate.doubt()
    rate.observe(100, 1.0)
    rate.doubt()
    rate.doubt()
    assert rate.per_second is not None
    rate.doubt()
    assert rate.per_second is None


def test_identities_tell_salt_adapter_run_prefix_and_tokens_apart():
    keys = [("", ""), ("a", ""), ("", "a"), ("b", ""), ("a", "b"), ("ab", "")]
    roots = [identity_root(key) for key in keys]
    assert len(set(roots)) == len(roots)
    assert identity_root(("a", ""), b"run 1") == identity_root(("a", ""), b"run 2")
    assert identity_root(("a", "x"), b"run 1") != identity_root(("a", "x"), b"run 2")
    first = block_identity(roots[0], (1, 2))
    assert len(first) == 32
    assert len({first, *(block_identity(root, (1, 2)) for root in roots)}) == len(roots)
    assert len({first, block_identity(roots[0], (2, 1)), block_identity(first, (1, 2))}) == 3


class Bench:
    """A scheduler with tiers, and slots that say what was computed where."""

    def __init__(self, *, blocks=8, running=8, budget=64):
        self.slots = {}
        self.tiers = FakeTiers(self.slots)
        self.tiers.per_step = 100
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_step_tokens=budget,
                max_running=running,
                block_tokens=BLOCK,
                num_blocks=blocks,
                max_context_tokens=1000,
            ),
            tiers=self.tiers,
        )

    def step(self):
        plan = self.scheduler.plan()
        for chunk in plan.chunks:
            sequence = chunk.sequence
            for at in range(chunk.start, chunk.start + chunk.length):
                slot = sequence.blocks[at // BLOCK], at % BLOCK
                self.slots[slot] = sequence.cache_key, tuple(sequence.token_ids[: at + 1])
        self.scheduler.commit(plan, {c.sequence.request_id: [0] for c in plan.chunks if c.samples})
        self.scheduler.check_integrity()
        return {c.sequence.request_id: c.length for c in plan.chunks}

    def run(self, name, prompt, **options):
        sequence = self.scheduler.add(name, prompt, max_tokens=1, **options)
        computed = 0
        while not sequence.output_tokens:
            computed += self.step().get(name, 0)
        self.scheduler.finish(name)
        return computed


PROMPT = list(range(11))


def evicted(*, blocks=8, **options):
    """A bench on which ``PROMPT`` was computed and then pushed out of the pool."""
    bench = Bench(blocks=blocks, **options)
    bench.run("first", PROMPT)
    bench.run("other", range(100, 100 + BLOCK * blocks - 1))
    assert len(bench.tiers.host) >= 5
    return bench


def test_what_was_evicted_comes_back_and_counts_as_cached_once():
    bench = evicted()
    before = bench.scheduler.cached_prompt_tokens_total
    sequence = bench.scheduler.add("again", PROMPT, max_tokens=2)
    assert bench.step() == {"again": 1}
    assert sequence.cached_prompt_tokens == 10
    assert bench.scheduler.cached_prompt_tokens_total - before == 10


def test_another_salt_or_adapter_finds_nothing():
    bench = evicted()
    assert bench.run("salted", PROMPT, cache_key=("tenant", "")) == 11
    assert bench.run("adapted", PROMPT, cache_key=("", "adapter")) == 11
    assert bench.tiers.restored == 0


def test_restoring_is_spread_over_steps_and_others_decode_meanwhile():
    bench = evicted(blocks=16)
    bench.tiers.per_step = 2
    bench.scheduler.add("stream", [1, 2, 3], max_tokens=10)
    bench.step()
    bench.scheduler.add("again", PROMPT, max_tokens=1)
    steps = [bench.step() for _ in range(3)]
    assert steps == [{"stream": 1}, {"stream": 1}, {"stream": 1, "again": 1}]


def test_equal_prefixes_at_once_are_restored_once():
    bench = evicted(blocks=16)
    bench.tiers.per_step = 2
    before = bench.tiers.restored
    for name in "abc":
        bench.scheduler.add(name, PROMPT, max_tokens=5)
    while not all(bench.scheduler.get(name).output_tokens for name in "abc"):
        bench.step()
    assert bench.tiers.restored - before == 5
    assert [bench.scheduler.get(name).cached_prompt_tokens for name in "abc"] == [10, 10, 10]


def on_disk(**options):
    bench = evicted(**options)
    bench.tiers.disk.update(bench.tiers.host)
    bench.tiers.host.clear()
    return bench


def test_a_prefix_on_the_disk_is_waited_for_in_the_queue_while_others_pass():
    bench = on_disk()
    bench.scheduler.add("again", PROMPT, max_tokens=1)
    bench.scheduler.add("other", [7, 8, 9], max_tokens=9)
    assert bench.step() == {"other": 3}
    assert bench.scheduler.get("again").blocks == []
    assert len(bench.tiers.transfers) == 1
    bench.tiers.finish_reads()
    assert bench.step() == {"other": 1, "again": 1}


def test_withdrawn_while_the_disk_is_read_leaves_nothing():
    bench = on_disk()
    bench.scheduler.add("again", PROMPT, max_tokens=1)
    assert bench.step() == {}
    assert bench.scheduler.finish("again")
    bench.tiers.finish_reads()
    bench.scheduler.check_integrity()
    assert bench.scheduler.blocks_used == 0


def test_withdrawn_halfway_through_being_restored_leaves_nothing():
    bench = evicted(blocks=8)
    bench.tiers.per_step = 2
    bench.scheduler.add("again", PROMPT, max_tokens=1)
    assert bench.step() == {}
    assert bench.scheduler.finish("again")
    bench.scheduler.check_integrity()
    assert bench.scheduler.blocks_used == 0
    assert bench.run("later", PROMPT) == 1


def test_what_is_damaged_is_computed():
    bench = evicted()
    bench.tiers.refusing = True
    assert bench.run("again", PROMPT) == 11


def test_a_disk_that_reads_nothing_is_asked_once():
    bench = on_disk()
    sequence = bench.scheduler.add("again", PROMPT, max_tokens=1)
    assert bench.step() == {}
    bench.tiers.disk.clear()
    bench.tiers.finish_reads()
    assert bench.step() == {"again": 11}
    assert sequence.cached_prompt_tokens == 0


def test_what_is_not_worth_it_is_computed_and_told():
    bench = evicted()
    bench.tiers.costs_now = Costs(1.0, host_s=2.0)
    assert bench.run("again", PROMPT) == 11
    assert bench.tiers.declines
    assert bench.tiers.restored == 0


def test_a_preempted_sequence_comes_back_from_the_tiers_and_counts_once():
    bench = Bench(blocks=8, budget=16)
    low = bench.scheduler.add("low", range(4), max_tokens=8, priority=1)
    bench.step()
    bench.scheduler.add("high", range(50, 53), max_tokens=12)
    while bench.scheduler.get("high").output_tokens < 12:
        bench.step()
    bench.scheduler.finish("high")
    assert low.preemptions == 1
    tokens = len(low.token_ids)
    restored, cached = bench.tiers.restored, bench.scheduler.cached_prompt_tokens_total
    computed = bench.step()["low"]
    assert bench.tiers.restored > restored
    assert computed < tokens
    assert low.cached_prompt_tokens == 0
    assert bench.scheduler.cached_prompt_tokens_total == cached
