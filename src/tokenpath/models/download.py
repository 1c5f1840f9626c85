"""One file from one URL to one path: resumed where it broke, verified before it has its name.

The bytes collect in ``TARGET.part``; ``TARGET`` appears only when their digest is right. Whether a
resumed file was pieced together from one and the same original is not guessed from ETags: the hash
at the end decides, and a resumed file that fails it is fetched once more from the start.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import httpx

from tokenpath.models import disk
from tokenpath.models.digest import Digest
from tokenpath.models.progress import Progress
from tokenpath.protocol.errors import PullError

CHUNK_BYTES = 1 << 20
_TRANSIENT_STATUS = {408, 425, 429, 500, 502, 503, 504}
_TOTAL_OF_RANGE = re.compile(r"bytes \*/(\d+)")
_START_OF_RANGE = re.compile(r"bytes (\d+)-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How stubborn a download is."""

    attempts: int = 5
    """Attempts in a row that brought not one new byte, after which it gives up."""
    first_wait_s: float = 0.5
    longest_wait_s: float = 20.0

    def wait_s(self, failures: int, asked_s: float | None) -> float:
        """Seconds to wait after the ``failures``-th failure in a row (from 1).

        Doubles each time; a server's Retry-After is honoured, both up to ``longest_wait_s``.
        """
        backoff = self.first_wait_s * 2.0 ** (failures - 1)
        return min(self.longest_wait_s, max(backoff, asked_s or 0.0))


class _TransientError(Exception):
    """Worth another attempt."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def download(
    url: str,
    target: Path,
    *,
    digest: Digest,
    client: httpx.Client,
    progress: Progress,
    denied_hint: str = "",
    retry: Retry = Retry(),
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Fetch ``url`` (http, https or file) into ``target``, unless it is there already.

    ``progress`` is advanced by every byte, those found from an earlier run included. Raises
    ``PullError`` when the server refuses (with ``denied_hint`` if it wants credentials), keeps
    failing, or serves other bytes than ``digest`` says, and ``NoSpaceError`` when the disk is
    full; what was fetched stays for the next run unless it is known to be wrong.
    """
    if target.exists():
        progress.advance(target.stat().st_size)
        return
    part = target.with_name(target.name + ".part")
    found_bytes = part.stat().st_size if part.exists() else 0
    progress.advance(found_bytes)
    fetch = _from_disk if _is_file(url) else _from_server
    for resumed in (True, False) if found_bytes else (False,):
        _until_complete(fetch, url, part, client, progress, denied_hint, retry, sleep)
        found = digest.of(part)
        if found == digest:
            part.replace(target)
            disk.sync_folder(target.parent)
            return
        progress.advance(-part.stat().st_size)
        part.unlink()
        if resumed:
            progress.note(
                f"{target.name} does not match its hash; fetching it again from the start"
            )
    raise PullError(f"{url} has {found} instead of {digest.value}; it was not kept")


def remote_bytes(url: str, client: httpx.Client) -> int | None:
    """Size of what ``url`` holds, for a progress bar; None where the server does not say."""
    if _is_file(url):
        path = _local_path(url)
        return path.stat().st_size if path.is_file() else None
    try:
        response = client.head(url, headers={"Accept-Encoding": "identity"})
    except httpx.HTTPError:
        return None
    size = response.headers.get("content-length")
    return int(size) if response.is_success and size else None


_Fetch = Callable[[str, Path, httpx.Client, Progress, str], None]


def _until_complete(
    fetch: _Fetch,
    url: str,
    part: Path,
    client: httpx.Client,
    progress: Progress,
    denied_hint: str,
    retry: Retry,
    sleep: Callable[[float], None],
) -> None:
    failures = 0
    while True:
        before = _size(part)
        try:
            fetch(url, part, client, progress, denied_hint)
        except _TransientError as error:
            failures = 1 if _size(part) > before else failures + 1
            if failures >= retry.attempts:
                raise PullError(
                    f"{url} could not be fetched in {failures} attempts: {error}"
                ) from error
            wait_s = retry.wait_s(failures, error.retry_after_s)
            progress.note(f"{part.stem}: {error}; trying again in {wait_s:.1f} s")
            sleep(wait_s)
        else:
            return


def _from_server(
    url: str, part: Path, client: httpx.Client, progress: Progress, denied_hint: str
) -> None:
    start = _size(part)
    # Encoded bodies cannot be resumed, and wheels are compressed already.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        with client.stream("GET", url, headers=headers) as response:
            if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE and start:
                total = _TOTAL_OF_RANGE.match(response.headers.get("content-range", ""))
                if total is not None and int(total[1]) == start:
                    return
                _drop(part, progress)
                raise _TransientError("the server cannot continue where the last run stopped")
            _check_status(url, response, denied_hint)
            if response.status_code != httpx.codes.PARTIAL_CONTENT:
                _drop(part, progress)
            elif _start_of(response) != start:
                _drop(part, progress)
                raise _TransientError("the server sent another range than the one asked for")
            expected = int(response.headers.get("content-length") or 0)
            disk.require_space(part.parent, expected)
            with disk.writing(part.parent, expected):
                # As the bytes come: a larger chunk would be lost with the connection.
                _append(part, response.iter_raw(), progress)
    except (httpx.UnsupportedProtocol, httpx.InvalidURL, httpx.TooManyRedirects) as error:
        raise PullError(f"{url} cannot be fetched: {error}") from error
    except httpx.TransportError as error:
        raise _TransientError(_sentence(error)) from error


def _from_disk(
    url: str, part: Path, _client: httpx.Client, progress: Progress, _denied_hint: str
) -> None:
    origin = _local_path(url)
    start = _size(part)
    try:
        total = origin.stat().st_size
        with origin.open("rb") as source:
            if start > total:
                _drop(part, progress)
                start = 0
            source.seek(start)
            disk.require_space(part.parent, total - start)
            with disk.writing(part.parent, total - start):
                _append(part, iter(lambda: source.read(CHUNK_BYTES), b""), progress)
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise PullError(f"{origin} cannot be read: {error.strerror}") from error


def _is_file(url: str) -> bool:
    return url.lower().startswith("file:")


def _local_path(url: str) -> Path:
    return Path(url2pathname(urlsplit(url).path))


def _append(part: Path, chunks: Iterator[bytes], progress: Progress) -> None:
    # Unbuffered: what has been counted is in the file even if the process is killed.
    with part.open("ab", buffering=0) as file:
        for chunk in chunks:
            view = memoryview(chunk)
            while view:
                written = file.write(view)
                progress.advance(written)
                view = view[written:]
        os.fsync(file.fileno())


def _check_status(url: str, response: httpx.Response, denied_hint: str) -> None:
    status = response.status_code
    if response.is_success:
        return
    said = f"{status} {response.reason_phrase}".strip()
    if status in _TRANSIENT_STATUS:
        raise _TransientError(f"the server answered {said}", _retry_after_s(response))
    if status in {401, 403}:
        raise PullError(f"{url} answered {said}{denied_hint and f'; {denied_hint}'}")
    raise PullError(f"{url} answered {said}")


def _retry_after_s(response: httpx.Response) -> float | None:
    value = response.headers.get("retry-after", "")
    return float(value) if value.isdecimal() else None


def _start_of(response: httpx.Response) -> int | None:
    found = _START_OF_RANGE.match(response.headers.get("content-range", ""))
    return int(found[1]) if found else None


def _drop(part: Path, progress: Progress) -> None:
    progress.advance(-_size(part))
    part.unlink(missing_ok=True)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _sentence(error: httpx.TransportError) -> str:
    return str(error) or type(error).__name__
