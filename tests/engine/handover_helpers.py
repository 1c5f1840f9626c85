"""Two engines on fakes: one that prefills, in a thread of its own, and one that a test drives."""

from __future__ import annotations

import contextlib
import threading
import time

import msgspec
from engine_fakes import Collector, FakeCopier, make_core, request

from tokenpath.config.launch import UnixAddress
from tokenpath.engine.handover.arrivals import Arrivals
from tokenpath.engine.handover.giving import Giver
from tokenpath.engine.worker import Abort, Worker
from tokenpath.protocol.handover import PrefillPeer

BLOCK = 4
FINGERPRINT = bytes(range(32))
SECRET = "both know it"


class Slow:
    """A runner whose steps wait for permission, or take a moment."""

    def __init__(self, runner, step_s=0.0):
        self.runner = runner
        self.step_s = step_s
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def run(self, plan):
        self.entered.set()
        assert self.gate.wait(20)
        if self.step_s:
            time.sleep(self.step_s)
        return self.runner.run(plan)


class _Outlet:
    def __init__(self):
        self.broken = None
        self.ready = threading.Event()

    def progress(self, what, fraction): ...

    def loaded(self, card):
        self.ready.set()

    def load_failed(self, error):
        self.broken = error

    def stepped(self, result): ...

    def broke(self, error):
        self.broken = error


class Prefiller:
    """The prefilling side: a worker, its core and its giver."""

    def __init__(
        self,
        address,
        *,
        tls=None,
        fingerprint=FINGERPRINT,
        buffer_bytes=1 << 20,
        step_s=0.0,
        **core,
    ):
        self.address = address
        self.slow = None

        def wrap(runner):
            self.slow = Slow(runner, step_s)
            return self.slow

        def make_giver(copier):
            self.copier = copier
            return Giver(
                copier,
                fingerprint=fingerprint,
                block_tokens=BLOCK,
                model="fake",
                secret=SECRET,
                addresses=[address],
                tls=tls,
                buffer_bytes=buffer_bytes,
            )

        options = {"max_step_tokens": 8, "num_blocks": 64, "clock": time.monotonic} | core
        self.core = make_core(wrap=wrap, make_giver=make_giver, **options)
        self.outlet = _Outlet()
        self.worker = Worker(lambda progress: self.core, self.outlet)
        self.worker.start()
        assert self.outlet.ready.wait(10)
        self.core.giver.start(self)

    @property
    def peer(self) -> PrefillPeer:
        return PrefillPeer(str(self.address), SECRET)

    def submit(self, ordered) -> bool:
        return self.worker.submit(ordered)

    def abort(self, request_id) -> None:
        self.worker.inbox.put(Abort(request_id))

    def until_idle(self):
        until(lambda: not self.core.has_work() and not self.core.giver._ordered)
        assert self.outlet.broken is None

    def stop(self):
        self.slow.gate.set()
        self.worker.stop(10)
        self.core.giver.close()
        assert self.outlet.broken is None


@contextlib.contextmanager
def prefilling(folder, **options):
    options.setdefault("address", UnixAddress(folder / "give"))
    prefiller = Prefiller(**options)
    try:
        yield prefiller
    finally:
        prefiller.stop()


def decoder(*, inner=None, min_tokens=8, wait_s=20.0, buffer_bytes=1 << 20, step=100, tls=None,
            fingerprint=FINGERPRINT, **core):  # fmt: skip
    """A core that lets others compute its prompts."""

    def make_tiers(copier: FakeCopier) -> Arrivals:
        return Arrivals(
            copier,
            None if inner is None else inner(copier),
            fingerprint=fingerprint,
            block_tokens=BLOCK,
            min_prompt_tokens=min_tokens,
            wait_s=wait_s,
            buffer_bytes=buffer_bytes,
            step_bytes=step * copier.block_bytes,
            tls=tls,
        )

    return make_core(make_tiers=make_tiers, **({"clock": time.monotonic} | core))


def asking(peer, name, prompt, **params):
    """A request that may be prefilled elsewhere."""
    return msgspec.structs.replace(request(name, prompt, **params), prefill_at=peer)


def run(core, collector=None, timeout_s=20.0):
    """Step until nothing is left."""
    collector = collector or Collector()
    deadline = time.monotonic() + timeout_s
    while core.has_work():
        collector.take(core.step())
        core.check_integrity()
        assert time.monotonic() < deadline, "the engine is stuck"
    settled(core)
    return collector.results


def settled(core):
    """Nothing is held, nobody is waited for, no thread is left."""
    arrivals = core._tiers
    until(lambda: (arrivals.find([]), not arrivals._incoming)[1])
    assert not arrivals._places
    assert not arrivals._expected
    core.check_integrity()
    stats = core.stats()
    assert (stats.requests_running, stats.requests_waiting, stats.kv_blocks_used) == (0, 0, 0)


def until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)
