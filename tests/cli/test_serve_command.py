"""What `serve` refuses before anything slow happens, and how it says so."""

import json
import signal
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime

import httpx
import pytest
from typer.testing import CliRunner

from tokenpath.cli.main import app
from tokenpath.cli.serve import with_flags
from tokenpath.config.paths import state_file
from tokenpath.config.reader import default_spec, parse_spec
from tokenpath.protocol.errors import SpecError
from tokenpath.store.database import open_database
from tokenpath.store.keys import KeyStore

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def create_key():
    with open_database(state_file()) as database:
        return KeyStore(database).create("k", now=NOW).secret


def test_flags_override_the_spec():
    spec = parse_spec(
        "gateway: {port: 1, limits: {choices: 2}}\nmodels: [{source: a, engine: {threads: 3}}]",
        name="s.yaml",
    )
    changed = with_flags(spec, model="b", host="h", port=0, auth="none", log_format="json")
    assert changed.gateway.host == "h"
    assert changed.gateway.port == 0
    assert changed.gateway.auth == "none"
    assert changed.gateway.limits.choices == 2
    assert changed.models[0].source == "b"
    assert changed.models[0].engine.threads == 3
    assert changed.logging.format == "json"
    assert with_flags(spec) == spec
    assert with_flags(default_spec(), port=9).gateway.port == 9


def test_model_flag_needs_a_spec_of_one_model():
    spec = parse_spec("models: [{source: a}, {source: b}]", name="s.yaml")
    with pytest.raises(SpecError, match="this spec has 2"):
        with_flags(spec, model="c")


def test_a_port_in_use(tokenpath):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = tokenpath("serve", "--port", str(port))
    assert result.returncode == 2
    assert result.stderr.startswith(f"port {port} on 127.0.0.1 is in use; ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_others_are_not_let_in_without_keys(tokenpath):
    result = tokenpath("serve", "--host", "0.0.0.0", "--port", "0")
    assert result.returncode == 2
    assert "no API key was ever created" in result.stderr
    assert "loopback addresses only, not on 0.0.0.0" in result.stderr
    assert "`tokenpath keys create NAME`" in result.stderr
    create_key()
    result = tokenpath("serve", "--host", "0.0.0.0", "--port", "0", "--auth", "none")
    assert result.returncode == 2
    assert result.stderr.startswith("with auth 'none' the server may listen on loopback")


def test_a_wrong_spec_names_every_line(tokenpath, tmp_path):
    spec = tmp_path / "s.yaml"
    spec.write_text("gateway:\n  prot: 1\nmodels:\n  - sauce: x\n")
    result = tokenpath("serve", str(spec))
    assert result.returncode == 2
    assert [line.split(": ")[0] for line in result.stderr.splitlines()] == [
        f"{spec}:2:3",
        f"{spec}:4:5",
        f"{spec}:4:5",
    ]


def test_a_damaged_key_database_is_not_an_open_door(tokenpath):
    state_file().write_bytes(b"garbage" * 1000)
    result = tokenpath("serve", "--port", "0", "--model", "/nowhere.gguf")
    assert result.returncode == 1
    assert "is no SQLite database" in result.stderr


def test_a_misspelt_model(tokenpath):
    result = tokenpath("serve", "--port", "0", "--model", "gema-3-270m")
    assert result.returncode == 3
    assert "did you mean gemma-3-270m" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("port", ["-1", "65536", "http"])
def test_a_port_that_is_none(port):
    result = CliRunner().invoke(app, ["serve", "--port", port])
    assert result.exit_code == 2
    assert "--port" in result.stderr


class Serving:
    """A real server in a process of its own, with a real engine."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tokenpath.cli.main", "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said = []

    def __enter__(self):
        for line in self.process.stdout:
            self.said.append(line.rstrip())
            if line.startswith("Ready at"):
                self.url = line.split()[2]
                self.curl = self.process.stdout.readline().strip()
                return self
        raise AssertionError(f"it never was ready: {self.said} {self.process.stderr.read()}")

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def status(self, key=None):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.get(f"{self.url}/v1/models", headers=headers).status_code

    def within_a_second(self, status, key=None):
        started = time.monotonic()
        while self.status(key) != status:
            assert time.monotonic() - started < 1, f"not {status} within a second"
            time.sleep(0.02)


def test_a_real_server_from_first_start_to_its_end(tiny_gguf):
    with Serving("--model", str(tiny_gguf)) as server:
        assert any("open to this machine only" in line for line in server.said)
        answer = subprocess.run(
            f"{server.curl} --silent", shell=True, capture_output=True, check=True
        )
        assert json.loads(answer.stdout)["object"] == "chat.completion"
        assert server.status() == 200
        rebinding = httpx.get(f"{server.url}/v1/models", headers={"Host": "evil.example"})
        assert rebinding.status_code == 403

        secret = create_key()
        server.within_a_second(401)
        assert server.status(secret) == 200
        with open_database(state_file()) as database:
            KeyStore(database).revoke("1", now=NOW)
        server.within_a_second(401, secret)
        assert server.status() == 401  # the last key is gone, and the door stays closed

        server.process.send_signal(signal.SIGTERM)
        out, err = server.process.communicate(timeout=30)
        assert server.process.returncode == 0
        assert out.endswith("Stopped.\n")
        assert secret not in err


def test_a_server_whose_log_another_program_reads(tiny_gguf):
    process = subprocess.Popen(
        [
            sys.executable, "-m", "tokenpath.cli.main", "serve", "--port", "0",
            "--model", str(tiny_gguf), "--log-format", "json", "--auth", "none",
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    lines = []
    for line in process.stderr:
        lines.append(json.loads(line))
        if lines[-1]["message"].startswith("Ready at"):
            break
    process.send_signal(signal.SIGINT)
    out, rest = process.communicate(timeout=30)
    assert process.returncode == 0
    assert out == ""
    lines += [json.loads(line) for line in rest.splitlines()]
    assert lines[-1]["message"] == "Stopped."
    assert {"time", "level", "logger", "message"} <= set(lines[0])


def test_an_error_is_a_line_of_a_json_log(tokenpath):
    result = tokenpath("serve", "--port", "0", "--log-format", "json", "--model", "gema-3-270m")
    assert result.returncode == 3
    (line,) = map(json.loads, result.stderr.splitlines())
    assert line["level"] == "error"
    assert "did you mean gemma-3-270m" in line["message"]
