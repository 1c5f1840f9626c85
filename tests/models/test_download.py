"""One file over real HTTP: resumed, retried, verified, refused."""

import errno
import os

import httpx
import pytest
from loopback import FileServer, Recorder, sha256

from tokenpath.models import disk, download
from tokenpath.models.digest import Digest
from tokenpath.models.download import Retry
from tokenpath.protocol.errors import PullError

DATA = os.urandom(300_000)
NAME = "/thing.whl"
DIGEST = Digest("sha256", sha256(DATA))
STUBBORN = Retry()


@pytest.fixture
def server():
    with FileServer() as running:
        running.files[NAME] = DATA
        yield running


class Pull:
    """Downloads ``NAME`` from a server, remembering waits and progress."""

    def __init__(self, server, folder):
        self.server, self.target = server, folder / "thing.whl"
        self.part = folder / "thing.whl.part"
        self.progress, self.waits = Recorder(), []

    def __call__(self, *, digest=DIGEST, url=None, retry=STUBBORN, denied_hint=""):
        with httpx.Client(timeout=5) as client:
            download.download(
                url or self.server.url + NAME,
                self.target,
                digest=digest,
                client=client,
                progress=self.progress,
                retry=retry,
                denied_hint=denied_hint,
                sleep=self.waits.append,
            )
        return self.target.read_bytes()

    @property
    def ranges(self):
        return [asked for _, asked in self.server.gets]


@pytest.fixture
def pull(server, tmp_path):
    return Pull(server, tmp_path)


def test_fetches_and_verifies(pull, tmp_path):
    assert pull() == DATA
    assert pull.progress.done == len(DATA)
    assert [p.name for p in tmp_path.iterdir()] == ["thing.whl"]


def test_a_finished_file_is_not_fetched_again(pull, server):
    pull()
    server.gets.clear()
    assert pull() == DATA
    assert server.gets == []


def test_resumes_within_one_run_after_a_truncated_answer(pull, server):
    server.script[NAME] = ["cut:100000", "cut:50000"]
    assert pull() == DATA
    assert pull.ranges == [None, "bytes=100000-", "bytes=150000-"]
    assert pull.progress.done == len(DATA)
    assert len(pull.waits) == 2 and "trying again" in pull.progress.notes[0]


def test_resumes_what_an_earlier_run_left(pull):
    pull.part.write_bytes(DATA[:123_456])
    assert pull() == DATA
    assert pull.ranges == ["bytes=123456-"]
    assert pull.progress.done == len(DATA)


def test_a_part_that_was_complete_needs_no_byte_more(pull):
    pull.part.write_bytes(DATA)
    assert pull() == DATA  # the server answers 416 with the size that we have
    assert pull.progress.done == len(DATA)


@pytest.mark.parametrize("word", ["norange", "shifted", "416"])
def test_a_server_that_cannot_resume_is_asked_for_everything(pull, server, word):
    pull.part.write_bytes(DATA[:1000])
    server.script[NAME] = [word]
    assert pull() == DATA
    assert pull.progress.done == len(DATA)


def test_a_wrong_beginning_is_thrown_away_and_fetched_again(pull):
    pull.part.write_bytes(b"x" * 1000)
    assert pull() == DATA
    assert pull.ranges == ["bytes=1000-", None]
    assert pull.progress.done == len(DATA)
    assert "does not match its hash" in pull.progress.notes[0]


def test_a_part_longer_than_the_file_is_thrown_away(pull):
    pull.part.write_bytes(DATA + b"x")
    assert pull() == DATA


def test_wrong_bytes_are_not_kept(pull, tmp_path):
    with pytest.raises(PullError, match=f"has {DIGEST} instead of {'0' * 64}"):
        pull(digest=Digest("sha256", "0" * 64))
    assert list(tmp_path.iterdir()) == []
    assert pull.progress.done == 0


@pytest.mark.parametrize("status", [404, 410, 400])
def test_a_refusal_is_final(pull, server, status):
    server.script[NAME] = [str(status)] * 9
    with pytest.raises(PullError, match=f"answered {status}"):
        pull()
    assert len(server.gets) == 1


def test_credentials_are_explained(pull, server):
    server.script[NAME] = ["401"]
    with pytest.raises(PullError, match="answered 401 Unauthorized; knock first"):
        pull(denied_hint="knock first")


@pytest.mark.parametrize("status", [500, 502, 503, 429])
def test_a_passing_failure_is_tried_again(pull, server, status):
    server.script[NAME] = [str(status), str(status)]
    assert pull() == DATA
    assert pull.waits == [0.5, 1.0]


def test_gives_up_after_failures_in_a_row_and_keeps_what_it_has(pull, server):
    server.script[NAME] = ["cut:70000"] + ["500"] * 9
    with pytest.raises(PullError, match="in 3 attempts: the server answered 500"):
        pull(retry=Retry(attempts=3))
    assert pull.part.stat().st_size == 70_000
    assert not pull.target.exists()


def test_progress_between_failures_resets_their_count(pull, server):
    server.script[NAME] = ["cut:20000"] * 10
    assert pull(retry=Retry(attempts=2)) == DATA


def test_nobody_listening(pull, server):
    server.__exit__()
    with pytest.raises(PullError, match="could not be fetched in 2 attempts"):
        pull(retry=Retry(attempts=2))


def test_waits_double_up_to_a_bound_and_honour_the_server():
    retry = Retry(first_wait_s=1, longest_wait_s=10)
    assert [retry.wait_s(n, None) for n in (1, 2, 3, 4, 5)] == [1, 2, 4, 8, 10]
    assert retry.wait_s(1, 7.0) == 7
    assert retry.wait_s(1, 3600.0) == 10


def test_file_urls(pull, tmp_path):
    origin = tmp_path / "with space.whl"
    origin.write_bytes(DATA)
    pull.part.write_bytes(DATA[:999])
    assert pull(url=origin.as_uri()) == DATA


def test_a_missing_file_url(pull, tmp_path):
    with pytest.raises(PullError, match="cannot be read"):
        pull(url=(tmp_path / "none.whl").as_uri())


@pytest.mark.parametrize("url", ["ftp://x/y", "http://[", "nonsense"])
def test_other_addresses(pull, url):
    with pytest.raises(PullError):
        pull(url=url, retry=Retry(attempts=1))


def test_the_size_is_known_beforehand(server, tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"abc")
    with httpx.Client() as client:
        assert download.remote_bytes(server.url + NAME, client) == len(DATA)
        assert download.remote_bytes(server.url + "/none", client) is None
        assert download.remote_bytes(path.as_uri(), client) == 3


def test_a_disk_without_room_is_noticed_before_a_byte_is_written(pull, monkeypatch, tmp_path):
    class Usage:
        free = 1000

    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: Usage)
    with pytest.raises(disk.NoSpaceError) as caught:
        pull()
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (len(DATA), 1000)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_disk_that_fills_up_meanwhile(tmp_path, number):
    with pytest.raises(disk.NoSpaceError), disk.writing(tmp_path, 5):
        raise OSError(number, "full")


def test_other_errors_of_the_disk_pass(tmp_path):
    with pytest.raises(PermissionError), disk.writing(tmp_path, 5):
        raise PermissionError(errno.EACCES, "no")


def test_write_whole_replaces_in_one_step(tmp_path):
    disk.write_whole(tmp_path / "a", b"one")
    disk.write_whole(tmp_path / "a", b"two")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a", b"two")]


def test_gits_id_of_a_file_is_the_one_that_git_gives(tmp_path):
    (tmp_path / "f").write_bytes(b"hello\n")
    expected = Digest("git", "ce013625030ba8dba906f756967f9e9ca394464a")
    assert expected.of(tmp_path / "f") == expected
    (tmp_path / "f").write_bytes(b"hello!\n")
    assert expected.of(tmp_path / "f") != expected
