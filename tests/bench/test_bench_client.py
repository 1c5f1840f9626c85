"""The HTTP client against real sockets: reuse, ends of responses, TLS, cancellation, cost."""

import asyncio
import contextlib
import itertools
import shutil
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sse_server

from tokenpath.bench.client import Client, ConnectFailedError, DisconnectedError, Endpoint
from tokenpath.bench.observe import Observation
from tokenpath.protocol.errors import SpecError


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
        ("https://host/v1/", "https://host:443/v1"),
        ("http://[::1]:80", "http://[::1]:80"),
    ],
)
def test_endpoint(url, expected):
    assert Endpoint.parse(url).url == expected


@pytest.mark.parametrize(
    "url",
    ["", "foo", "localhost:8000", "ftp://h/v1", "http://", "http://h:99999/", "http://h:x/", "http://u@h/",
     "http://h/?a=1", "http://h/v 1", "http://h/\r\nX: y", "http://[::1"],
)  # fmt: skip
def test_bad_urls(url):
    with pytest.raises(SpecError, match="must look like"):
        Endpoint.parse(url)


@pytest.mark.parametrize("key", ["", "a b", "a\r\nX: y", "schlüssel"])
def test_bad_keys_are_refused_and_not_shown(key):
    with pytest.raises(SpecError) as caught:
        Client(Endpoint.parse("http://h/v1"), api_key=key)
    assert not key or key not in caught.value.message


@contextlib.asynccontextmanager
async def raw_server(*replies):
    """Answer the nth request of all connections with ``replies[n]``; None closes instead."""
    numbers = itertools.count()

    async def handle(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                reply = replies[next(numbers)]
                if reply is None:
                    break
                writer.write(reply)
                if b"length" not in reply.lower():
                    break
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield Endpoint.parse(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")


class Taken:
    def __init__(self):
        self.status = None
        self.data = b""

    def head(self, status, content_type):
        self.status = status

    def body(self, data, at):
        self.data += data


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def fetch(client):
    taken = Taken()
    await asyncio.wait_for(client.get("/models", taken), 10)
    return taken.status, taken.data


async def test_connections_are_reused():
    async with raw_server(OK, OK, OK) as endpoint:
        client = Client(endpoint)
        assert [await fetch(client) for _ in range(3)] == [(200, b"ok")] * 3
        assert client.connections_opened == 1
        client.close()


async def test_a_kept_connection_that_the_server_closed_is_replaced():
    async with raw_server(OK, None, OK) as endpoint:
        client = Client(endpoint)
        assert await fetch(client) == (200, b"ok")
        assert await fetch(client) == (200, b"ok")  # the first try met the close
        assert client.connections_opened == 2
        client.close()


async def test_a_body_may_end_with_the_connection():
    async with raw_server(b"HTTP/1.0 200 OK\r\n\r\nall of it") as endpoint:
        assert await fetch(Client(endpoint)) == (200, b"all of it")


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (None, "before any response"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", "inside the response"),
        (b"SSH-2.0-OpenSSH\r\n", "not HTTP"),
    ],
)
async def test_broken_responses(reply, words):
    async with raw_server(reply) as endpoint:
        with pytest.raises(DisconnectedError, match=words):
            await fetch(Client(endpoint))


async def test_nobody_listens():
    async with raw_server() as endpoint:
        pass
    with pytest.raises(ConnectFailedError, match="refused"):
        await fetch(Client(endpoint))


async def test_cancelling_closes_the_connection():
    script = sse_server.Script(gap_s=0.01)
    with sse_server.serving(sse_server.make_app(script)) as url:
        client = Client(Endpoint.parse(url))
        seen = Observation()
        task = asyncio.create_task(
            client.post("/completions", b'{"max_tokens":10000,"prompt":"x"}', seen)
        )
        while seen.output_events < 3:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        ends = time.monotonic() + 10
        while script.live and time.monotonic() < ends:
            await asyncio.sleep(0.01)
        assert (script.live, script.disconnects) == (0, 1)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
async def test_https(tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    app = sse_server.make_app(sse_server.Script())
    with sse_server.serving(app, ssl_keyfile=str(key), ssl_certfile=str(certificate)) as url:
        endpoint = Endpoint.parse(url)
        with pytest.raises(ConnectFailedError, match=r"TLS failed: .*CERTIFICATE_VERIFY_FAILED"):
            await fetch(Client(endpoint))
        client = Client(endpoint, tls=ssl.create_default_context(cafile=str(certificate)))
        for _ in range(2):
            seen = Observation()
            await client.post("/completions", b'{"max_tokens":30,"prompt":"x"}', seen)
            seen.finish()
            assert seen.error is None
            assert seen.output_events == 30
        assert client.connections_opened == 1
        client.close()


async def test_thousands_of_events_a_second_cost_less_than_half_a_core():
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("paced_server.py")), "0", "60", "0.02"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        client = Client(Endpoint.parse(f"http://127.0.0.1:{server.stdout.readline().strip()}/v1"))
        seen = [Observation() for _ in range(60)]
        cpu = time.process_time()
        await asyncio.gather(*(client.post("/completions", b"{}", one) for one in seen))
        cpu = time.process_time() - cpu
    finally:
        server.terminate()
        server.wait()
    events = sum(one.output_events for one in seen)
    assert events == 60 * 60
    assert all(one.done for one in seen)
    assert cpu / events < 0.5 / 3000  # half a core's second for 3,000 events
