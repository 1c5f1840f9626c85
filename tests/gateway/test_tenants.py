"""What an API key's name means at the front door: a share of the queue, and series of metrics."""

from __future__ import annotations

import json
import time

from gateway_harness import Script, serving

from tokenpath.gateway.auth import Identity
from tokenpath.protocol.errors import AuthenticationError

BODY = {"model": "toy", "prompt": "x"}


class Keys:
    """Anybody's key is their name; ``rotated`` is a second key of ann's."""

    def authenticate(self, headers):
        secret = headers.get("authorization", "").removeprefix("Bearer ")
        if not secret:
            raise AuthenticationError("A valid key is required.")
        return Identity(key_id=secret, name="ann" if secret == "rotated" else secret)


def post(server, name, **changes):
    key = {"authorization": f"Bearer {name}"}
    return server.http.post("/v1/completions", json=BODY | changes, headers=key)


def test_one_key_cannot_fill_the_queue_and_only_its_calls_are_refused():
    limits = {"queued_requests": 4, "tenant_queue_share": 0.5}
    with serving(authenticator=Keys(), limits=limits, max_running=1) as server:
        server.replica.script = Script(hold_first=True)
        connections = []
        for secret in ("ann", "rotated", "ann"):  # one runs, two wait: all that a key may have
            connection = server.connect()
            data = json.dumps(BODY).encode()
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Authorization: Bearer " + secret.encode() + b"\r\n"
                b"Content-Length: " + str(len(data)).encode() + b"\r\n\r\n" + data
            )
            connections.append(connection)
        while server.replica.open < 3:
            time.sleep(0.005)
        refused = post(server, "ann")
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "overloaded"
        assert "This API key's part of the queue is full" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        server.replica.script = Script()
        assert post(server, "bob").status_code == 200
        for connection in connections:
            connection.close()
        server.settle()
        assert post(server, "ann").status_code == 200
        assert [r.tenant for r in server.replica.requests] == ["ann"] * 3 + ["bob", "ann"]
        assert len({r.cache_salt for r in server.replica.requests}) == 3, "keys share no prefixes"


def test_an_open_server_has_no_tenants_and_no_share():
    limits = {"queued_requests": 4, "tenant_queue_share": 0.01}
    with serving(limits=limits, max_running=1) as server:
        assert server.http.post("/v1/completions", json=BODY | {"n": 4}).status_code == 200
        assert {request.tenant for request in server.replica.requests} == {""}
        assert "tokenpath_tenant_" not in server.http.get("/metrics").text


def test_only_the_tenants_that_the_spec_names_have_series():
    with serving(authenticator=Keys(), metrics_tenants=["ann"]) as server:
        post(server, "rotated")
        post(server, "bob")
        post(server, "cid", prompt="xy")
        server.settle()
        shown = server.http.get("/metrics").text
        assert 'tokenpath_tenant_requests_total{outcome="ok",tenant="ann"} 1.0' in shown
        assert 'tokenpath_tenant_requests_total{outcome="ok",tenant=""} 2.0' in shown
        assert 'tokenpath_tenant_tokens_total{kind="prompt",tenant="ann"} 2.0' in shown
        assert 'tokenpath_tenant_tokens_total{kind="prompt",tenant=""} 5.0' in shown
        assert 'tokenpath_tenant_tokens_total{kind="output",tenant="ann"} 4.0' in shown
        assert "bob" not in shown
