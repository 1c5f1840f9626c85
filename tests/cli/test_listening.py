import ipaddress
import socket

import pytest

from tokenpath.cli import listening
from tokenpath.protocol.errors import SpecError


@pytest.fixture
def bound():
    bound = listening.bind("127.0.0.1", 0)
    yield bound
    bound.close()


def test_a_free_port_and_its_url(bound):
    listening.listen(bound)
    port = bound.getsockname()[1]
    assert listening.url(bound) == f"http://127.0.0.1:{port}"
    socket.create_connection(("127.0.0.1", port), timeout=2).close()


def test_a_port_in_use(bound):
    listening.listen(bound)
    port = bound.getsockname()[1]
    with pytest.raises(SpecError, match=rf"port {port} on 127.0.0.1 is in use; .*--port"):
        listening.bind("127.0.0.1", port)


def test_two_that_bind_at_once_do_not_both_listen(bound):
    port = bound.getsockname()[1]
    other = listening.bind("127.0.0.1", port)
    listening.listen(bound)
    with pytest.raises(SpecError, match="is in use"):
        listening.listen(other)
    other.close()


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("192.0.2.1", "this machine has no address 192.0.2.1"),
        ("no such host", "cannot be resolved"),
        ("a" * 300, "cannot be resolved"),
        ("999.1.1.1", "cannot be resolved"),
    ],
)
def test_addresses_that_are_not_ours(host, words):
    with pytest.raises(SpecError, match=words):
        listening.bind(host, 0)


def test_localhost_is_local():
    bound = listening.bind("localhost", 0)
    assert listening.is_local(bound)
    bound.close()


@pytest.mark.parametrize("auth", ["keys", "none"])
@pytest.mark.parametrize("ever_created", [True, False])
def test_only_keys_open_the_server_to_others(bound, auth, ever_created):
    everywhere = listening.bind("0.0.0.0", 0)
    try:
        listening.check_exposure(bound, auth=auth, ever_created=ever_created)
        if auth == "keys" and ever_created:
            listening.check_exposure(everywhere, auth=auth, ever_created=ever_created)
        else:
            with pytest.raises(SpecError, match=r"loopback addresses only.*keys create NAME"):
                listening.check_exposure(everywhere, auth=auth, ever_created=ever_created)
        assert ipaddress.ip_address(listening.url(everywhere)[7:].split(":")[0]).is_loopback
    finally:
        everywhere.close()


def test_ipv6():
    try:
        bound = listening.bind("::1", 0)
    except SpecError:
        pytest.skip("this machine has no IPv6")
    assert listening.url(bound) == f"http://[::1]:{bound.getsockname()[1]}"
    assert listening.is_local(bound)
    bound.close()
