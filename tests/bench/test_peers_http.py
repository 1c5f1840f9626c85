"""`make bench-peers-http`: servers that start, hang, die or answer wrongly, and the thin front."""

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.peers import install
from bench.peers.child import LOAD, MEMORY
from bench.peers.drivers.openvino_server import _Sequence
from bench.peers.http import compare
from bench.peers.http.contenders import HOST, SERVERS, Command, Launch, Server
from bench.peers.http.drive import METRICS, LoadError, Workload, figures, run_load
from bench.peers.http.page import ALL_METRICS, document, markdown
from bench.peers.http.serving import ServerError, free_port, serving
from bench.peers.journal import Entry
from bench.peers.rivals import FORMS, OURS, RIVALS, Program, Rival
from bench.peers.table import Results
from tokenpath.protocol.errors import SpecError

REPOSITORY = Path(__file__).parents[2]

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:00:00.0000000,80,17
2023-11-16 18:00:01.0000000,41,9
2023-11-16 18:00:02.0000000,7,24
2023-11-16 18:00:03.0000000,800,80
"""

FRONT = """
import sys, time
from bench.peers.drivers.completions import Delta, serve

class Counting:
    '''Each sequence gets a token a step: its number, so that mixed-up answers show.'''

    def __init__(self):
        self.live = {}

    def add(self, number, prompt, output_tokens):
        if prompt[0] == 666:
            raise RuntimeError("out of cheese")
        self.live[number] = (prompt[0], output_tokens)

    def step(self):
        time.sleep(0.001)
        deltas = []
        for number, (first, left) in list(self.live.items()):
            self.live[number] = (first, left - 1)
            finished = left - 1 <= SHORT
            if finished:
                del self.live[number]
            deltas.append(Delta(number, f"{first} ", 1, finished))
        return deltas

SHORT = int(sys.argv[2])
if __name__ == "__main__":
    serve(Counting, "127.0.0.1", int(sys.argv[1]))
"""


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


@pytest.fixture
def workload(trace):
    return Workload.read(trace, requests=3, length_divisor=8, clients=2)


@pytest.fixture
def front(tmp_path):
    """A command of the thin front before an engine that counts; it may stop ``short`` tokens early."""
    script = tmp_path / "front.py"
    script.write_text(FRONT)

    def command(port, short=0):
        return Command(
            arguments=[sys.executable, str(script), str(port), str(short)],
            environment={"PYTHONPATH": str(REPOSITORY)},
        )

    return command


def test_the_workload_is_the_beginning_of_the_trace(workload, trace):
    assert workload.lengths == ((10, 3), (6, 2), (1, 3))
    assert (workload.prompt_tokens, workload.output_tokens) == (17, 8)
    longer = Workload.read(trace, requests=9, length_divisor=2, clients=2)
    assert longer.lengths[-1] == (400, 40)
    assert longer.sequence_tokens == 440
    assert longer.identity() != workload.identity()
    assert str(trace) not in json.dumps(workload.identity())
    with pytest.raises(SpecError, match="cannot read"):
        Workload.read(trace.with_name("none"), requests=1, length_divisor=1, clients=1)


def test_a_load_on_the_front_is_a_result(front, workload, tmp_path):
    port, log, report = free_port(), tmp_path / "log", tmp_path / "report.json"
    with serving(front(port), port, "/health", limit_s=30, log=log) as served:
        run_load(served.url, workload, report=report, log=log, limit_s=60)
        assert served.start_s > 0
        assert served.peak_bytes() > 1e6
        pid = served.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    found = figures(json.loads(report.read_text()), workload)
    assert set(found) == set(METRICS)
    assert found["tokens_per_event"] == 1.0
    assert found["output_tokens_per_s"] > 0
    assert found["ttft_p50_s"] <= found["ttft_p99_s"]


def test_a_load_with_other_lengths_is_no_result(front, workload, tmp_path):
    port, log, report = free_port(), tmp_path / "log", tmp_path / "report.json"
    with serving(front(port, short=1), port, "/health", limit_s=30, log=log) as served:
        run_load(served.url, workload, report=report, log=log, limit_s=60)
    with pytest.raises(LoadError, match=r"3 answers had another length .* 5 tokens in all inst"):
        figures(json.loads(report.read_text()), workload)


async def test_the_front_keeps_answers_apart_and_refuses_what_it_does_not_do(front, tmp_path):
    port = free_port()

    async def ask(first, count, **others):
        body = {"prompt": [first, 1], "max_tokens": count, "stream": True, "ignore_eos": True}
        return await post(port, json.dumps(body | {"temperature": 0} | others).encode())

    with serving(front(port), port, "/health", limit_s=30, log=tmp_path / "log"):
        answers = await asyncio.gather(*(ask(first, 5 + first) for first in range(8)))
        for first, (head, body) in enumerate(answers):
            assert "200 OK" in head
            *events, done = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
            *chunks, usage = map(json.loads, events)
            assert done == b"[DONE]"
            assert "".join(c["choices"][0]["text"] for c in chunks) == f"{first} " * (5 + first)
            assert [c["choices"][0]["finish_reason"] for c in chunks][-2:] == [None, "length"]
            assert usage["usage"] == {
                "prompt_tokens": 2,
                "completion_tokens": 5 + first,
                "total_tokens": 7 + first,
            }
        for others in ({"stream": False}, {"prompt": "text"}, {"max_tokens": 0}, {"prompt": []},
                       {"temperature": 0.5}, {"ignore_eos": False}):  # fmt: skip
            head, body = await ask(1, 1, **others)
            assert "400 Bad Request" in head
            assert next(iter(others)) in json.loads(body)["error"]["message"]


async def post(port, body):
    """Head and (still chunked) body of one exchange."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    if "content-length: " in head:
        found = await reader.readexactly(int(head.split("content-length: ")[1].split()[0]))
    else:
        found = await reader.readuntil(b"0\r\n\r\n")
    writer.close()
    return head.replace("ok", "OK").replace("bad request", "Bad Request"), found


async def test_the_front_ends_with_its_engine(front, tmp_path):
    port, log = free_port(), tmp_path / "log"
    body = {"prompt": [666], "max_tokens": 1, "stream": True, "ignore_eos": True, "temperature": 0}
    with (
        pytest.raises(ServerError, match="ended during the load with status 1"),
        serving(front(port), port, "/health", limit_s=30, log=log) as served,
    ):
        with pytest.raises(asyncio.IncompleteReadError):
            await post(port, json.dumps(body).encode())
        os.waitid(os.P_PID, served.pid, os.WEXITED | os.WNOWAIT)
    assert "out of cheese" in log.read_text()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "raise SystemExit('error: no such model')",
            "before it was ready with status 1: error: no",
        ),
        ("import os; os.kill(os.getpid(), 9)", "before it was ready with signal 9"),
        (
            "print('loading', flush=True); import time; time.sleep(600)",
            "not ready in time.*loading",
        ),
    ],
)
def test_a_server_that_does_not_start_tells_why(code, words, tmp_path):
    command = Command(arguments=[sys.executable, "-c", code])
    with (
        pytest.raises(ServerError, match=words),
        serving(command, free_port(), "/health", limit_s=2, log=tmp_path / "log"),
    ):
        pass


def report(**changes):
    """What a load reports of the three requests, with some of it changed."""
    tokens = {
        "prompt": 17,
        "output": 8,
        "cached_prompt": None,
        "requests_without_usage": 0,
        "unexpected_output_lengths": 0,
        "per_output_event": 1.0,
    }
    return {
        "requests": {"completed": changes.pop("completed", 3)},
        "errors": [{"example": "llama_decode failed"}],
        "tokens": tokens | changes,
        "rates": {"output_tokens_per_s": 9.0, "requests_per_s": 1.5},
        "ttft_s": {"p50": 0.1, "p99": 0.2},
        "inter_token_s": {"p50": 0.01, "p99": 0.02},
        "generator": {"cpu_share": 0.03},
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"completed": 2}, "2 of 3 requests were answered: llama_decode failed"),
        ({"requests_without_usage": 1}, "1 answers told no usage"),
        ({"output": 9}, "9 tokens in all instead of 8"),
        ({"prompt": 21}, "21 tokens instead of 17"),
        ({"prompt": 16}, "16 tokens instead of 17"),
        ({"cached_prompt": 10}, "10 prompt tokens came from a prefix cache"),
    ],
)
def test_what_is_no_result(changes, words, workload):
    assert figures(report(prompt=20), workload)["output_tokens_per_s"] == 9.0  # a first token each
    with pytest.raises(LoadError, match=words):
        figures(report(**changes), workload)


def test_a_sitting_from_the_command_to_the_page(front, trace, tmp_path, monkeypatch, capsys):
    def server(name, rival, short):
        return Server(
            name=name,
            rival=rival,
            ready="/health",
            command=lambda launch: front(launch.port, short),
        )

    servers = {
        "us": server("us", OURS, 0),
        "peer": server("peer", OURS, 0),
        "wrong": server("wrong", OURS, 1),
        "absent": dataclasses.replace(server("absent", OURS, 0), form="none-such"),
    }
    monkeypatch.setattr(compare, "SERVERS", servers)
    monkeypatch.setattr(compare, "resolve", lambda model, models_dir: tmp_path / model)

    def ensure_form(form, model, source):
        if form is not None:
            raise install.UnavailableError("it cannot be converted")
        return source

    monkeypatch.setattr(compare, "ensure_form", ensure_form)
    arguments = [
        *("--trace", str(trace), "--requests", "3", "--clients", "2", "--rounds", "2"),
        *("--contenders", ",".join(servers), "--journal", str(tmp_path / "j.jsonl")),
        *("--json", str(tmp_path / "page.json"), "--start-limit", "30"),
    ]
    assert compare.main(arguments) == 0
    page = capsys.readouterr().out
    found = json.loads((tmp_path / "page.json").read_text())
    assert len(found["servers"]["us"]["output_tokens_per_s"]["rounds"]) == 2
    assert len(found["servers"]["wrong"]["output_tokens_per_s"]["errors"]) == 2
    assert found["unavailable"] == {"absent": "it cannot be converted"}
    assert "- wrong: 3 answers had another length than asked for" in page
    assert "- absent: it cannot be converted" in page
    assert (tmp_path / "j.reports" / "us-2.json").is_file()

    monkeypatch.setattr(compare, "serving", None)  # all is in the journal: nothing is started
    assert compare.main(arguments) == 0
    assert compare.main([*arguments, "--clients", "3"]) == 1  # the journal is of another sitting


def test_the_page_has_medians_and_the_ratio():
    def entry(name, metric, value, number=1):
        return Entry(contender=name, round=number, work=metric, value=value, error=None, at="now")

    us = Server(name="us", rival=OURS, ready="/", command=None)
    peer = Server(name="peer", rival="vllm", ready="/", command=None)
    values = {LOAD: 2.0, MEMORY: 3e9, "requests_per_s": 2.5, "ttft_p50_s": 0.1, "ttft_p99_s": 1.5,
              "itl_p50_s": 0.05, "itl_p99_s": 0.3, "tokens_per_event": 1.2}  # fmt: skip
    entries = [entry("us", name, value) for name, value in values.items()]
    entries += [
        *(entry("us", "output_tokens_per_s", 30.0 + n, n) for n in (1, 2, 3)),
        entry("peer", "output_tokens_per_s", 20.0),
    ]
    results = Results(entries, [us, peer])
    lines = markdown(results, heading="Title", unavailable={}).splitlines()
    assert "| ratio |  | 1.60 |" in lines
    assert "| us | 32.0 | 2.500 | 100 / 1,500 | 50 / 300 | 1.20 | 2.0 | 3,000 | 3 |" in lines
    assert "| peer | 20.0 | - | - / - | - / - | - | - | - | 1 |" in lines
    assert lines[-1] == "Where an event carries several tokens, ITL is between groups of them."
    found = document(results, sitting={"clients": 16}, unavailable={})
    assert (found["best_peer"], found["best_ours"], found["ratio"]) == ("peer", "us", 1.6)
    assert set(found["servers"]["us"]) == set(ALL_METRICS)


def test_every_server_names_what_exists_and_is_told_where_to_listen(tmp_path):
    launch = Launch(
        python=tmp_path / "bin" / "python",
        model="the-model",
        port=4711,
        cpus=(0, 3),
        slots=16,
        sequence_tokens=300,
        scratch=tmp_path,
    )
    for name, server in SERVERS.items():
        assert server.name == name
        assert server.rival in {*RIVALS, OURS}
        assert server.form is None or server.form in FORMS
        command = server.command(launch)
        assert "4711" in command.arguments
        assert HOST in command.arguments
        told = [*command.arguments, (tmp_path / "spec.yaml").read_text() if server.ours else ""]
        assert any("the-model" in argument for argument in told)
    llama = SERVERS["llama-server-q4_0"].command(launch).arguments
    assert llama[llama.index("--ctx-size") + 1] == str(16 * 512)
    assert SERVERS["vllm-w8a8"].command(launch).environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,3"


def test_text_comes_as_a_streamer_would_give_it():
    sequence = _Sequence(handle=None, left=9)
    assert sequence.more("Grü", finished=False) == "Grü"
    assert sequence.more("Grüße \ufffd", finished=False) == ""  # half a character
    assert sequence.more("Grüße €\n", finished=False) == "ße €\n"
    assert sequence.more("new", finished=False) == "new"
    assert sequence.more("new \ufffd", finished=True) == " \ufffd"


def test_a_program_is_compiled_out_of_a_package(tmp_path, monkeypatch):
    """The steps of it, with a stand-in for pip and a real CMake where there is one."""
    cmake, ninja = (install.shutil.which(name) for name in ("cmake", "ninja"))
    if not (cmake and ninja):
        pytest.skip("needs cmake and ninja")
    source = tmp_path / "thing-1.0" / "vendor"
    source.mkdir(parents=True)
    (source / "main.c").write_text("#include <stdio.h>\nint main(void) { puts(NAME); }\n")
    (source / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\nproject(thing C)\n"
        "set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)\n"
        'add_executable(thing main.c)\ntarget_compile_definitions(thing PRIVATE NAME="${NAME}")\n'
    )
    subprocess.run(["tar", "czf", "thing-1.0.tar.gz", "thing-1.0"], cwd=tmp_path, check=True)
    tools = tmp_path / "environment" / "bin"
    tools.mkdir(parents=True)
    for name, path in (("cmake", cmake), ("ninja", ninja)):
        (tools / name).symlink_to(path)
    pip = tools / "pip"
    pip.write_text(
        f'#!/bin/sh\nfor a in "$@"; do case $a in --dest=*) cp {tmp_path}/thing-1.0.tar.gz '
        '"${a#--dest=}";; esac; done\n'
    )
    pip.chmod(0o755)
    program = Program(
        source="thing==1.0", folder="vendor", target="thing", options=("-DNAME=cheese",)
    )
    rival = Rival(name="thing", packages=(), needs="", program=program)
    install._compile(program, tools.parent, [str(pip)], str(tmp_path / "log"), rival)
    assert subprocess.check_output([tools / "thing"], text=True) == "cheese\n"
    assert sorted(path.name for path in tools.parent.iterdir()) == ["bin"]
