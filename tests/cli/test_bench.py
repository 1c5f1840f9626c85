"""``tokenpath bench load`` as a command: options in, exit codes, sentences and files out."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
import sse_server
from sse_server import Script

from tokenpath.cli import main
from tokenpath.cli.errors import run_command


def tokenpath(*arguments, env=None):
    return subprocess.run(
        [sys.executable, "-m", "tokenpath.cli.main", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **(env or {})},
    )


@pytest.fixture
def inside(capsys):
    """The command in this process: as ``tokenpath`` does it, but without waiting for a start."""

    def run(*arguments):
        code = run_command(lambda: main.app(list(arguments)))
        shown = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, shown.out, shown.err)

    return run


def test_report_on_stdout_or_json_and_nothing_else_there(tmp_path):
    script = Script(wanted_key="sesame-7")
    with sse_server.serving(sse_server.make_app(script)) as url:
        options = [
            "--url",
            url,
            "--requests",
            "4",
            "--output-tokens",
            "3",
            "--api-key-env",
            "BENCH_KEY",
        ]
        env = {"BENCH_KEY": "sesame-7"}
        plain = tokenpath("bench", "load", *options, "--json", str(tmp_path / "r.json"), env=env)
        assert plain.returncode == 0, plain.stderr
        assert "4 completed" in plain.stdout
        saved = json.loads((tmp_path / "r.json").read_bytes())
        piped = tokenpath("bench", "load", *options, "--json", "-", env=env)
        assert json.loads(piped.stdout)["requests"]["completed"] == 4
        assert "4 completed" in piped.stderr
    assert saved["tokens"]["output"] == 12
    assert saved["model"] == "tiny"
    assert saved["configuration"]["seed"] != json.loads(piped.stdout)["configuration"]["seed"]
    assert "sesame-7" not in (tmp_path / "r.json").read_text() + plain.stdout + plain.stderr


def test_all_requests_failing_is_a_failure(inside):
    with sse_server.serving(sse_server.make_app(Script(fail_status=500))) as url:
        ended = inside("bench", "load", "--url", url, "--requests", "3")
    assert ended.returncode == 1
    assert "3 x status 500 overloaded: come back later" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (
            ["--url", "http://127.0.0.1:9/v1"],
            1,
            "no server answers at http://127.0.0.1:9/v1: Connection refused",
        ),
        (["--url", "nonsense"], 2, "the URL 'nonsense' has no http:// or https://"),
        (
            ["--rate", "1", "--concurrency", "2"],
            2,
            "--rate and --concurrency contradict each other",
        ),
        (["--trace", "missing.csv"], 2, "cannot read the trace missing.csv: No such file"),
        (["--api-key-env", "NOT_SET_ANYWHERE"], 2, "the environment variable NOT_SET_ANYWHERE"),
        (
            ["--json", "/no/such/folder/x.json"],
            2,
            "cannot write the report to /no/such/folder/x.json",
        ),
        (["--output-tokens", "many"], 2, "--output-tokens must be like 128"),
    ],
)
def test_mistakes_are_one_sentence(inside, arguments, code, sentence):
    ended = inside("bench", "load", *arguments)
    assert ended.returncode == code
    assert sentence in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
    assert ended.stdout == ""


def test_a_malformed_trace_line_is_told_before_the_load(inside, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,5,1\nbroken\n")
    script = Script()
    with sse_server.serving(sse_server.make_app(script)) as url:
        ended = inside("bench", "load", "--url", url, "--trace", str(path))
    assert ended.returncode == 2
    assert f"{path}, line 3: 3 columns are expected" in ended.stderr
    assert not script.bodies


def test_a_wrong_model_is_told(inside):
    with sse_server.serving(sse_server.make_app(Script())) as url:
        ended = inside("bench", "load", "--url", url, "--model", "large")
    assert ended.returncode == 1
    assert "does not serve 'large'; it serves tiny" in ended.stderr


def test_ctrl_c_reports_what_there_is():
    script = Script(gap_s=0.05)
    with sse_server.serving(sse_server.make_app(script)) as url:
        process = subprocess.Popen(
            [sys.executable, "-m", "tokenpath.cli.main", "bench", "load", "--url", url,
             "--concurrency", "2", "--requests", "500", "--output-tokens", "5"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        ends = time.monotonic() + 30
        while len(script.bodies) < 5 and time.monotonic() < ends:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert "Stopped by hand with 2 requests in flight." in stdout
    assert "2 interrupted" in stdout
    assert script.live == 0
