"""The scheduler with tiers that lose, refuse and delay blocks as they like; nothing of it may show.

The tiers keep what the machine's "KV" says is in a block, so that a block that is saved too late,
restored into the wrong place or found for another prefix fails the check of every slot in
``SchedulerMachine.compute``.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from test_scheduler_machine import BLOCK, SchedulerMachine

from tokenpath.policy.tiers import Costs


class FakeTransfer:
    def __init__(self, names):
        self.names = names
        self.done = False


class FakeTiers:
    """Host and disk without bounds, in the machine's own terms."""

    def __init__(self, slots):
        self.slots = slots
        self.host = {}
        self.disk = {}
        self.transfers = []
        self.refusing = False
        self.costs_now = Costs(None)
        self.per_step = 1
        self.restored = 0
        self.declines = 0
        self.pinned = set()

    def save(self, name, block):
        contents = [self.slots[block, offset] for offset in range(BLOCK)]
        assert all(key == name.cache_key for key, _ in contents)
        assert contents[-1][1][-BLOCK:] == name.token_ids
        self.host[name] = contents

    def find(self, names):
        places = []
        for name in names:
            if name not in self.host and name not in self.disk:
                break
            places.append("host" if name in self.host else "disk")
        return places

    def bring(self, names):
        self.transfers.append(FakeTransfer(names))
        return self.transfers[-1]

    def pin(self, names):
        assert not self.pinned & set(names), "restored for two"
        self.pinned |= set(names)

    def unpin(self, names):
        self.pinned -= set(names)

    def restore(self, names, blocks):
        assert self.pinned >= set(names)
        assert len(names) == len(blocks) <= self.per_step
        for count, (name, block) in enumerate(zip(names, blocks, strict=True)):
            if self.refusing or name not in self.host:
                return count
            for offset, contents in enumerate(self.host[name]):
                self.slots[block, offset] = contents
            self.restored += 1
        return len(names)

    def costs(self):
        return self.costs_now

    def declined(self):
        self.declines += 1

    def step_blocks(self):
        return self.per_step

    def finish_reads(self):
        for transfer in self.transfers:
            for name in transfer.names:
                if name in self.disk:
                    self.host[name] = self.disk[name]
            transfer.done = True
        self.transfers.clear()


class TieredMachine(SchedulerMachine):
    def tiers(self):
        self.kept = FakeTiers(self.slots)
        return self.kept

    def waits(self):
        return True

    @rule(per_step=st.integers(1, 4), compute_s=st.sampled_from([None, 1.0, 3.0]))
    def circumstances(self, per_step, compute_s):
        self.kept.per_step = per_step
        self.kept.costs_now = Costs(compute_s, host_s=1.0, disk_s=1.5, backlog_s=1.0)

    @rule()
    def reads_are_done(self):
        self.kept.finish_reads()

    @rule(data=st.data())
    def to_disk(self, data):
        for name in list(self.kept.host):
            if data.draw(st.booleans()):
                self.kept.disk[name] = self.kept.host.pop(name)

    @rule(data=st.data())
    def lost(self, data):
        for tier in (self.kept.host, self.kept.disk):
            for name in list(tier):
                if data.draw(st.integers(0, 3)) == 0:
                    del tier[name]

    @rule(refusing=st.booleans())
    def damaged(self, refusing):
        self.kept.refusing = refusing

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            if not self.live:
                break
            self.kept.finish_reads()
            self.step(data=None, failing=False)
        super().teardown()
        assert not self.kept.pinned


TestTieredScheduler = TieredMachine.TestCase
TestTieredScheduler.settings = settings(max_examples=max(400, settings.default.max_examples))
