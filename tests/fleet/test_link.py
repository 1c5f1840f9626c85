"""The replica link end to end: the real server and client over a real socket, a scripted core."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import threading

import msgspec
import pytest
from link_helpers import TOKEN, certificate, collect, free_port, request, tokens, until
from scripted_engine import (
    BREAKS_ALL,
    FAILS_ALONE,
    REFUSED,
    SUBMIT_BUG,
    WIDE,
    ScriptedCore,
)

from tokenpath.config.launch import (
    EXIT_BROKEN,
    EXIT_OK,
    ClientTls,
    ServerTls,
    TcpAddress,
    UnixAddress,
    parse_address,
)
from tokenpath.engine import connection
from tokenpath.engine import server as server_module
from tokenpath.engine import worker as work
from tokenpath.engine.worker import Inbox
from tokenpath.fleet.replica import LinkedReplica
from tokenpath.protocol.errors import (
    DrainingError,
    InvalidRequestError,
    ModelFileError,
    NotReadyError,
    ReplicaLostError,
    SpecError,
)
from tokenpath.protocol.events import Failed, FinishReason
from tokenpath.protocol.framing import encode
from tokenpath.protocol.link import PROTOCOL_VERSION, Hello, StatsQuery, Submit
from tokenpath.protocol.replica import ReplicaState


async def test_two_hundred_streams_share_one_connection(engine):
    started = engine(ScriptedCore(step_s=0))
    link = await started.ready()
    wanted = [request(f"r{i}", kind=i, max_tokens=1 + i % 17) for i in range(200)]
    streams = await asyncio.gather(*(collect(link, one) for one in wanted))
    for i, events in enumerate(streams):
        assert tokens(events) == [i * 1000 + k for k in range(1 + i % 17)]
        assert {event.request_id for event in events} == {f"r{i}"}
        assert [event.finish is not None for event in events] == [False] * (i % 17) + [True]
        assert events[-1].finish.reason is FinishReason.LENGTH
    await started.idle()
    assert link.last_stats.requests_running == 0
    assert link.last_stats.generated_tokens_total == started.core.generated


async def test_card_progress_and_state_while_loading(engine):
    go = threading.Event()

    def load(progress):
        progress("weights", 0.25)
        go.wait()
        progress("weights", 1.0)
        return ScriptedCore()

    seen = []
    started = engine(load=load)
    link = await started.connect(on_progress=lambda what, fraction: seen.append((what, fraction)))
    assert link.state is ReplicaState.LOADING
    with pytest.raises(NotReadyError):
        await collect(link, request("early"))
    assert (await link.stats()).steps_total == 0
    go.set()
    await link.wait_ready()
    assert link.state is ReplicaState.READY
    assert link.card.name == "scripted"
    assert ("weights", 0.25) in seen
    assert seen[-1] == ("weights", 1.0)
    late = await started.ready()
    assert late.card == link.card


async def test_a_model_that_cannot_be_loaded_says_why_and_ends_the_process(engine):
    def load(progress):
        raise ModelFileError("m.gguf is truncated")

    started = engine(load=load)
    link = await started.connect()
    with pytest.raises(ModelFileError, match=r"m\.gguf is truncated"):
        await link.wait_ready()
    assert link.state is ReplicaState.FAILED
    assert await started.serving == ModelFileError.exit_code


async def test_closing_an_iterator_aborts_within_a_step(engine):
    started = engine(ScriptedCore(step_s=0.02))
    link = await started.ready()
    stream = link.generate(request("a", max_tokens=10_000))
    other = asyncio.create_task(collect(link, request("b", kind=2, max_tokens=30)))
    await anext(stream)
    await stream.aclose()
    steps = started.core.steps
    await until(lambda: started.core.aborted)
    [aborted_after] = started.core.aborted.values()
    assert aborted_after <= steps + 1
    assert tokens(await other) == [2000 + k for k in range(30)]


async def test_cancelling_the_consumer_before_the_first_event_aborts(engine):
    started = engine(ScriptedCore(step_s=0.05))
    link = await started.ready()
    task = asyncio.create_task(collect(link, request("a", max_tokens=10_000)))
    await asyncio.sleep(0.02)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await started.idle()
    assert len(started.core.aborted) == 1
    assert (await link.stats()).requests_running == 0


async def test_a_finished_request_is_not_aborted(engine):
    started = engine()
    link = await started.ready()
    stream = link.generate(request("a", max_tokens=1))
    event = await anext(stream)
    assert event.finish is not None
    await stream.aclose()
    await link.stats()
    assert started.core.aborted == {}


async def test_an_id_may_be_used_again_right_after_an_abort(engine):
    started = engine(ScriptedCore(step_s=0.01))
    link = await started.ready()
    for kind in range(1, 20):
        stream = link.generate(request("same", kind=kind, max_tokens=100))
        assert (await anext(stream)).token_ids == [kind * 1000]
        await stream.aclose()


async def test_two_gateways_cannot_collide_or_abort_each_other(engine):
    started = engine(ScriptedCore(step_s=0.002))
    one, two = await started.ready(), await started.ready()
    first = one.generate(request("same", kind=1, max_tokens=50))
    second = asyncio.create_task(collect(two, request("same", kind=2, max_tokens=50)))
    assert (await anext(first)).token_ids == [1000]
    await first.aclose()
    assert tokens(await second) == [2000 + k for k in range(50)]
    assert len(started.core.aborted) == 1


async def test_errors_end_their_own_request_only(engine):
    started = engine()
    link = await started.ready()
    good = asyncio.create_task(collect(link, request("good", max_tokens=50)))
    [refused] = await collect(link, request("refused", kind=REFUSED))
    assert refused.error == InvalidRequestError("refused by the script", param="prompt").info()
    assert refused.stages.queue_s >= 0
    [bug] = await collect(link, request("bug", kind=SUBMIT_BUG))
    assert bug.error.code == "engine_error"
    assert "ZeroDivisionError" not in bug.error.message
    alone = await collect(link, request("alone", kind=FAILS_ALONE))
    assert [type(event).__name__ for event in alone] == ["TokenDelta", "Failed"]
    assert len(tokens(await good)) == 50


@pytest.mark.parametrize(
    "broken",
    [
        {"stop": ("\ud800",)},
        {"seed": 2**70},
        {"max_tokens": "many"},
        {"logit_bias": {"a": 1.0}},
        {"stop": ("x" * 2_000,)},
    ],
)
async def test_a_request_that_cannot_cross_the_link_leaves_its_neighbours_alone(
    engine, monkeypatch, broken
):
    started = engine()
    link = await started.ready()
    good = asyncio.create_task(collect(link, request("good", max_tokens=50)))
    await asyncio.sleep(0.01)
    monkeypatch.setattr("tokenpath.protocol.framing.MAX_FRAME_BYTES", 1_000)
    sampling = msgspec.structs.replace(request("").sampling, **broken)
    with pytest.raises(InvalidRequestError, match="cannot be sent to the engine"):
        await collect(link, msgspec.structs.replace(request("bad"), sampling=sampling))
    assert len(await good) == 50
    assert link._streams == {}


async def test_an_event_that_cannot_be_encoded_loses_the_link_rather_than_hanging(engine):
    class Surrogates(ScriptedCore):
        def step(self):
            return [msgspec.structs.replace(event, text="\ud800") for event in super().step()]

    link = await engine(Surrogates()).ready()
    with pytest.raises(ReplicaLostError):
        await collect(link, request("a"))


async def test_live_requests_are_counted(engine, monkeypatch):
    monkeypatch.setattr(server_module, "MAX_LIVE_REQUESTS", 2)
    started = engine(ScriptedCore(step_s=0.01))
    link = await started.ready()
    streams = [link.generate(request(f"r{i}", max_tokens=10_000)) for i in range(2)]
    for stream in streams:
        await anext(stream)
    [refused] = await collect(link, request("third"))
    assert refused.error.code == "overloaded"
    for stream in streams:
        await stream.aclose()
    await started.idle()
    assert len(await collect(link, request("fourth"))) == 5


def test_a_full_inbox_refuses_everything_but_aborts():
    inbox = Inbox(max_commands=2)
    assert inbox.put(work.Submit(request("a"), 0.0))
    assert inbox.put(work.QueryStats((1, 1)))
    assert not inbox.put(work.Submit(request("b"), 0.0))
    assert inbox.put(work.Abort("a"))
    assert len(inbox.take(wait=True)) == 3
    assert inbox.take(wait=False) == []
    inbox.close()
    assert inbox.take(wait=True) is None


async def test_a_core_that_breaks_fails_what_runs_and_ends_the_process(engine):
    started = engine(ScriptedCore(step_s=0.01))
    link = await started.ready()
    running = asyncio.create_task(collect(link, request("victim", max_tokens=10_000)))
    await asyncio.sleep(0.05)
    culprit = await collect(link, request("culprit", kind=BREAKS_ALL))
    victim = await running
    assert isinstance(victim[-1], Failed)
    assert victim[-1].error.code == culprit[-1].error.code == "engine_error"
    assert await started.serving == EXIT_BROKEN
    await link.wait_closed()
    assert link.state is ReplicaState.FAILED
    with pytest.raises(ReplicaLostError):
        await collect(link, request("late"))


async def test_broken_integrity_at_idle_ends_the_process(engine):
    class Leaky(ScriptedCore):
        def check_integrity(self) -> None:
            raise AssertionError("block 7 is owned twice")

    started = engine(Leaky())
    link = await started.ready()
    assert len(await collect(link, request("a"))) == 5
    assert await started.serving == EXIT_BROKEN


async def test_a_core_is_closed_when_its_process_ends_but_not_when_it_broke(engine):
    started = engine()
    await started.ready()
    started.server.end(EXIT_OK)
    assert await started.serving == EXIT_OK
    assert started.core.closed
    broken = engine()
    link = await broken.ready()
    await collect(link, request("culprit", kind=BREAKS_ALL))
    assert await broken.serving == EXIT_BROKEN
    assert not broken.core.closed


async def test_integrity_is_checked_once_on_going_idle(engine):
    started = engine()
    link = await started.ready()
    await asyncio.gather(*(collect(link, request(f"r{i}")) for i in range(5)))
    await started.idle()
    await asyncio.sleep(0.05)
    checks = started.core.integrity_checks
    assert 1 <= checks <= 5
    await asyncio.sleep(0.1)  # asleep: neither steps nor checks
    assert started.core.integrity_checks == checks


async def test_stats_come_by_themselves_twice_a_second_and_at_idle(engine):
    started = engine(ScriptedCore(step_s=0.02))
    link = await started.ready()
    bystander = await started.ready()
    stream = link.generate(request("a", max_tokens=60))
    await anext(stream)
    await asyncio.sleep(0.7)
    assert link.last_stats.requests_running == 1
    assert bystander.last_stats.requests_running == 1
    await stream.aclose()
    await started.idle()
    await asyncio.sleep(0.1)
    assert link.last_stats.requests_running == bystander.last_stats.requests_running == 0
    assert bystander.last_stats.aborts_total == 1


async def test_random_aborts_and_disconnects_leak_nothing(engine):
    chance = random.Random(7)
    started = engine(ScriptedCore(step_s=0.001))

    async def one(link: LinkedReplica, number: int) -> str:
        wanted = request(f"r{number}", kind=1 + number % 7, max_tokens=chance.randint(1, 40))
        patience = chance.choice([None, None, 0, 1, 5])
        got: list[int] = []
        stream = link.generate(wanted)
        try:
            async for event in stream:
                got += event.token_ids
                if patience is not None and len(got) > patience:
                    return "aborted"
        except ReplicaLostError:
            return "lost"
        finally:
            await stream.aclose()
        assert got == [(1 + number % 7) * 1000 + k for k in range(wanted.sampling.max_tokens)]
        return "finished"

    async def gateway(first: int) -> list[str]:
        link = await started.ready()
        tasks = [asyncio.create_task(one(link, first + i)) for i in range(40)]
        if chance.random() < 0.5:
            await asyncio.sleep(chance.random() * 0.05)
            await link.close()
        results = await asyncio.gather(*tasks)
        await link.close()
        return results

    results = [r for g in await asyncio.gather(*(gateway(i * 100) for i in range(12))) for r in g]
    assert set(results) == {"finished", "aborted", "lost"}
    await started.idle()
    link = await started.ready()
    stats = await link.stats()
    assert stats.requests_running == stats.kv_blocks_used == 0
    assert started.core.integrity_checks > 0
    assert started.server._open == 1


async def test_a_gateway_that_does_not_read_loses_its_connection_not_the_engine_its_memory(
    engine, caplog
):
    started = engine(ScriptedCore(step_s=0.001), max_send_buffer_bytes=1_000_000)
    healthy = await started.ready()
    _, writer = await started.raw()
    writer.transport.pause_reading()
    writer.write(encode(Hello(version=PROTOCOL_VERSION, token=TOKEN)))
    await asyncio.sleep(0.05)
    writer.write(encode(Submit(request("slow", kind=WIDE, max_tokens=1_000_000))))
    good = asyncio.create_task(collect(healthy, request("good", max_tokens=200)))
    await until(lambda: started.core.aborted)
    assert "reads too slowly" in caplog.text
    assert len(await good) == 200
    writer.transport.abort()
    await started.idle()


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (encode(Hello(version=PROTOCOL_VERSION, token="wrong")), "token is wrong"),
        (encode(Hello(version=1)), "token is wrong"),
        (encode(Hello(version=99, token=TOKEN)), "speaks version 99"),
        (encode(StatsQuery(1)), "not a hello"),
        (b"GET / HTTP/1.1\r\n\r\n", "longer than"),
        (b"\x00\x00\x00\x05junk!", "not a frame"),
        ((2**20).to_bytes(4, "big"), "longer than"),
        (encode(Hello(version=PROTOCOL_VERSION, token=TOKEN))[:-3], "middle of a frame"),
        (b"", "without saying hello"),
    ],
)
async def test_a_peer_that_is_not_a_gateway_is_refused(engine, caplog, sent, why):
    caplog.set_level(logging.INFO)
    started = engine()
    reader, writer = await started.raw()
    writer.write(sent)
    if why in {"middle of a frame", "without saying hello"}:
        writer.write_eof()
    async with asyncio.timeout(5):
        answer = await reader.read()
    assert TOKEN.encode() not in answer or "version" in why
    assert why in caplog.text
    writer.close()
    assert len(await collect(await started.ready(), request("good"))) == 5


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x03abc",
        encode(Hello(version=PROTOCOL_VERSION, token=TOKEN)),
        encode(Submit(request("half", max_tokens=3)))[:-2],
        encode(Submit(request("twice", max_tokens=10_000))) * 2,
    ],
)
async def test_a_gateway_that_breaks_the_protocol_loses_its_requests_only(engine, sent):
    started = engine(ScriptedCore(step_s=0.005))
    healthy = await started.ready()
    good = asyncio.create_task(collect(healthy, request("good", max_tokens=50)))
    reader, writer = await started.raw()
    writer.write(encode(Hello(version=PROTOCOL_VERSION, token=TOKEN)))
    await reader.readexactly(4)
    writer.write(encode(Submit(request("mine", max_tokens=10_000))))
    await asyncio.sleep(0.03)
    writer.write(sent)
    writer.write_eof()
    async with asyncio.timeout(5):
        await reader.read()
    writer.close()
    assert len(await good) == 50
    await started.idle()
    assert any(internal_id.endswith("/mine") for internal_id in started.core.aborted)


async def test_a_peer_that_says_nothing_is_dropped(engine, monkeypatch, caplog):
    monkeypatch.setattr(connection, "HELLO_TIMEOUT_S", 0.05)
    started = engine()
    reader, writer = await started.raw()
    async with asyncio.timeout(2):
        assert await reader.read() == b""
    writer.close()
    assert "did not say hello in time" in caplog.text


async def test_connections_are_counted(engine, monkeypatch, caplog):
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 2)
    started = engine()
    one, two = await started.ready(), await started.ready()
    with pytest.raises(ReplicaLostError):
        await started.connect()
    assert "too many" in caplog.text
    await one.close()
    await asyncio.sleep(0.05)
    assert len(await collect(await started.ready(), request("a"))) == 5
    assert two.state is ReplicaState.READY


async def test_the_client_names_what_is_wrong(engine, tmp_path, monkeypatch):
    started = engine()
    with pytest.raises(ReplicaLostError, match="is the token right"):
        await started.connect(token="wrong")
    with pytest.raises(ReplicaLostError, match="No such file"):
        await LinkedReplica.connect(UnixAddress(tmp_path / "none"), replica_id="r", token=TOKEN)
    monkeypatch.setattr("tokenpath.fleet.replica.PROTOCOL_VERSION", 99)
    with pytest.raises(ReplicaLostError, match="speaks version 2, not 99"):
        await started.connect()


async def test_drain_lets_the_quick_finish_and_aborts_the_rest(engine):
    started = engine(ScriptedCore(step_s=0.005))
    link, other = await started.ready(), await started.ready()
    quick = asyncio.create_task(collect(link, request("quick", max_tokens=10)))
    slow = asyncio.create_task(collect(other, request("slow", max_tokens=10_000)))
    await asyncio.sleep(0.02)
    draining = asyncio.create_task(link.drain(0.3))
    await asyncio.sleep(0.01)
    assert link.state is ReplicaState.DRAINING
    with pytest.raises(DrainingError):
        await collect(link, request("late"))
    [late] = await collect(other, request("late"))
    assert late.error.code == "draining"
    await draining
    assert len(await quick) == 10
    last = (await slow)[-1]
    assert isinstance(last, Failed)
    assert last.error.code == "draining"
    await started.idle()
    assert len(started.core.aborted) == 1


async def test_a_drain_ends_with_the_last_request(engine):
    link = await engine(ScriptedCore(step_s=0.005)).ready()
    streams = [
        asyncio.create_task(collect(link, request(f"r{i}", max_tokens=10 * i))) for i in (1, 2, 3)
    ]
    await asyncio.sleep(0.02)
    async with asyncio.timeout(5):
        await link.drain(30)
        assert [len(events) for events in await asyncio.gather(*streams)] == [10, 20, 30]


async def test_a_drain_with_nothing_running_is_immediate(engine):
    link = await engine().ready()
    async with asyncio.timeout(1):
        await link.drain(30)


async def test_tls_between_machines(engine, tmp_path):
    cert, key = certificate(tmp_path, "mine")
    other, _ = certificate(tmp_path, "other")
    address = TcpAddress("localhost", free_port())
    started = engine(address=address, tls=ServerTls(cert=cert, key=key).context())
    await asyncio.sleep(0.1)
    link = await started.ready(tls=ClientTls(ca=cert).context())
    assert len(await collect(link, request("a"))) == 5
    with pytest.raises(ReplicaLostError, match="certificate is not to be believed"):
        await started.connect(tls=ClientTls(ca=other).context())
    with pytest.raises(ReplicaLostError):
        await started.connect()  # in the clear
    assert len(await collect(link, request("b"))) == 5


async def test_tls_can_ask_the_client_for_a_certificate(engine, tmp_path):
    cert, key = certificate(tmp_path, "mine")
    client_cert, client_key = certificate(tmp_path, "client")
    tls = ServerTls(cert=cert, key=key, client_ca=client_cert).context()
    started = engine(address=TcpAddress("localhost", free_port()), tls=tls)
    await asyncio.sleep(0.1)
    with pytest.raises(ReplicaLostError):
        await started.connect(tls=ClientTls(ca=cert).context())
    shown = ClientTls(ca=cert, cert=client_cert, key=client_key).context()
    assert len(await collect(await started.ready(tls=shown), request("a"))) == 5


def test_unusable_tls_files_are_named(tmp_path):
    with pytest.raises(SpecError, match=r"nothing\.pem"):
        ServerTls(cert=tmp_path / "nothing.pem", key=tmp_path / "key").context()


async def test_a_port_in_use_is_one_sentence(engine):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        started = engine(address=TcpAddress("127.0.0.1", taken.getsockname()[1]))
        with pytest.raises(SpecError, match="cannot listen on tcp:127"):
            await started.serving


@pytest.mark.parametrize("text", ["unix:/a/b", "tcp:host:80", "tcp:[::1]:80", "tcp:127.0.0.1:0"])
def test_addresses_survive(text):
    assert str(parse_address(text)) == text


@pytest.mark.parametrize(
    "text", ["", "/a", "unix:", "tcp:host", "tcp::80", "tcp:h:99999", "tcp:h:x"]
)
def test_bad_addresses_are_spec_errors(text):
    with pytest.raises(SpecError, match="no link address"):
        parse_address(text)
