"""The keys as a running server sees them: in memory, never older than a moment.

A thread looks at the database a few times a second, so that no request waits for a disk and a key
made or revoked by another process counts within a second. When the thread cannot look, nobody
gets in: an unreadable list of keys is not an empty one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from tokenpath.protocol.errors import TokenpathError, UnavailableError
from tokenpath.store.database import Database, open_database, translated
from tokenpath.store.keys import KeySnapshot, KeyStore

POLL_S = 0.3
"""Between two looks; a look at an unchanged database takes some 50 microseconds."""
MAX_AGE_S = 5.0
"""A snapshot that was not confirmed for this long is not trusted: the disk hangs."""
TOUCH_S = 60.0
"""How late a key's use is written down, many uses at once."""

_BUSY_TIMEOUT_S = 0.5

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _View:
    """What the last look found: a snapshot, or why there is none."""

    checked_at: float
    snapshot: KeySnapshot | None
    failure: str = ""


class KeyWatcher:
    """Keeps a snapshot of the keys current. ``current`` and ``used`` may be called anywhere."""

    def __init__(
        self,
        path: Path,
        *,
        poll_s: float = POLL_S,
        max_age_s: float = MAX_AGE_S,
        touch_s: float = TOUCH_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._poll_s = poll_s
        self._max_age_s = max_age_s
        self._touch_s = touch_s
        self._clock = clock
        self._view = _View(clock(), None, "the keys have not been read yet")
        self._database: Database | None = None
        self._file: tuple[int, int] | None = None
        self._version: int | None = None
        self._ever_created = False
        self._used: dict[int, datetime] = {}
        self._touched_at = clock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> KeySnapshot:
        """Create the database if there is none, read the keys and keep watching.

        Raises ``UnavailableError`` if the database cannot be used.
        """
        open_database(self._path).close()
        self.look()
        snapshot = self.current()
        self._thread = threading.Thread(target=self._run, name="tokenpath-keys", daemon=True)
        self._thread.start()
        return snapshot

    def stop(self) -> None:
        """End the thread, note the last uses and close the database."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._touch()
        self._close()

    def current(self) -> KeySnapshot:
        """The keys as of the last look. Raises ``UnavailableError`` if that look failed or is old.

        Never blocks.
        """
        view = self._view
        if view.snapshot is None:
            raise UnavailableError(view.failure)
        age_s = self._clock() - view.checked_at
        if age_s > self._max_age_s:
            raise UnavailableError(f"the state database has not answered for {age_s:.0f} s")
        return view.snapshot

    def used(self, key_id: int) -> None:
        """Remember that a key was used; written later, a whole set at once."""
        self._used[key_id] = datetime.now(UTC)

    def look(self) -> None:
        """Look at the database once. Failures are kept for ``current``, not raised."""
        try:
            self._view = _View(self._clock(), self._read())
        except TokenpathError as error:
            if error.message != self._view.failure:
                _log.error("requests are refused until the keys can be read: %s", error.message)
            self._view = _View(self._clock(), None, error.message)
            self._close()

    def _run(self) -> None:
        while not self._stop.wait(self._poll_s):
            self.look()
            if self._clock() - self._touched_at >= self._touch_s:
                self._touch()

    def _read(self) -> KeySnapshot:
        with translated(self._path):
            # A file put in the place of ours, or removed, would otherwise never be noticed: our
            # connection goes on reading the old one.
            status = self._path.stat()
        file = (status.st_dev, status.st_ino)
        if self._database is None or file != self._file:
            self._close()
            self._database = open_database(self._path, busy_timeout_s=_BUSY_TIMEOUT_S)
            self._file = file
        version = self._database.data_version()
        previous = self._view.snapshot
        if previous is not None and version == self._version:
            return previous
        snapshot = KeyStore(self._database).snapshot()
        self._version = version
        # A server that once required a key stays closed, even if its database is replaced by an
        # empty one.
        if snapshot.ever_created and previous is not None and not previous.ever_created:
            _log.info("the first API key was created: from now on every request needs one")
        self._ever_created = self._ever_created or snapshot.ever_created
        return replace(snapshot, ever_created=self._ever_created)

    def _touch(self) -> None:
        self._touched_at = self._clock()
        used, self._used = self._used, {}
        if used and self._database is not None:
            # Only a note for people: a database that can be read but not written still serves.
            with suppress(UnavailableError):
                KeyStore(self._database).touch(used)

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()
        self._database = None
        self._version = None
