"""The state database: one SQLite file in WAL mode, opened safely and migrated on the way.

Every failure of SQLite is turned, here and once, into an ``UnavailableError`` whose sentence says
what is wrong with the file and what to do; callers never see SQLAlchemy's exceptions.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from tokenpath.protocol.errors import UnavailableError

SCHEMA_REVISION = "0002"
"""The newest migration. Known here so that opening a current database needs no Alembic."""
BUSY_TIMEOUT_S = 5.0
"""How long a statement waits for another process's write."""

_RETRY_S = 0.01
_BEGIN = "tokenpath_begin"
_REASONS = {
    "SQLITE_BUSY": "is locked by another process; try again, or find who holds it with fuser",
    "SQLITE_LOCKED": "is locked by another process; try again, or find who holds it with fuser",
    "SQLITE_CORRUPT": "is damaged; put a backup in its place, or move it away to start anew",
    "SQLITE_NOTADB": "is no SQLite database; put a backup in its place, or move it away",
    "SQLITE_FULL": "cannot grow because the disk is full; free some space",
    "SQLITE_READONLY": "is read-only; check the owner and mode of the file and its folder",
    "SQLITE_PERM": "may not be opened; check the owner and mode of the file and its folder",
    "SQLITE_CANTOPEN": "cannot be opened; check the owner and mode of the file and its folder",
    "SQLITE_IOERR": "cannot be read or written; check the disk",
}


class Database:
    """An open, migrated state database. Close it when done."""

    def __init__(self, path: Path, engine: sa.Engine) -> None:
        self.path = path
        self._engine = engine

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A transaction that sees one moment of the database. Raises ``UnavailableError``."""
        with translated(self.path), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A transaction that holds the write lock from its beginning.

        Taking the lock first means waiting for it with the busy timeout; a reader that turns into
        a writer would fail at once instead. Raises ``UnavailableError``.
        """
        with translated(self.path), self._engine.connect() as connection:
            connection.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})
            with connection.begin():
                yield connection

    def data_version(self) -> int:
        """A number that changes when another connection has committed.

        Only to be compared with what the same thread got before. Raises ``UnavailableError``.
        """
        with self.read() as connection:
            return int(connection.exec_driver_sql("PRAGMA data_version").scalar_one())

    def close(self) -> None:
        """Release the file. Other threads must have ended their transactions."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_database(path: Path, *, busy_timeout_s: float = BUSY_TIMEOUT_S) -> Database:
    """Open the database at ``path``, created with mode 0600 and migrated if need be.

    Raises ``UnavailableError`` if the file cannot be used, is damaged, or was written by a newer
    tokenpath.
    """
    with translated(path):
        _create_private(path)
        engine = _engine(path, busy_timeout_s)
        try:
            with engine.connect() as connection:
                current = _revision(connection)
            if current != SCHEMA_REVISION:
                _migrate(engine)
        except BaseException:
            engine.dispose()
            raise
    return Database(path, engine)


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn failures of the file and of SQLite into an ``UnavailableError`` that names ``path``."""
    try:
        yield
    except DBAPIError as error:
        raise UnavailableError(_sentence(path, error.orig)) from error
    except (sqlite3.Error, OSError) as error:
        raise UnavailableError(_sentence(path, error)) from error
    except SQLAlchemyError as error:
        raise UnavailableError(f"the state database {path} cannot be used: {error}") from error


def _sentence(path: Path, error: BaseException | None) -> str:
    if isinstance(error, OSError):
        return f"the state database {path} cannot be opened: {error.strerror or error}"
    # Extended names refine the plain ones: SQLITE_IOERR_READ, SQLITE_READONLY_DBMOVED.
    name = str(getattr(error, "sqlite_errorname", ""))
    for known, reason in _REASONS.items():
        if name.startswith(known):
            return f"the state database {path} {reason}"
    return f"the state database {path} cannot be used: {error}"


def _create_private(path: Path) -> None:
    """Make the file ours before SQLite opens it; its ``-wal`` and ``-shm`` take the same mode."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


def _engine(path: Path, busy_timeout_s: float) -> sa.Engine:
    url = sa.URL.create("sqlite", database=str(path))
    engine = sa.create_engine(url, connect_args={"timeout": busy_timeout_s})

    # Python's sqlite3 module begins transactions on its own, and not for every statement.
    # Switching that off and saying BEGIN ourselves gives DDL and reads real transactions too.
    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: object) -> None:
        connection.isolation_level = None
        cursor = connection.cursor()
        _write_ahead(cursor, busy_timeout_s)
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get(_BEGIN, "BEGIN"))

    return engine


def _write_ahead(cursor: sqlite3.Cursor, timeout_s: float) -> None:
    """Set the journal's mode. SQLite does not wait for that lock by itself when several set it."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorname != "SQLITE_BUSY" or time.monotonic() >= deadline:
                raise
            time.sleep(_RETRY_S)
        else:
            return


def _revision(connection: sa.Connection) -> str | None:
    """The schema's revision; None in a database without a schema."""
    query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name = 'alembic_version'"
    if connection.exec_driver_sql(query).first() is None:
        return None
    found = connection.exec_driver_sql("SELECT version_num FROM alembic_version").first()
    return None if found is None else str(found[0])


def _migrate(engine: sa.Engine) -> None:
    """Bring the schema up to ``SCHEMA_REVISION`` in one transaction, under the write lock."""
    from alembic import command  # noqa: PLC0415 - slow to import and needed once per upgrade
    from alembic.config import Config  # noqa: PLC0415
    from alembic.script import ScriptDirectory  # noqa: PLC0415

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    with engine.connect() as connection:
        connection.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})
        with connection.begin():
            current = _revision(connection)
            known = {
                script.revision for script in ScriptDirectory.from_config(config).walk_revisions()
            }
            if current is not None and current not in known:
                raise UnavailableError(
                    f"the state database was written by a newer tokenpath (schema {current}); "
                    "upgrade tokenpath, or set TOKENPATH_HOME to another folder"
                )
            config.attributes["connection"] = connection
            command.upgrade(config, SCHEMA_REVISION)
