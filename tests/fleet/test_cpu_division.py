"""Servers on one machine, and engines of one server, each on CPUs of their own."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from tokenpath.fleet import cpu_claims, cpu_division
from tokenpath.fleet.cpu_claims import CpuClaims
from tokenpath.fleet.cpu_division import divided_cpus
from tokenpath.policy.cpu_shares import Cpu, Share

FOUR = tuple(Cpu(number, number, 0) for number in range(4))


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """Four CPUs, and claims that nobody else makes."""
    monkeypatch.setattr(cpu_division, "usable_cpus", lambda: FOUR)
    monkeypatch.setattr(cpu_division, "cpu_limit", lambda cpus: cpus)
    monkeypatch.setattr(cpu_division, "usual_claims", lambda: CpuClaims(tmp_path))


def warnings(caplog) -> list[str]:
    return [r.message for r in caplog.records if r.levelno >= logging.WARNING]


def test_engines_of_one_server_share_the_machine(caplog):
    with caplog.at_level(logging.INFO), divided_cpus({"a-0": None, "b-0": 1}) as division:
        assert division.shares == (Share(3, (1, 2, 3)), Share(1, (0,)))
    assert caplog.messages == [
        "a-0 computes on CPUs 1-3 (threads: 3)",
        "b-0 computes on CPUs 0 (threads: 1)",
    ]


def test_a_second_server_takes_what_the_first_has_left(caplog):
    with (
        divided_cpus({"a-0": 1}),
        divided_cpus({"b-0": 2}) as second,
        divided_cpus({"c-0": None}) as third,
    ):
        assert second.shares == (Share(2, (1, 2)),)
        assert third.shares == (Share(1, (3,)),)
    assert not warnings(caplog)


def test_claims_end_with_their_server():
    with divided_cpus({"a-0": None}):
        pass
    with divided_cpus({"b-0": None}) as division:
        assert division.shares == (Share(4, (0, 1, 2, 3)),)


def test_a_server_that_finds_too_little_left_says_so(caplog):
    with divided_cpus({"a-0": 3}), divided_cpus({"b-0": 1, "c-0": None}) as second:
        assert second.shares == (Share(1, (0,)), Share(3, (1, 2, 3)))
    (line,) = warnings(caplog)
    assert line == (
        "4 compute threads (b-0 1, c-0 3) share CPUs 0-3 with other tokenpath servers, which have "
        "claimed 0-2; they take each other's time: in all servers together, set engine.threads so "
        "that they add up to 4 or fewer, or serve fewer models on this machine"
    )


def test_more_threads_than_cpus_are_reported_once_with_the_numbers(caplog):
    with divided_cpus({"a-0": 4, "b-0": None}) as division:
        assert division.oversubscribed
    (line,) = warnings(caplog)
    assert line == (
        "5 compute threads (a-0 4, b-0 1) for 4 CPUs; they take each other's time: set "
        "engine.threads so that they add up to 4 or fewer, or serve fewer models on this machine"
    )


def test_under_a_quota_nothing_is_claimed(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_division, "cpu_limit", lambda _: 2)
    with divided_cpus({"a-0": None}) as division:
        assert division.shares == (Share(2, (0, 1, 2, 3)),)
        assert list(tmp_path.iterdir()) == []


def test_a_claim_ends_with_its_process_however_it_ends(tmp_path):
    code = (
        "import sys; from pathlib import Path; from tokenpath.fleet.cpu_claims import CpuClaims; "
        "claims = CpuClaims(Path(sys.argv[1])); claims.claim([2]); print('held', flush=True); "
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with CpuClaims(tmp_path) as claims:
            assert claims.of_others([1, 2, 3]) == {2}
            claims.claim([1, 2])
            assert CpuClaims(tmp_path).of_others([1, 2, 3]) == {1, 2}
            holder.kill()
            holder.wait()
            assert claims.of_others([2, 3]) == set()


def test_a_folder_of_somebody_elses_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_claims, "sees_whole_machine", lambda: True)
    monkeypatch.setattr(cpu_claims.tempfile, "gettempdir", lambda: str(tmp_path))
    assert cpu_claims.usual_claims() is not None
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    folder.symlink_to(tmp_path)
    assert cpu_claims.usual_claims() is None
    folder.unlink()
    folder.mkdir()
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    folder.rename(folder.with_name(f"tokenpath-cpus-{other}"))
    assert cpu_claims.usual_claims() is None


def test_in_a_container_there_are_no_claims(monkeypatch):
    monkeypatch.setattr(cpu_claims, "sees_whole_machine", lambda: False)
    assert cpu_claims.usual_claims() is None
