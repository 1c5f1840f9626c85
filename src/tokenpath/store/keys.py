"""API keys: made, listed, revoked and looked up; never stored in clear.

A key is ``tp-`` and 32 random bytes. Stored is its SHA-256, not a slow password hash: those
protect secrets that people choose, by making each guess dear, whereas nobody can guess 256 random
bits however cheap a guess is, and a slow hash would cost every request its milliseconds. Beside
it stands the key's beginning, by which people recognise a key and the gateway finds it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from tokenpath.protocol.errors import InvalidRequestError, NotFoundError
from tokenpath.store.database import Database

KEY_START = "tp-"
KEY_BYTES = 32
PREFIX_CHARACTERS = len(KEY_START) + 8
"""Of a key, how much is kept in clear: 48 of its 256 random bits."""
MAX_NAME_CHARACTERS = 100

_KEYS = sa.table(
    "api_keys",
    sa.column("key_id", sa.Integer),
    sa.column("name", sa.Text),
    sa.column("prefix", sa.Text),
    sa.column("sha256", sa.LargeBinary),
    sa.column("created_at", sa.Integer),
    sa.column("revoked_at", sa.Integer),
    sa.column("last_used_at", sa.Integer),
    sa.column("admin", sa.Boolean),
)


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """What is known of a key; not the key itself."""

    key_id: int
    name: str
    prefix: str
    created_at: datetime
    revoked_at: datetime | None
    last_used_at: datetime | None
    """None if never used; written some time after the use."""
    admin: bool = False
    """Whether it may operate the server, beside asking models."""


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key at the only moment at which it can be shown."""

    secret: str
    record: KeyRecord


@dataclass(frozen=True, slots=True)
class ValidKey:
    """A key that opens the door."""

    key_id: int
    name: str
    sha256: bytes
    admin: bool = False


@dataclass(frozen=True, slots=True)
class KeySnapshot:
    """All that authentication needs, at one moment."""

    ever_created: bool
    """Whether there is or was any key; once true, never false again."""
    valid: dict[str, tuple[ValidKey, ...]]
    """Keys that are not revoked, by prefix."""


def key_hash(secret: str) -> bytes:
    """The SHA-256 under which a key is stored: 32 bytes."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


class KeyStore:
    """The keys of one database. Any method may raise ``UnavailableError``."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, name: str, *, now: datetime, admin: bool = False) -> NewKey:
        """Make a key, with ``admin`` one that may operate the server.

        Raises ``InvalidRequestError`` if the name is no short printable text.
        """
        if not name.strip() or not name.isprintable() or len(name) > MAX_NAME_CHARACTERS:
            raise InvalidRequestError(
                f"a key's name must be 1 to {MAX_NAME_CHARACTERS} printable characters"
            )
        secret = KEY_START + secrets.token_urlsafe(KEY_BYTES)
        row = {
            "name": name,
            "prefix": secret[:PREFIX_CHARACTERS],
            "sha256": key_hash(secret),
            "created_at": int(now.timestamp()),
            "admin": admin,
        }
        with self._database.write() as connection:
            inserted = connection.execute(_KEYS.insert().values(row).returning(*_RECORD_COLUMNS))
            return NewKey(secret=secret, record=_record(inserted.one()))

    def records(self) -> list[KeyRecord]:
        """Every key ever created, revoked ones too, oldest first."""
        query = sa.select(*_RECORD_COLUMNS).order_by(_KEYS.c.key_id)
        with self._database.read() as connection:
            return [_record(row) for row in connection.execute(query)]

    def revoke(self, which: str, *, now: datetime) -> KeyRecord:
        """Close the door to one key, named by its id, its prefix or the whole key.

        Revoking it again changes nothing. Raises ``NotFoundError`` if there is no such key,
        ``InvalidRequestError`` if the prefix is that of several.
        """
        if which.isascii() and which.isdigit():
            # SQLite's integers have 64 bits; a longer number is nobody's id.
            matches = _KEYS.c.key_id == min(int(which[:20]), 2**63 - 1)
        elif not which.isascii():
            # Keys are ASCII, and bytes that are no UTF-8 (surrogates here) cannot be asked for.
            matches = sa.false()
        elif len(which) > PREFIX_CHARACTERS:
            matches = _KEYS.c.sha256 == key_hash(which)
        else:
            matches = _KEYS.c.prefix.startswith(which, autoescape=True)
        with self._database.write() as connection:
            rows = connection.execute(sa.select(*_RECORD_COLUMNS).where(matches)).all()
            if not rows or not which:
                shown = which[:PREFIX_CHARACTERS]
                raise NotFoundError(f"there is no key {shown!r}; `tokenpath keys list` shows all")
            if len(rows) > 1:
                ids = ", ".join(str(row.key_id) for row in rows)
                raise InvalidRequestError(
                    f"several keys begin with {which!r} (ids {ids}); name one by its id"
                )
            record = _record(rows[0])
            if record.revoked_at is None:
                update = (
                    _KEYS.update()
                    .where(_KEYS.c.key_id == record.key_id)
                    .values(revoked_at=int(now.timestamp()))
                    .returning(*_RECORD_COLUMNS)
                )
                record = _record(connection.execute(update).one())
            return record

    def touch(self, uses: Mapping[int, datetime]) -> None:
        """Note when keys, by their ids, were last used."""
        with self._database.write() as connection:
            for key_id, when in uses.items():
                connection.execute(
                    _KEYS.update()
                    .where(_KEYS.c.key_id == key_id)
                    .values(last_used_at=int(when.timestamp()))
                )

    def snapshot(self) -> KeySnapshot:
        """The keys as they are now."""
        keys = _KEYS.c
        query = sa.select(
            keys.key_id, keys.name, keys.prefix, keys.sha256, keys.revoked_at, keys.admin
        )
        valid: dict[str, tuple[ValidKey, ...]] = {}
        with self._database.read() as connection:
            rows = connection.execute(query).all()
        for row in rows:
            if row.revoked_at is None:
                key = ValidKey(row.key_id, row.name, bytes(row.sha256), bool(row.admin))
                valid[row.prefix] = (*valid.get(row.prefix, ()), key)
        return KeySnapshot(ever_created=bool(rows), valid=valid)


_RECORD_COLUMNS = (
    _KEYS.c.key_id,
    _KEYS.c.name,
    _KEYS.c.prefix,
    _KEYS.c.created_at,
    _KEYS.c.revoked_at,
    _KEYS.c.last_used_at,
    _KEYS.c.admin,
)


def _record(row: Sequence[Any]) -> KeyRecord:
    key_id, name, prefix, created_at, revoked_at, last_used_at, admin = row
    return KeyRecord(
        key_id=key_id,
        name=name,
        prefix=prefix,
        created_at=datetime.fromtimestamp(created_at, UTC),
        revoked_at=_moment(revoked_at),
        last_used_at=_moment(last_used_at),
        admin=bool(admin),
    )


def _moment(seconds: int | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
