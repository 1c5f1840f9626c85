"""The tiers behind a pool: what is kept comes back as it was, or not at all."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tier_helpers import (
    BLOCK_BYTES,
    FILE_BYTES,
    FINGERPRINT,
    Pool,
    chain,
    contents,
    fetch,
    files,
    make_tiers,
    save,
    settle,
)

from tokenpath.engine.kv_tiers.folder import open_folder
from tokenpath.engine.kv_tiers.sealed import (
    HEADER_BYTES,
    DamagedBlockError,
    Seal,
    checksum,
    read_block,
    write_block,
)
from tokenpath.engine.kv_tiers.tiers import LONGEST_READ_S
from tokenpath.protocol.replica import ReplicaStats


@pytest.fixture
def pool() -> Pool:
    return Pool()


def report(tiers) -> ReplicaStats:
    return tiers.report(ReplicaStats())


# Host memory.


def test_an_evicted_prefix_comes_back_from_the_host(pool):
    tiers, names = make_tiers(pool), chain(5)
    save(tiers, pool, names)
    assert fetch(tiers, pool, names) == 5
    found = report(tiers)
    assert (found.kv_host_blocks, found.kv_host_bytes) == (5, 5 * BLOCK_BYTES)
    assert (found.kv_saved_blocks_total, found.kv_restored_blocks_total) == (5, 5)
    assert found.kv_restored_tokens_total == 10
    assert found.kv_disk_blocks == found.kv_corrupt_blocks_total == 0


def test_evicting_again_what_was_restored_copies_nothing(pool):
    tiers, names = make_tiers(pool), chain(3)
    save(tiers, pool, names)
    fetch(tiers, pool, names)
    save(tiers, pool, names)
    assert report(tiers).kv_saved_blocks_total == 3


def test_a_full_host_loses_a_prefixs_tail_first_and_the_oldest_prefix_before_others(pool):
    tiers = make_tiers(pool, host=6)
    old, new = chain(4), chain(4, first=50)
    save(tiers, pool, old)
    save(tiers, pool, new)
    assert fetch(tiers, pool, old) == 2
    assert fetch(tiers, pool, new) == 4
    assert report(tiers).kv_dropped_blocks_total == 2


def test_a_flipped_bit_in_host_memory_is_found_and_counted(pool, caplog):
    tiers, names = make_tiers(pool), chain(4)
    save(tiers, pool, names)
    tiers._arena.row(tiers._host[names[2].identity].slot)[777] ^= 4
    assert fetch(tiers, pool, names) == 2
    assert report(tiers).kv_corrupt_blocks_total == 1
    assert "a KV block in host memory is damaged" in caplog.text
    save(tiers, pool, names)
    assert fetch(tiers, pool, names) == 4


def test_a_name_with_the_same_identity_and_other_tokens_is_not_found(pool):
    """No such collision can be made; if one existed, the tokens would decide."""
    tiers, (name,) = make_tiers(pool), chain(1)
    save(tiers, pool, [name])
    for other in (
        type(name)(name.identity, name.parent, (9, 9), name.cache_key),
        type(name)(name.identity, name.parent, name.token_ids, ("salt", "")),
        type(name)(name.identity, bytes(32), name.token_ids, name.cache_key),
    ):
        assert tiers.find([other]) == []
        assert tiers.restore([other], [1]) == 0
    assert tiers.find([name]) == ["host"]


def test_another_tenants_block_is_not_found(pool, tmp_path):
    tiers = make_tiers(pool, tmp_path)
    save(tiers, pool, chain(3, salt="one"))
    settle(tiers)
    assert fetch(tiers, pool, chain(3, salt="two")) == 0
    assert fetch(tiers, pool, chain(3)) == 0
    assert fetch(tiers, pool, chain(3, salt="one")) == 3


# The disk.


def test_what_leaves_the_host_comes_back_from_the_disk(pool, tmp_path):
    tiers = make_tiers(pool, tmp_path, host=4, survive=False)
    prefixes = [chain(3, first=100 * n) for n in range(4)]
    for names in prefixes:
        save(tiers, pool, names)
        settle(tiers)
    assert len(files(tmp_path)) >= 8
    for names in prefixes:
        assert fetch(tiers, pool, names) == 3
    found = report(tiers)
    assert found.kv_disk_hits_total >= 8
    assert found.kv_corrupt_blocks_total == found.kv_dropped_blocks_total == 0


def test_a_transfer_is_done_when_its_blocks_have_come(pool, tmp_path):
    tiers = make_tiers(pool, tmp_path, host=3)
    for n in range(2):
        save(tiers, pool, chain(3, first=100 * n))
        settle(tiers)
    started = time.monotonic()
    transfer = tiers.bring(chain(3))
    while not transfer.done:
        tiers.wait(0.01)
    assert time.monotonic() - started < LONGEST_READ_S / 2, "it has waited for its patience to end"
    assert tiers.find(chain(3)) == ["host"] * 3


def test_the_disks_budget_holds(pool, tmp_path):
    tiers = make_tiers(pool, tmp_path, host=4, disk=5)
    for n in range(8):
        save(tiers, pool, chain(2, first=100 * n))
        settle(tiers)
    assert len(files(tmp_path)) == 5 == report(tiers).kv_disk_blocks
    assert sum(path.stat().st_size for path in files(tmp_path)) == 5 * FILE_BYTES
    assert report(tiers).kv_disk_bytes == 5 * FILE_BYTES
    assert fetch(tiers, pool, chain(2, first=700)) == 2
    assert fetch(tiers, pool, chain(2)) == 0


def test_blocks_survive_a_restart_if_asked(pool, tmp_path):
    names = chain(6)
    with contextlib.closing(make_tiers(pool, tmp_path)) as tiers:
        save(tiers, pool, names)
    again = make_tiers(pool, tmp_path)
    assert fetch(again, pool, names) == 6
    assert report(again).kv_disk_hits_total == 6


def test_what_the_pool_still_holds_is_written_at_the_end(pool, tmp_path):
    names = chain(3)
    tiers = make_tiers(pool, tmp_path)
    for block, name in enumerate(names):
        pool.fill(block + 10, name)
    tiers.close((name, block + 10) for block, name in enumerate(names))
    assert fetch(make_tiers(pool, tmp_path), pool, names) == 3


def test_otherwise_nothing_is_left_on_the_disk(pool, tmp_path):
    tiers = make_tiers(pool, tmp_path, host=2, survive=False)
    save(tiers, pool, chain(8))
    settle(tiers)
    assert files(tmp_path)
    tiers.close()
    assert not files(tmp_path)


def test_what_a_killed_engine_left_is_deleted_unless_it_may_survive(pool, tmp_path):
    tiers = make_tiers(pool, tmp_path)
    save(tiers, pool, chain(3))
    settle(tiers)
    tiers._folder.close(keep=True)
    make_tiers(pool, tmp_path, survive=False)
    assert not files(tmp_path)


def test_a_smaller_budget_deletes_the_oldest_at_the_start(pool, tmp_path):
    with contextlib.closing(make_tiers(pool, tmp_path)) as tiers:
        for n in range(4):
            save(tiers, pool, chain(2, first=100 * n))
            settle(tiers)
            time.sleep(0.02)  # files are told apart by their times
    again = make_tiers(pool, tmp_path, disk=3)
    assert len(files(tmp_path)) == 3
    assert fetch(again, pool, chain(2, first=300)) == 2


def test_files_are_for_their_owner_and_hold_no_tokens(pool, tmp_path):
    tiers = make_tiers(pool, tmp_path)
    names = chain(1, first=0x11223344, salt="a tenant's salt")
    save(tiers, pool, names)
    settle(tiers)
    (path,) = files(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for folder in list(path.relative_to(tmp_path).parents)[:-1]:
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o700
    data = path.read_bytes()
    assert (0x11223344).to_bytes(4, "little") not in data[:HEADER_BYTES]
    assert b"salt" not in data


def damage_a_byte(at):
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    return damage


def cut(size):
    return lambda path: os.truncate(path, size)


def exchange(path: Path) -> None:
    """Give the file the contents of the one after it."""
    others = [other for other in files(path.parents[3]) if other != path]
    path.write_bytes(others[0].read_bytes())


def of_another_salt(path: Path) -> None:
    (name,) = chain(1, salt="another")
    rewrite(path, Seal(FINGERPRINT, name.identity, name.parent, b""), name)


def of_another_parent(path: Path) -> None:
    (name,) = chain(1)
    rewrite(path, Seal(FINGERPRINT, name.identity, bytes(32), b""), name)


def of_another_model(path: Path) -> None:
    (name,) = chain(1)
    rewrite(path, Seal(bytes(32), name.identity, name.parent, b""), name)


def rewrite(path: Path, seal: Seal, name) -> None:
    """A sound file, only not of this block."""
    path.unlink()
    payload = contents(name)
    seal = Seal(seal.fingerprint, seal.identity, seal.parent, checksum(payload.data))
    write_block(path, seal, payload)


DAMAGES = {
    **{
        f"{region} flipped": damage_a_byte(at)
        for region, at in {
            "magic": 0,
            "version": 7,
            "fingerprint": 9,
            "identity": 41,
            "parent": 75,
            "size": 105,
            "checksum": 113,
            "header's checksum": 130,
            "first byte": HEADER_BYTES,
            "a byte": HEADER_BYTES + 500,
            "last byte": FILE_BYTES - 1,
        }.items()
    },
    "empty": cut(0),
    "cut in the header": cut(50),
    "cut after the header": cut(HEADER_BYTES),
    "cut by a byte": cut(FILE_BYTES - 1),
    "a byte longer": cut(FILE_BYTES + 1),
    "exchanged": exchange,
    "of another salt": of_another_salt,
    "of another parent": of_another_parent,
    "of another model": of_another_model,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
def test_a_damaged_file_is_never_used(pool, tmp_path, caplog, damage, restarted):
    names, other = chain(2), chain(6, first=500)
    tiers = make_tiers(pool, tmp_path, host=4)
    for prefix in (names, other):
        for part in (prefix[:3], prefix[3:]):
            save(tiers, pool, part)
            settle(tiers)
    (path,) = [path for path in files(tmp_path) if path.stem == names[0].identity.hex()]
    assert names[0].identity not in tiers._host
    if restarted:
        tiers.close()
    damage(path)
    if restarted:
        tiers = make_tiers(pool, tmp_path, host=4)
    assert fetch(tiers, pool, names) == 0
    resized = restarted and damage.__qualname__.startswith("cut")
    assert report(tiers).kv_corrupt_blocks_total == (0 if resized else 1)
    assert ("a KV block in a file is damaged" in caplog.text) != resized
    assert not path.exists()
    save(tiers, pool, names)
    settle(tiers)
    assert fetch(tiers, pool, names) == 2
    assert fetch(tiers, pool, other) == 4, "as many as the host has slots"


def test_every_single_flipped_byte_is_found(tmp_path):
    (name,) = chain(1)
    payload, path = contents(name), tmp_path / "block"
    write_block(
        path, Seal(FINGERPRINT, name.identity, name.parent, checksum(payload.data)), payload
    )
    data, into = path.read_bytes(), contents(name).copy()
    known = {"fingerprint": FINGERPRINT, "identity": name.identity, "parent": name.parent}
    assert read_block(path, into, **known) == checksum(payload.data)
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x80]) + data[at + 1 :])
        with pytest.raises(DamagedBlockError):
            read_block(path, into, **known)


def test_a_deleted_file_is_no_damage(pool, tmp_path):
    tiers = make_tiers(pool, tmp_path, host=2)
    for n in range(3):
        save(tiers, pool, chain(2, first=100 * n))
        settle(tiers)
    for path in files(tmp_path):
        path.unlink()
    assert fetch(tiers, pool, chain(2)) == 0
    assert report(tiers).kv_corrupt_blocks_total == 0
    assert report(tiers).kv_disk_blocks > 0, "the disk is not given up for that"


def test_a_link_is_not_followed(pool, tmp_path):
    tiers = make_tiers(pool, tmp_path / "kv", host=2)
    for n in range(2):
        save(tiers, pool, chain(2, first=100 * n))
        settle(tiers)
    (path,) = [p for p in files(tmp_path) if p.stem == chain(2)[0].identity.hex()]
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert fetch(tiers, pool, chain(2)) == 0
    assert elsewhere.exists()


# Two engines, other models.


def test_two_engines_of_one_model_have_folders_of_their_own(pool, tmp_path):
    first, second = make_tiers(pool, tmp_path), make_tiers(pool, tmp_path)
    save(first, pool, chain(3))
    settle(first)
    assert fetch(second, pool, chain(3)) == 0
    save(second, pool, chain(3, first=50))
    settle(second)
    second.close()
    first.close()
    third = make_tiers(pool, tmp_path)
    assert fetch(third, pool, chain(3)) == 3


def test_another_fingerprint_finds_nothing_and_clears_what_nobody_uses(pool, tmp_path):
    other = bytes(32)
    running = make_tiers(pool, tmp_path, fingerprint=other)
    save(running, pool, chain(2))
    settle(running)
    with contextlib.closing(make_tiers(pool, tmp_path)) as tiers:
        save(tiers, pool, chain(4))
    assert len(files(tmp_path)) == 6, "the running engine's are left alone"
    running.close()
    make_tiers(pool, tmp_path)
    assert len(files(tmp_path)) == 4


def test_models_with_similar_names_do_not_meet(tmp_path):
    names = ["a/b", "a b", "a-b", "..", "../..", "x" * 300, "模型"]
    folders = [open_folder(tmp_path, model=name, fingerprint=FINGERPRINT) for name in names]
    paths = {folder.path for folder in folders}
    assert len(paths) == len(names)
    assert all(path.resolve().is_relative_to(tmp_path.resolve()) for path in paths)
    for folder in folders:
        folder.close(keep=False)


# Disks that fail.


@contextlib.contextmanager
def files_limited_to(size: int):
    """The kernel refuses to let any file grow beyond it, as a quota does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_refuses_is_given_up_with_one_sentence(pool, tmp_path, caplog):
    tiers, names = make_tiers(pool, tmp_path, host=4), chain(4)
    with files_limited_to(500):
        save(tiers, pool, names)
        settle(tiers)
    assert not list(tmp_path.rglob("*.part"))
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "KV blocks are not kept on the disk" in warnings[0].getMessage()
    assert os.strerror(errno.EFBIG) in warnings[0].getMessage()
    assert fetch(tiers, pool, names) == 4, "the host goes on"
    save(tiers, pool, chain(8, first=70))
    assert report(tiers).kv_disk_blocks == 0
    tiers.close()


def test_a_full_disk_is_given_up(pool, tmp_path, caplog):
    mounted = tmp_path / "small"
    mounted.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mounted)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        tiers = make_tiers(pool, mounted, host=4, disk=1000)
        for n in range(40):
            save(tiers, pool, chain(2, first=100 * n))
            settle(tiers)
        assert os.strerror(errno.ENOSPC) in caplog.text
        assert fetch(tiers, pool, chain(2, first=3900)) == 2
        tiers.close()
    finally:
        subprocess.run(["umount", "-l", str(mounted)], check=True)


def test_a_disk_that_cannot_be_read_is_given_up(pool, tmp_path, caplog, monkeypatch):
    tiers = make_tiers(pool, tmp_path, host=2)
    for n in range(2):
        save(tiers, pool, chain(2, first=100 * n))
        settle(tiers)

    def broken(*_args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("tokenpath.engine.kv_tiers.sealed.os.readv", broken)
    assert fetch(tiers, pool, chain(2)) == 0
    assert os.strerror(errno.EIO) in caplog.text
    assert report(tiers).kv_disk_blocks == 0
    tiers.close()


def test_a_disk_that_hangs_keeps_nobody_waiting_for_ever(pool, tmp_path, monkeypatch):
    now = [100.0]
    tiers = make_tiers(pool, tmp_path, host=2, clock=lambda: now[0])
    for n in range(2):
        save(tiers, pool, chain(2, first=100 * n))
        settle(tiers)
    monkeypatch.setattr(tiers._io, "read", lambda job: None)  # a job that never ends
    transfer = tiers.bring(chain(2))
    assert not transfer.done
    now[0] += 6
    assert transfer.done


def test_a_slow_disk_drops_blocks_instead_of_waiting(pool, tmp_path, monkeypatch):
    tiers = make_tiers(pool, tmp_path, host=64, disk=1000)
    monkeypatch.setattr(tiers._io, "_store", lambda job: time.sleep(0.05))
    started = time.monotonic()
    for n in range(40):
        save(tiers, pool, chain(5, first=100 * n))
    assert time.monotonic() - started < 2
    assert report(tiers).kv_dropped_blocks_total > 50
    tiers.close()


def test_killed_while_writing_and_started_again(tmp_path, pool):
    script = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from tier_helpers import *\n"
        "pool = Pool(); tiers = make_tiers(pool, Path(sys.argv[1]), host=64, disk=100_000)\n"
        "print('ready', flush=True)\n"
        "for n in range(1_000_000):\n"
        "    save(tiers, pool, chain(3, first=10 * n))\n"
    )
    for attempt in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parent)],
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        before, deadline = len(files(tmp_path)), time.monotonic() + 30
        while len(files(tmp_path)) < before + 50:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert attempt or files(tmp_path)
    left = {path.stem for path in files(tmp_path)}
    tiers = make_tiers(pool, tmp_path, host=64, disk=100_000)
    assert not list(tmp_path.rglob("*.part"))
    whole = restored = 0
    for n in range(200):
        names = chain(3, first=10 * n)
        expected = 0
        while expected < 3 and names[expected].identity.hex() in left:
            expected += 1
        whole += expected
        restored += fetch(tiers, pool, names)
    assert restored == whole > 20
    assert report(tiers).kv_corrupt_blocks_total == 0
    tiers.close()


# Rates.


def test_costs_are_those_that_were_measured(pool, tmp_path):
    now = [0.0]

    class SlowPool(Pool):
        def write(self, block, source):
            now[0] += 0.25
            super().write(block, source)

    slow = SlowPool()
    tiers, names = make_tiers(slow, clock=lambda: now[0]), chain(4)
    assert tiers.costs().compute_s is None
    save(tiers, slow, names)
    assert fetch(tiers, slow, names) == 4
    assert tiers.costs().host_s == pytest.approx(0.25)
    tiers.computed(31, 100.0)
    assert tiers.costs().compute_s is None, "too short to say anything"
    tiers.computed(64, 3.2)
    assert tiers.costs().compute_s == pytest.approx(0.1)
    for _ in range(32):
        tiers.declined()
    assert tiers.costs().host_s == 0.0, "tried again"


# Anything, in any order.


class TiersMachine(RuleBasedStateMachine):
    """Whatever happens to memory and files, what comes back is what was saved under that name."""

    prefixes = [chain(4, salt=salt, first=first) for salt in ("", "s") for first in (0, 50, 90)]  # noqa: RUF012

    @initialize(host=st.integers(1, 10), disk=st.integers(0, 12), survive=st.booleans())
    def start(self, host, disk, survive):
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.pool = Pool()
        self.options = {"host": host, "disk": disk, "survive": survive}
        self.saved = set()
        self.open()

    def open(self):
        self.tiers = make_tiers(self.pool, Path(self.folder.name), **self.options)

    @rule(prefix=st.sampled_from(prefixes), last=st.integers(1, 4), wait=st.booleans())
    def save(self, prefix, last, wait):
        save(self.tiers, self.pool, prefix[:last])
        self.saved |= set(prefix[:last])
        if wait:
            settle(self.tiers)

    @rule(prefix=st.sampled_from(prefixes))
    def restore(self, prefix):
        count = fetch(self.tiers, self.pool, prefix)
        assert set(prefix[:count]) <= self.saved

    @rule(prefix=st.sampled_from(prefixes))
    def leave_while_reading(self, prefix):
        self.tiers.bring(prefix[: len(self.tiers.find(prefix))])

    # Drawn as numbers: what there is to be damaged depends on the disk's threads.

    @rule(which=st.integers(0, 99), at=st.integers(0, FILE_BYTES - 1), cut=st.booleans())
    def damage_file(self, which, at, cut):
        found = files(Path(self.folder.name))
        if found:
            path = found[which % len(found)]
            with contextlib.suppress(FileNotFoundError):  # it may be evicted meanwhile
                content = bytearray(path.read_bytes())
                content[at % len(content)] ^= 0x10
                path.write_bytes(content[:at] if cut else content)

    @rule(which=st.integers(0, 99), at=st.integers(0, BLOCK_BYTES - 1))
    def damage_memory(self, which, at):
        settle(self.tiers)
        held = list(self.tiers._host.values())
        if held:
            self.tiers._arena.row(held[which % len(held)].slot)[at] ^= 2

    @rule()
    @precondition(lambda self: hasattr(self, "tiers"))
    def restart(self):
        self.tiers.close()
        if not self.options["survive"]:
            assert not files(Path(self.folder.name))
        self.open()

    @invariant()
    def sound(self):
        if hasattr(self, "tiers"):
            self.tiers.check_integrity()
            found = report(self.tiers)
            assert found.kv_host_blocks <= self.options["host"]
            assert found.kv_disk_blocks <= self.options["disk"]

    def teardown(self):
        if hasattr(self, "tiers"):
            self.tiers.close()
            self.folder.cleanup()


TestTiers = TiersMachine.TestCase
TestTiers.settings = settings(max_examples=max(60, settings.default.max_examples // 2))
