"""A running server's view of the keys: current within a second, and closed when in doubt."""

import sqlite3
import time
from datetime import UTC, datetime

import pytest

from tokenpath.protocol.errors import UnavailableError
from tokenpath.store.database import open_database
from tokenpath.store.keys import KeyStore
from tokenpath.store.watcher import KeyWatcher

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state.db"


@pytest.fixture
def store(path):
    with open_database(path) as database:
        yield KeyStore(database)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def watcher(path, store, clock):
    """Looks only when told to."""
    watcher = KeyWatcher(path, poll_s=3600, clock=clock)
    watcher.start()
    yield watcher
    watcher.stop()


def checkpoint(path):
    """Move everything from the WAL into the file itself."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.close()


def test_before_its_first_look_it_is_closed(path):
    with pytest.raises(UnavailableError):
        KeyWatcher(path).current()


def test_sees_what_other_processes_change(watcher, store):
    assert not watcher.current().ever_created
    first = store.create("a", now=NOW)
    watcher.look()
    assert watcher.current().ever_created
    assert first.record.prefix in watcher.current().valid
    unchanged = watcher.current()
    watcher.look()
    assert watcher.current() is unchanged  # nothing was read again
    store.revoke("1", now=NOW)
    watcher.look()
    assert watcher.current().valid == {}
    assert watcher.current().ever_created


def test_within_a_second(path, store):
    watcher = KeyWatcher(path)
    watcher.start()
    try:
        for change in (lambda: store.create("a", now=NOW), lambda: store.revoke("1", now=NOW)):
            before = watcher.current()
            change()
            started = time.monotonic()
            while watcher.current() == before:
                assert time.monotonic() - started < 1
                time.sleep(0.01)
    finally:
        watcher.stop()


def test_an_unreadable_database_is_closed_and_heals(watcher, store, path, caplog):
    store.create("a", now=NOW)
    watcher.look()
    checkpoint(path)
    good = path.read_bytes()
    store._database.close()
    path.rename(path.with_suffix(".away"))
    for _ in range(3):
        watcher.look()
        with pytest.raises(UnavailableError, match="cannot be opened"):
            watcher.current()
    for name in ("state.db-wal", "state.db-shm"):
        path.with_name(name).unlink(missing_ok=True)
    assert len(caplog.records) == 1  # said once, not at every look
    assert not path.exists()  # a missing database is not replaced by an empty, open one
    path.write_bytes(b"garbage" * 1000)
    watcher.look()
    with pytest.raises(UnavailableError, match="is no SQLite database"):
        watcher.current()
    path.unlink()
    path.write_bytes(good)
    watcher.look()
    assert len(watcher.current().valid) == 1


def test_a_database_replaced_by_an_empty_one_stays_closed(watcher, store, path, tmp_path):
    store.create("a", now=NOW)
    watcher.look()
    store._database.close()
    open_database(tmp_path / "new.db").close()
    for name in ("state.db-wal", "state.db-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / "new.db").replace(path)
    watcher.look()
    assert watcher.current().ever_created
    assert watcher.current().valid == {}


def test_a_view_that_cannot_be_confirmed_expires(watcher, clock):
    clock.now += 4.9
    watcher.current()
    clock.now += 0.2
    with pytest.raises(UnavailableError, match="has not answered for 5 s"):
        watcher.current()
    watcher.look()
    watcher.current()


def test_uses_are_noted(path, store, clock):
    store.create("a", now=NOW)
    store.create("b", now=NOW)
    watcher = KeyWatcher(path, poll_s=0.01, touch_s=30, clock=clock)
    watcher.start()
    watcher.used(1)
    time.sleep(0.1)
    assert store.records()[0].last_used_at is None
    clock.now += 31
    deadline = time.monotonic() + 5
    while store.records()[0].last_used_at is None and time.monotonic() < deadline:
        time.sleep(0.01)
    watcher.used(2)
    watcher.stop()  # the rest is noted at the end
    assert all(record.last_used_at is not None for record in store.records())


def test_start_says_what_is_wrong(path):
    path.write_bytes(b"garbage" * 1000)
    with pytest.raises(UnavailableError, match="is no SQLite database"):
        KeyWatcher(path).start()
