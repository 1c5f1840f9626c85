from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from tokenpath.gateway.auth import ANONYMOUS, Authenticator, is_loopback
from tokenpath.protocol.errors import AuthenticationError, PermissionDeniedError, UnavailableError
from tokenpath.store.database import open_database
from tokenpath.store.keys import KeySnapshot, KeyStore

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LOCAL = {"host": "127.0.0.1:8000"}


class Keys:
    """A source of keys without a thread."""

    def __init__(self, snapshot=None):
        self.snapshot = snapshot or KeySnapshot(ever_created=False, valid={})
        self.failure = None
        self.uses = []

    def current(self):
        if self.failure:
            raise self.failure
        return self.snapshot

    def used(self, key_id):
        self.uses.append(key_id)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A snapshot with two valid keys and a revoked one, and the three secrets."""
    with open_database(tmp_path_factory.mktemp("auth") / "state.db") as database:
        store = KeyStore(database)
        secrets = [store.create(name, now=NOW).secret for name in ("alice", "bob", "gone")]
        store.revoke("3", now=NOW)
        return store.snapshot(), secrets


def test_a_valid_key(made):
    snapshot, (alice, bob, _) = made
    keys = Keys(snapshot)
    authenticator = Authenticator(keys)
    for headers, name, key_id in [
        ({"authorization": f"Bearer {alice}"}, "alice", "1"),
        ({"authorization": f"bearer  {bob} "}, "bob", "2"),
        ({"x-api-key": bob}, "bob", "2"),
        ({"authorization": f"Bearer {alice}", "x-api-key": "nonsense"}, "alice", "1"),
    ]:
        identity = authenticator.authenticate(headers)
        assert (identity.name, identity.key_id) == (name, key_id)
    assert keys.uses == [1, 2, 2, 1]
    assert authenticator.authenticate(Headers({"X-API-Key": alice})).name == "alice"


def test_with_keys_any_host_and_origin_may_ask(made):
    snapshot, (alice, _, _) = made
    headers = {
        "authorization": f"Bearer {alice}",
        "host": "api.example.com",
        "origin": "https://x.org",
    }
    assert Authenticator(Keys(snapshot)).authenticate(headers).name == "alice"


def test_what_is_wrong_with_a_key_is_never_said(made):
    snapshot, (alice, _, gone) = made
    authenticator = Authenticator(Keys(snapshot))
    sentences = set()
    for headers in [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": f"Basic {alice}"},
        {"authorization": alice},
        {"authorization": f"Bearer {gone}"},
        {"authorization": f"Bearer {alice}x"},
        {"authorization": f"Bearer {alice[:-1]}"},
        {"authorization": f"Bearer {alice[:-1]}\xff"},
        {"authorization": "Bearer tp-" + "x" * 100_000},
        {"authorization": "Bearer \udcff\ud800"},
        {"authorization": "Bearer nonsense", "x-api-key": alice},
    ]:
        with pytest.raises(AuthenticationError) as caught:
            authenticator.authenticate({**LOCAL, **headers})
        sentences.add(caught.value.message)
    assert len(sentences) == 1


@given(st.text(max_size=80), st.text(max_size=80))
def test_no_text_gets_in(made, authorization, key):
    snapshot, _ = made
    with pytest.raises(AuthenticationError):
        Authenticator(Keys(snapshot)).authenticate(
            {"authorization": authorization, "x-api-key": key}
        )


def test_open_until_the_first_key_then_closed_for_good(made):
    snapshot, (alice, _, _) = made
    keys = Keys()
    authenticator = Authenticator(keys)
    assert authenticator.authenticate(LOCAL) == ANONYMOUS
    assert authenticator.authenticate({**LOCAL, "authorization": "Bearer any"}) == ANONYMOUS
    keys.snapshot = snapshot
    with pytest.raises(AuthenticationError):
        authenticator.authenticate(LOCAL)
    keys.snapshot = KeySnapshot(ever_created=True, valid={})  # the last one revoked
    with pytest.raises(AuthenticationError):
        authenticator.authenticate({**LOCAL, "authorization": f"Bearer {alice}"})


def test_unreadable_keys_close_the_door_and_name_no_file():
    keys = Keys()
    keys.failure = UnavailableError("the state database /home/me/state.db is damaged")
    with pytest.raises(UnavailableError) as caught:
        Authenticator(keys).authenticate(LOCAL)
    assert "state.db" not in caught.value.message
    assert caught.value.retry_after_s


def test_mode_none_needs_no_keys_even_if_there_are_some(made):
    snapshot, _ = made
    assert Authenticator(Keys(snapshot), mode="none").authenticate(LOCAL) == ANONYMOUS
    assert Authenticator(None, mode="none").authenticate(LOCAL) == ANONYMOUS
    with pytest.raises(ValueError, match="needs a source"):
        Authenticator(None)


@pytest.mark.parametrize("mode", ["keys", "none"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"host": ""},
        {"host": "evil.example"},
        {"host": "evil.example:8000"},
        {"host": "127.0.0.1.evil.example"},
        {"host": "localhost.evil.example"},
        {"host": "localhost@evil.example"},
        {"host": "evil.example@localhost"},
        {"host": "192.168.0.7:8000"},
        {"host": "0.0.0.0:8000"},
        {"host": "[::1"},
        {"host": "[::2]:8000"},
        {**LOCAL, "origin": "https://evil.example"},
        {**LOCAL, "origin": "http://localhost.evil.example"},
        {**LOCAL, "origin": "null"},
        {**LOCAL, "origin": ""},
        {"host": "evil.example", "origin": "http://localhost:3000"},
    ],
)
def test_an_open_server_answers_no_foreign_page(headers, mode):
    with pytest.raises(PermissionDeniedError, match="tokenpath keys create"):
        Authenticator(Keys(), mode=mode).authenticate(headers)


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "localhost"},
        {"host": "LOCALHOST:8000"},
        {"host": "localhost.:8000"},
        {"host": "app.localhost:8000"},
        {"host": "127.0.0.1"},
        {"host": "127.8.9.1:80"},
        {"host": "[::1]:8000"},
        {**LOCAL, "origin": "http://localhost:3000"},
        {**LOCAL, "origin": "http://[::1]:3000"},
    ],
)
def test_an_open_server_answers_this_machine(headers):
    assert Authenticator(Keys()).authenticate(headers) == ANONYMOUS


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("127.1", False),
        ("", False),
        ("localhost", True),
        ("notlocalhost", False),
    ],
)
def test_loopback_names(host, expected):
    assert is_loopback(host) is expected
