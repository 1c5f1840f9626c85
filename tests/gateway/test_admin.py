"""``/admin``: closed to whoever is not the operator, and one clear answer to each order."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import httpx
import pytest
import schemathesis
from gateway_harness import ScriptedReplica, serving
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from test_auth import Keys

from tokenpath.config.spec import Limits
from tokenpath.gateway.admin import ModelStatus
from tokenpath.gateway.auth import Authenticator
from tokenpath.gateway.openai.openapi import openapi_document
from tokenpath.protocol.errors import ConflictError, ModelNotFoundError
from tokenpath.protocol.replica import ReplicaState
from tokenpath.store.database import open_database
from tokenpath.store.keys import KeyStore

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class ScriptedOperator:
    """One model, ``toy``; notes what it was told."""

    def __init__(self) -> None:
        self.told = []
        self.state = ReplicaState.READY
        self.refusal = None
        self.gate = None

    def status(self, name):
        if name != "toy":
            raise ModelNotFoundError("Model is not served here; served: 'toy'.", param="model")
        return ModelStatus(
            name="toy",
            state=self.state,
            reason="",
            replica="toy-0",
            pid=7,
            restarts=0,
            in_flight=0,
            resident_bytes=None,
            reload=None,
        )

    def every(self):
        return [self.status("toy")]

    async def sleep(self, name, *, grace_s, keep_kv):
        self.told.append(("sleep", grace_s, keep_kv))
        if self.refusal is not None:
            raise self.refusal
        self.state = ReplicaState.ASLEEP

    async def wake(self, name):
        if self.gate is not None:
            await self.gate.wait()
        self.told.append(("wake",))
        self.state = ReplicaState.READY

    async def reload(self, name):
        self.told.append(("reload",))


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    with open_database(tmp_path_factory.mktemp("admin") / "state.db") as database:
        store = KeyStore(database)
        user = store.create("user", now=NOW).secret
        admin = store.create("admin", now=NOW, admin=True)
        assert admin.record.admin
        assert [record.admin for record in store.records()] == [False, True]
        return Keys(store.snapshot()), user, admin.secret


@pytest.fixture(scope="module")
def module_local():
    operator = ScriptedOperator()
    with serving(operator=operator, admin="local") as served:
        yield served, operator


@pytest.fixture
def local(module_local):
    served, operator = module_local
    operator.__init__()
    return served.http, operator


PATHS = [("GET", "/admin/models"), ("GET", "/admin/models/toy")]
PATHS += [("POST", f"/admin/models/toy/{verb}") for verb in ("sleep", "wake", "reload")]


def test_only_a_key_made_for_it_operates_a_server(keys):
    source, user, admin = keys
    operator = ScriptedOperator()
    with serving(operator=operator, authenticator=Authenticator(source), admin="local") as served:
        for method, path in PATHS:
            assert served.http.request(method, path).status_code == 401
            asked = served.http.request(method, path, headers={"x-api-key": user})
            assert asked.status_code == 403
            assert "create NAME --admin" in asked.json()["error"]["message"]
        assert operator.told == []
        for method, path in PATHS:
            asked = served.http.request(method, path, headers={"x-api-key": admin})
            assert asked.status_code == 200, asked.text
        assert [told[0] for told in operator.told] == ["sleep", "wake", "reload"]
        assert served.http.get("/v1/models", headers={"x-api-key": admin}).status_code == 200


def test_a_server_without_keys_is_operated_by_nobody_unless_the_spec_says_so(local):
    operator = ScriptedOperator()
    with serving(operator=operator) as served:
        for method, path in PATHS:
            refused = served.http.request(method, path)
            assert refused.status_code == 403
            assert "gateway.admin" in refused.json()["error"]["message"]
    assert operator.told == []
    http, operator = local
    for method, path in PATHS:
        assert http.request(method, path).status_code == 200
    foreign = http.post("/admin/models/toy/wake", headers={"origin": "https://evil.example"})
    assert foreign.status_code == 403


def test_without_an_operator_there_is_nothing_to_operate(server):
    assert server.http.get("/admin/models").status_code == 404


def test_orders_and_their_options(local):
    http, operator = local
    asked = http.post("/admin/models/toy/sleep", json={"grace_s": 2.5, "kv": "drop"})
    assert asked.json()["state"] == "asleep"
    http.post("/admin/models/toy/sleep")
    http.post("/admin/models/toy/wake", json={})
    assert operator.told == [("sleep", 2.5, False), ("sleep", 30.0, True), ("wake",)]
    operator.refusal = ConflictError("2 requests run, so the model was not put to sleep")
    refused = http.post("/admin/models/toy/sleep")
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "conflict"


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("toy/sleep", {"grace_s": -1}, 400, "grace_s"),
        ("toy/sleep", {"grace_s": 1e9}, 400, "grace_s"),
        ("toy/sleep", {"kv": "burn"}, 400, "kv"),
        ("toy/sleep", {"graze_s": 1}, 400, "graze_s"),
        ("toy/wake", {"grace_s": 1}, 400, "grace_s"),
        ("toy/wake", [], 400, "JSON object"),
        ("other/wake", {}, 404, "not served"),
        ("toy/burn", {}, 405, "GET"),
    ],
)
def test_a_wrong_order_is_one_sentence(local, path, body, status, words):
    http, operator = local
    refused = http.post(f"/admin/models/{path}", json=body)
    assert refused.status_code == status
    assert words in refused.json()["error"]["message"]
    assert operator.told == []


def test_an_order_goes_on_when_its_caller_leaves(local, module_local):
    served, operator = module_local

    async def make():
        operator.gate = asyncio.Event()

    served.call(make())
    with pytest.raises(httpx.ReadTimeout), httpx.Client(timeout=0.2) as leaving:
        leaving.post(f"{served.url}/admin/models/toy/wake")
    assert operator.told == []

    async def let_go():
        operator.gate.set()
        await asyncio.sleep(0.05)

    served.call(let_go())
    assert operator.told == [("wake",)]


def test_a_model_that_sleeps_for_requests_is_503_with_a_time(local):
    replica = ScriptedReplica()
    replica.state = ReplicaState.ASLEEP
    with serving(replica=replica, model={"wakes": False}) as served:
        refused = served.http.post("/v1/completions", json={"model": "toy", "prompt": "x"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "asleep"
        assert refused.headers["retry-after"] == "60"
        assert served.http.get("/ready").json()["error"]["code"] == "asleep"
        assert served.http.get("/v1/models").json()["data"][0]["state"] == "asleep"
        text = served.http.get("/metrics").text
        assert 'tokenpath_replica_state{model="toy",replica="0",state="asleep"} 1.0' in text
    with serving(replica=replica) as served:
        answer = served.http.post("/v1/completions", json={"model": "toy", "prompt": "x"})
        assert answer.status_code == 200, "a request may wake it"
        assert served.http.get("/ready").json()["models"] == {"toy": "asleep"}


document = openapi_document(Limits(), ["toy"], admin=True)
document["paths"] = {
    path: its for path, its in document["paths"].items() if path.startswith("/admin")
}
schema = schemathesis.openapi.from_dict(document)


@schema.parametrize()
@settings(max_examples=10, suppress_health_check=list(HealthCheck), deadline=None)
def test_admin_operations_keep_to_their_description(case, module_local):
    case.call_and_validate(
        base_url=module_local[0].url,
        checks=[
            not_a_server_error,
            content_type_conformance,
            response_schema_conformance,
            status_code_conformance,
        ],
    )
