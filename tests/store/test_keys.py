import sqlite3
import stat
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tokenpath.protocol.errors import (
    InvalidRequestError,
    NotFoundError,
    TokenpathError,
    UnavailableError,
)
from tokenpath.store import database as database_module
from tokenpath.store.database import SCHEMA_REVISION, open_database
from tokenpath.store.keys import PREFIX_CHARACTERS, KeyStore, key_hash

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
LATER = datetime(2026, 2, 2, tzinfo=UTC)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state.db"


@pytest.fixture
def store(path):
    with open_database(path) as database:
        yield KeyStore(database)


def test_a_key_is_shown_once_and_stored_hashed(store, path):
    new = store.create("alice", now=NOW)
    assert new.secret.startswith("tp-")
    assert len(new.secret) == len("tp-") + 43  # 32 bytes in URL-safe base64
    assert new.record == store.records()[0]
    assert new.record.created_at == NOW
    assert new.record.prefix == new.secret[:PREFIX_CHARACTERS]
    stored = b"".join(file.read_bytes() for file in path.parent.iterdir())
    assert new.secret[PREFIX_CHARACTERS:].encode() not in stored
    assert key_hash(new.secret) in stored


def test_keys_differ(store):
    assert len({store.create("same name", now=NOW).secret for _ in range(20)}) == 20


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "\x1b[31m", "x" * 101])
def test_names_are_short_printable_text(store, name):
    with pytest.raises(InvalidRequestError, match="1 to 100 printable"):
        store.create(name, now=NOW)
    assert store.records() == []


@pytest.mark.parametrize("which", ["tp-\udcff\udcfe", "²", "tp-é" + "x" * 40])
def test_revoking_what_can_be_no_key(store, which):
    store.create("alice", now=NOW)
    with pytest.raises(NotFoundError, match="there is no key"):
        store.revoke(which, now=NOW)


def test_revoke_by_id_prefix_or_whole_key(store):
    for which in (
        lambda new: str(new.record.key_id),
        lambda new: new.record.prefix,
        lambda new: new.secret,
        lambda new: new.secret[:9],
    ):
        new = store.create("k", now=NOW)
        assert store.revoke(which(new), now=LATER).revoked_at == LATER
        assert new.record.prefix not in store.snapshot().valid


def test_revoking_again_changes_nothing(store):
    new = store.create("k", now=NOW)
    store.revoke("1", now=NOW)
    assert store.revoke("1", now=LATER).revoked_at == NOW
    assert new.record.prefix not in store.snapshot().valid


@pytest.mark.parametrize("which", ["2", "tp-nobody", "", "%", "tp-%", "9" * 400, "tp-" + "x" * 43])
def test_revoking_nobody(store, which):
    store.create("k", now=NOW)
    with pytest.raises(NotFoundError):
        store.revoke(which, now=NOW)
    assert len(store.snapshot().valid) == 1


def test_an_ambiguous_prefix_revokes_nobody(store):
    store.create("a", now=NOW)
    store.create("b", now=NOW)
    with pytest.raises(InvalidRequestError, match=r"ids 1, 2"):
        store.revoke("tp-", now=NOW)
    assert len(store.snapshot().valid) == 2


def test_that_a_key_was_ever_created_stays_true(store):
    assert not store.snapshot().ever_created
    store.create("k", now=NOW)
    store.revoke("1", now=NOW)
    snapshot = store.snapshot()
    assert snapshot.ever_created
    assert snapshot.valid == {}
    assert store.create("k2", now=NOW).record.key_id == 2  # ids are never used twice


def test_touch(store):
    store.create("a", now=NOW)
    store.create("b", now=NOW)
    store.touch({2: LATER})
    assert [record.last_used_at for record in store.records()] == [None, LATER]


def test_the_file_is_for_this_user_only(store, path):
    store.create("k", now=NOW)
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_the_constant_names_the_newest_migration():
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    from tokenpath.store import migrations

    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    assert ScriptDirectory.from_config(config).get_current_head() == SCHEMA_REVISION


def test_keys_of_an_older_schema_stay_and_may_not_operate_a_server(path):
    from tokenpath.store.migrations.versions import __path__ as versions

    assert sorted(p.name[:4] for p in Path(versions[0]).glob("0*.py"))[:2] == ["0001", "0002"]
    with open_database(path) as database:
        secret = KeyStore(database).create("old", now=NOW, admin=True).secret
    with sqlite3.connect(path) as connection:  # as 0001 made it
        connection.execute("ALTER TABLE api_keys DROP COLUMN admin")
        connection.execute("UPDATE alembic_version SET version_num = '0001'")
    with open_database(path) as database:
        [record] = KeyStore(database).records()
        assert not record.admin
        [[key]] = KeyStore(database).snapshot().valid.values()
        assert key.sha256 == key_hash(secret)
        assert KeyStore(database).create("new", now=NOW, admin=True).record.admin


def test_processes_that_migrate_at_once(path):
    failures = []

    def open_and_create():
        try:
            with open_database(path) as database:
                KeyStore(database).create("k", now=NOW)
        except TokenpathError as error:
            failures.append(error)

    threads = [threading.Thread(target=open_and_create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with open_database(path) as database:
        assert len(KeyStore(database).records()) == 8


def test_a_newer_schema_is_refused(store, path):
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(UnavailableError, match=r"written by a newer tokenpath \(schema 9999\)"):
        open_database(path)


def test_not_a_database(path):
    path.write_bytes(b"this is no database at all, whatever its name says" * 100)
    with pytest.raises(UnavailableError, match=r"state\.db is no SQLite database"):
        open_database(path)


def test_a_damaged_database(store, path):
    for _ in range(300):
        store.create("k", now=NOW)
    raw = bytearray(path.read_bytes())
    path.unlink()
    raw[4096:] = b"\xff" * (len(raw) - 4096)
    path.write_bytes(bytes(raw))
    with pytest.raises(UnavailableError, match="is damaged"):
        KeyStore(open_database(path)).snapshot()


def test_a_locked_database(store, path):
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with (
        open_database(path, busy_timeout_s=0.05) as database,
        pytest.raises(UnavailableError, match="is locked by another process"),
    ):
        KeyStore(database).create("k", now=NOW)
    assert store.snapshot().valid == {}  # readers go on
    holder.close()


def test_a_full_disk(store, path, monkeypatch):
    with open_database(path) as database, database.read() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
    with open_database(path) as database:
        with database.read() as connection:
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
        full = KeyStore(database)
        with pytest.raises(UnavailableError, match="the disk is full"):
            for _ in range(1000):
                full.create("x" * 100, now=NOW)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(UnavailableError, match="cannot be opened: No such file or directory"):
        open_database(tmp_path / "none" / "state.db")
    (tmp_path / "dir.db").mkdir()
    with pytest.raises(UnavailableError, match="cannot be opened"):
        open_database(tmp_path / "dir.db")


def test_an_unknown_failure_is_still_ours(path, monkeypatch):
    def fail(_connection):
        raise sqlite3.OperationalError("something new")

    monkeypatch.setattr(database_module, "_revision", fail)
    with pytest.raises(UnavailableError, match="cannot be used: something new"):
        open_database(path)
