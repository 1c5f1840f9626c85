"""Engine processes kept alive: real processes, mostly around the scripted core."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from link_helpers import certificate, free_port, request, until
from scripted_engine import BREAKS_ALL, HANGS, WIDE

from tokenpath.config.launch import (
    LINK_TOKEN_VARIABLE,
    ClientTls,
    EngineLaunch,
    ServerTls,
    TcpAddress,
)
from tokenpath.config.spec import EngineSettings
from tokenpath.fleet import process as process_module
from tokenpath.fleet.local import LocalFleet, LocalReplica, ReplicaPlan
from tokenpath.fleet.replica import LinkedReplica
from tokenpath.models.local import open_model
from tokenpath.policy.backoff import BackoffConfig
from tokenpath.protocol.errors import (
    DrainingError,
    EngineError,
    ModelFileError,
    NotReadyError,
    ReplicaLostError,
    SpecError,
    UnavailableError,
)
from tokenpath.protocol.events import Failed, FinishReason
from tokenpath.protocol.framing import encode
from tokenpath.protocol.link import PROTOCOL_VERSION, Hello, Submit
from tokenpath.protocol.replica import ReplicaState, ReplicaStats
from tokenpath.protocol.request import GenerationRequest, SamplingParams, TokenPrompt

SCRIPTED = (sys.executable, str(Path(__file__).with_name("scripted_engine.py")))
ONE_THREAD = EngineSettings(threads=1)
QUICK = BackoffConfig(initial_s=0.05, max_s=0.1, failed_starts=3)


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path_factory, monkeypatch) -> Path:
    """Where the private folders go; must be empty after every test."""
    folder = Path(tempfile.mkdtemp(prefix="tp-"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder
    folder.rmdir()


@pytest.fixture
async def start():
    fleets = []

    async def start_one(
        model: str, *, command=SCRIPTED, engine=ONE_THREAD, **options
    ) -> LocalReplica:
        plan = ReplicaPlan(replica_id="m-0", name="m", model=Path(model), engine=engine)
        fleet = LocalFleet([plan], backoff=QUICK, command=command, **options)
        fleets.append(fleet)
        await fleet.start()
        return fleet.replicas[0]

    yield start_one
    for fleet in fleets:
        await fleet.stop(0.0)
        assert fleet.replicas[0].pid is None


async def ready(replica: LocalReplica) -> LocalReplica:
    async with asyncio.timeout(20):
        await replica.wait_ready()
    return replica


async def collect(replica: LocalReplica, wanted) -> list:
    return [event async for event in replica.generate(wanted)]


async def test_a_replica_from_start_to_stop(start, runtime_folder):
    seen = []
    replica = await start("loads-slowly", on_progress=lambda *step: seen.append(step))
    assert replica.state in {ReplicaState.PENDING, ReplicaState.LOADING}
    with pytest.raises(NotReadyError):
        await collect(replica, request("early"))
    await ready(replica)
    assert seen[-1] == ("m-0", "weights", 0.9)
    assert replica.card.name == "scripted"
    [folder] = runtime_folder.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "link").stat().st_mode & 0o077 == 0
    process = psutil.Process(replica.pid)
    assert os.getpgid(process.pid) == process.pid
    assert len(await collect(replica, request("a"))) == 5
    assert (await replica.stats()).generated_tokens_total == 5
    await replica.stop(1.0)
    assert replica.state is ReplicaState.STOPPED
    assert not process.is_running()
    assert list(runtime_folder.iterdir()) == []
    with pytest.raises(ReplicaLostError):
        await collect(replica, request("late"))
    await replica.stop(1.0)  # again is harmless


async def test_the_secret_is_in_no_command_line(start):
    replica = await ready(await start("good"))
    token = replica._process.token
    assert len(token) == 64
    assert not any(token in argument for argument in psutil.Process(replica.pid).cmdline())


async def test_a_killed_process_loses_its_streams_and_is_started_again(start):
    replica = await ready(await start("slow-steps"))
    streams = [
        asyncio.create_task(collect(replica, request(f"r{i}", max_tokens=10_000))) for i in range(5)
    ]
    await until(lambda: replica._link._streams and replica.last_stats.steps_total > 0)
    first = replica.pid
    os.kill(first, signal.SIGKILL)
    for stream in streams:
        with pytest.raises(ReplicaLostError):
            await stream
    await until(lambda: replica.state is ReplicaState.PENDING)
    await ready(replica)
    assert replica.pid != first
    assert replica.restarts == 1
    assert len(await collect(replica, request("again"))) == 5


async def test_a_core_that_breaks_is_replaced(start):
    replica = await ready(await start("good"))
    [event] = await collect(replica, request("bad", kind=BREAKS_ALL))
    assert isinstance(event, Failed)
    assert event.error.code == "engine_error"
    await until(lambda: replica.restarts == 1)
    await ready(replica)
    assert len(await collect(replica, request("good"))) == 5


async def test_a_stuck_step_ends_the_process_and_another_takes_over(start):
    replica = await ready(await start("good", engine=EngineSettings(step_timeout_s=0.3)))
    events = await collect(replica, request("hangs", kind=HANGS))
    assert events[-1].error.code == "replica_lost"
    assert "took more than 0.3 s" in events[-1].error.message
    await until(lambda: replica.restarts == 1)
    assert any("in step" in line for line in replica._last_words), "where it hung"
    assert "stuck" in replica.reason
    await ready(replica)
    assert len(await collect(replica, request("again"))) == 5


async def test_a_process_that_was_stopped_for_long_is_not_taken_for_stuck(start):
    replica = await ready(await start("slow-steps", engine=EngineSettings(step_timeout_s=0.5)))
    running = asyncio.create_task(collect(replica, request("a", max_tokens=20)))
    await until(lambda: replica.last_stats.steps_total > 0)
    process = psutil.Process(replica.pid)
    process.suspend()
    await asyncio.sleep(1.2)
    process.resume()
    assert len(await running) == 20
    assert replica.restarts == 0


async def test_a_bad_model_file_is_final_and_said_in_its_own_words(start):
    replica = await start("bad-file")
    with pytest.raises(ModelFileError, match="bad-file is truncated"):
        await ready(replica)
    assert replica.state is ReplicaState.FAILED
    assert replica.reason == "bad-file is truncated"
    assert replica.restarts == 0
    with pytest.raises(ReplicaLostError, match="failed: bad-file is truncated"):
        await collect(replica, request("a"))


async def test_a_bug_in_loading_is_final_and_its_traceback_is_kept(start):
    replica = await start("bug")
    with pytest.raises(EngineError, match="ZeroDivisionError: a bug in the loader"):
        await ready(replica)
    assert any("Traceback" in line for line in replica.last_words)


async def test_a_crash_loop_is_given_up_with_the_last_words(start):
    replica = await start("dies-loading")
    with pytest.raises(UnavailableError, match=r"exit code 9 .* the last words"):
        await ready(replica)
    assert replica.restarts == QUICK.failed_starts - 1
    assert replica.last_words == ["the last words"]


async def test_a_process_that_never_listens_is_given_up(start, monkeypatch):
    monkeypatch.setattr("tokenpath.fleet.local.LISTEN_TIMEOUT_S", 0.2)
    replica = await start("good", command=(sys.executable, "-c", "import time; time.sleep(1000)"))
    with pytest.raises(UnavailableError, match="did not listen within"):
        await ready(replica)


async def test_exit_code_two_is_final_with_the_processs_own_sentence(start):
    told = "import sys; sys.exit(print('ERROR tokenpath.engine: no torch: install it') or 2)"
    replica = await start("good", command=(sys.executable, "-c", told))
    with pytest.raises(SpecError, match=r"^no torch: install it$"):
        await ready(replica)
    assert replica.restarts == 0


async def test_cancelling_the_supervisor_leaves_no_process(start, runtime_folder):
    replica = await ready(await start("good"))
    process = psutil.Process(replica.pid)
    replica._supervisor.cancel()
    await asyncio.wait([replica._supervisor])
    assert not process.is_running()
    assert list(runtime_folder.iterdir()) == []
    replica._supervisor = None


async def test_a_command_that_is_not_there(start):
    replica = await start("good", command=("/nonexistent/python",))
    with pytest.raises(SpecError, match="cannot be started"):
        await ready(replica)


async def test_stopping_while_loading(start):
    seen = []
    replica = await start("loads-forever", on_progress=lambda *step: seen.append(step))
    waiting = asyncio.create_task(replica.wait_ready())
    await until(lambda: seen)
    async with asyncio.timeout(5):
        await replica.stop(30.0)
    with pytest.raises(DrainingError):
        await waiting
    assert replica.state is ReplicaState.STOPPED


async def test_stopping_right_after_starting(start):
    replica = await start("good")
    async with asyncio.timeout(5):
        await replica.stop(0.0)
    assert replica.state is ReplicaState.STOPPED


async def test_an_abort_of_a_real_process_tells_what_it_has_cost(start):
    replica = await start("slow-steps")
    replica.abort("nobody")  # not linked yet
    await ready(replica)
    began = time.monotonic()
    stream = replica.generate(request("a", max_tokens=10_000))
    seen = [await anext(stream) for _ in range(3)]
    replica.abort("a")
    asked = time.monotonic()
    seen += [event async for event in stream]
    ended = time.monotonic()
    finish = seen[-1].finish
    assert finish.reason is FinishReason.ABORT
    assert ended - asked < 0.5
    assert finish.usage.completion_tokens == sum(len(event.token_ids) for event in seen)
    stages = finish.stages
    assert stages.prefill_s >= 0.05
    assert stages.decode_s >= 0.1
    # One monotonic clock for the whole machine: nothing is counted twice, and little is lost.
    total = stages.queue_s + stages.prefill_s + stages.decode_s
    assert ended - began - 0.3 < total <= ended - began
    assert (await replica.stats()).aborts_total == 1


async def test_stop_drains_and_ends_what_takes_too_long(start):
    replica = await ready(await start("slow-steps"))
    quick = asyncio.create_task(collect(replica, request("quick", max_tokens=4)))
    slow = asyncio.create_task(collect(replica, request("slow", max_tokens=10_000)))
    await until(lambda: replica.last_stats.steps_total > 0)
    stopping = asyncio.create_task(replica.stop(0.5))
    await asyncio.sleep(0.05)
    assert replica.state is ReplicaState.DRAINING
    with pytest.raises(DrainingError):
        await collect(replica, request("late"))
    await stopping
    assert len(await quick) == 4
    assert (await slow)[-1].error.code == "draining"


async def test_a_process_that_will_not_end_is_killed(start, monkeypatch):
    monkeypatch.setattr("tokenpath.fleet.local.TERM_S", 0.3)
    replica = await ready(await start("good"))
    process = psutil.Process(replica.pid)
    process.suspend()
    async with asyncio.timeout(5):
        await replica.stop(0.1)
    assert not process.is_running()


async def test_an_idle_engine_sleeps(start):
    replica = await ready(await start("good"))
    assert len(await collect(replica, request("a"))) == 5
    process = psutil.Process(replica.pid)
    before = sum(process.cpu_times()[:2])
    await asyncio.sleep(0.5)
    assert sum(process.cpu_times()[:2]) - before <= 0.05


async def test_sigint_is_the_parents_business(start):
    replica = await ready(await start("good"))
    os.kill(replica.pid, signal.SIGINT)
    assert len(await collect(replica, request("a"))) == 5
    assert replica.restarts == 0


async def test_a_lost_link_to_a_living_process_is_made_again(start):
    replica = await ready(await start("good"))
    pid = replica.pid
    replica._link._writer.transport.abort()
    await until(lambda: replica.state is not ReplicaState.READY)
    await ready(replica)
    assert replica.pid == pid
    assert len(await collect(replica, request("a"))) == 5


async def test_a_gateway_that_does_not_read_is_cut_off_by_a_real_process(start):
    replica = await ready(await start("good"))
    process = replica._process
    _, writer = await asyncio.open_unix_connection(process.address.path)
    writer.transport.pause_reading()
    writer.write(encode(Hello(version=PROTOCOL_VERSION, token=process.token)))
    await asyncio.sleep(0.1)
    writer.write(encode(Submit(request("slow", kind=WIDE, max_tokens=1_000_000))))
    await until(lambda: replica.last_stats.aborts_total == 1)
    writer.transport.abort()
    await until(lambda: any("reads too slowly" in line for line in replica.last_words))
    assert len(await collect(replica, request("a"))) == 5


async def test_an_engine_on_another_machine(tmp_path):
    cert, key = certificate(tmp_path, "engine")
    port = free_port()
    launch = EngineLaunch(
        name="m",
        model=Path("good"),
        listen=f"tcp:localhost:{port}",
        tls=ServerTls(cert=cert, key=key),
    )
    order = tmp_path / "launch.json"
    order.write_text(launch.model_dump_json())
    process = await asyncio.create_subprocess_exec(
        *SCRIPTED, str(order), env={**os.environ, LINK_TOKEN_VARIABLE: "t"}
    )
    try:
        link = None
        async with asyncio.timeout(20):
            while link is None:
                await asyncio.sleep(0.05)
                with contextlib.suppress(ReplicaLostError):
                    link = await LinkedReplica.connect(
                        TcpAddress("localhost", port),
                        replica_id="r",
                        token="t",
                        tls=ClientTls(ca=cert).context(),
                    )
        await link.wait_ready()
        events = [event async for event in link.generate(request("a", kind=WIDE, max_tokens=300))]
        assert len(events) == 300
    finally:
        process.terminate()
        assert await process.wait() == 0


async def test_the_engines_lines_go_to_the_servers_log_with_their_level(start, caplog):
    caplog.set_level(logging.INFO)
    replica = await ready(await start("good"))
    os.kill(replica.pid, signal.SIGTERM)
    await until(lambda: "draining" in caplog.text)
    [record] = [r for r in caplog.records if "draining" in r.message]
    assert record.name == "tokenpath.engine.m-0"
    assert record.levelno == logging.INFO


PARENT = """
import asyncio, sys
from pathlib import Path
from tokenpath.config.spec import EngineSettings
from tokenpath.fleet.local import LocalFleet, ReplicaPlan

async def main():
    plan = ReplicaPlan(replica_id="m-0", name="m", model=Path("good"), engine=EngineSettings())
    fleet = LocalFleet([plan], command=(sys.executable, sys.argv[1]))
    await fleet.start()
    await fleet.wait_ready()
    print(fleet.replicas[0].pid, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


def test_a_killed_parent_takes_its_engine_along(runtime_folder):
    command = [sys.executable, "-c", PARENT, SCRIPTED[1]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        child.wait(5)
    assert not child.is_running()
    for leftover in runtime_folder.glob("*/link"):  # nobody was left to clean up
        leftover.unlink()
        leftover.parent.rmdir()


def test_without_the_kernels_help_the_engine_sees_that_its_parent_has_gone(tmp_path):
    launch = {"name": "m", "model": "good", "listen": f"unix:{tmp_path}/s", "parent_pid": 1}
    engine = subprocess.run(
        SCRIPTED,
        check=False,
        input=json.dumps(launch),
        env={**os.environ, "TOKENPATH_LINK_TOKEN": "t"},
        text=True,
        capture_output=True,
        timeout=20,
    )
    assert engine.returncode == 0
    assert "the parent process has ended" in engine.stderr
    assert not (tmp_path / "s").exists()


def engine_says(stdin: str, *arguments: str, prelude: str = "") -> tuple[int, str]:
    code = f"{prelude}\nimport sys\nfrom tokenpath.engine.__main__ import main\nsys.exit(main(sys.argv[1:]))"
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=False,
        input=stdin,
        text=True,
        capture_output=True,
        timeout=30,
    )
    return ended.returncode, ended.stderr


def test_without_torch_the_engine_names_the_extra():
    hide = "import importlib.util as u; f = u.find_spec\nu.find_spec = lambda n, *a: None if n == 'torch' else f(n, *a)"
    code, said = engine_says("{}", prelude=hide)
    assert code == 2
    assert said == (
        "ERROR tokenpath.engine: the native engine needs torch: pip install 'tokenpath[engine]'\n"
    )


@pytest.mark.parametrize(
    ("stdin", "arguments", "sentence"),
    [
        ("", [], "the launch order is wrong"),
        ('{"name": "m", "model": "x", "listen": "unix:/x", "colour": 1}', [], "'colour'"),
        ('{"name": "m", "model": "x", "listen": "nowhere"}', [], "no link address"),
        ('{"name": "m", "model": "x", "listen": "tcp:127.0.0.1:0"}', [], "needs a secret"),
        ('{"name": "m", "model": "x", "listen": "unix:/nonexistent/s"}', [], "cannot listen"),
        ("", ["/nonexistent.json"], "cannot be read"),
    ],
)
def test_a_wrong_order_is_one_sentence(stdin, arguments, sentence):
    code, said = engine_says(stdin, *arguments)
    assert code == 2
    assert sentence in said
    assert len(said.splitlines()) == 1


def test_a_temporary_folder_too_deep_for_a_socket(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with pytest.raises(SpecError, match="set TMPDIR to a shorter one"):
        process_module._private_folder()
    assert list(deep.iterdir()) == []


def test_starting_an_engine_process_imports_no_more_than_it_needs():
    code = (
        "import sys, tokenpath.engine.__main__;"
        "print([m for m in ('torch', 'numpy', 'starlette', 'sqlalchemy', 'httpx') if m in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


@pytest.mark.real_model
async def test_a_real_model_streams_and_an_abort_frees_everything(start, gemma_path, caplog):
    seen = []
    replica = await start(
        str(gemma_path),
        command=process_module.ENGINE_COMMAND,
        on_progress=lambda *step: seen.append(step),
    )
    async with asyncio.timeout(200):
        await replica.wait_ready()
    name, what, fraction = seen[-1]
    assert (name, fraction) == ("m-0", 1.0)
    assert what == "warming up", "the last thing before a model says ready"
    assert replica.last_stats.counted() == ReplicaStats(), "a rehearsal leaves no trace"
    assert replica.card.architecture == "gemma3"
    tokenizer = open_model(gemma_path).tokenizer()
    wanted = GenerationRequest(
        request_id="real",
        model="m",
        prompt=TokenPrompt(list(tokenizer.encode("1, 2, 3, 4, 5, 6, 7, 8,"))),
        sampling=SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True),
    )
    stream = replica.generate(wanted)
    text = ""
    async for event in stream:
        text += event.text
        if len(text) >= 8:
            break
    assert text.startswith(" 9, 10, ")
    running = await replica.stats()
    assert running.requests_running == 1
    assert running.kv_blocks_used > 0
    await stream.aclose()
    stopped = await replica.stats()
    assert stopped.requests_running == stopped.kv_blocks_used == 0
    # The link tests hold "within one step" exactly; here the machine may pause us in between.
    assert stopped.steps_total <= running.steps_total + 10
    assert stopped.aborts_total == 1
    await replica.stop(1.0)
    assert "killing it" not in caplog.text
