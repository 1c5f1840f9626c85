"""``tokenpath replicas``: operate the models of a running server."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import httpx

app = typer.Typer(
    help="Show a running server's models, and put them to sleep, wake and reload them.",
    no_args_is_help=True,
    add_completion=False,
)

_URL = "http://127.0.0.1:8000"
_KEY_VARIABLE = "TOKENPATH_API_KEY"
_CONNECT_TIMEOUT_S = 10.0
_PIPE_COLUMNS = 250

Name = Annotated[str, typer.Argument(metavar="MODEL", help="The model's name in API calls.")]
Url = Annotated[str, typer.Option(help="Where the server is.")]
KeyVariable = Annotated[
    str, typer.Option("--api-key-env", help="Environment variable that holds an admin key.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable.")]


@app.command("list")
def list_replicas(
    *, url: Url = _URL, api_key_env: KeyVariable = _KEY_VARIABLE, as_json: AsJson = False
) -> None:
    """List the served models with their state."""
    import json  # noqa: PLC0415 - keeps --help fast

    with _server(url, api_key_env) as server:
        models = _ask(server, "GET", "/admin/models")["data"]
    if as_json:
        typer.echo(json.dumps(models, indent=2))
    else:
        _print(models)


@app.command()
def sleep(
    name: Name,
    *,
    grace: Annotated[
        float,
        typer.Option(min=0, max=3600, help="Seconds to wait for running requests; 0: do not."),
    ] = 30.0,
    drop_kv: Annotated[
        bool,
        typer.Option("--drop-kv", help="Keep no KV blocks on the disk, whatever the spec says."),
    ] = False,
    url: Url = _URL,
    api_key_env: KeyVariable = _KEY_VARIABLE,
) -> None:
    """Put a model to sleep: its weights and KV pool are given back to the machine.

    A request wakes it, unless the spec's engine.when_asleep says otherwise.
    """
    order = {"grace_s": grace, "kv": "drop" if drop_kv else "keep"}
    _order(name, "sleep", order, url, api_key_env)


@app.command()
def wake(name: Name, *, url: Url = _URL, api_key_env: KeyVariable = _KEY_VARIABLE) -> None:
    """Load a sleeping model again; returns when it is ready."""
    _order(name, "wake", {}, url, api_key_env)


@app.command()
def reload(name: Name, *, url: Url = _URL, api_key_env: KeyVariable = _KEY_VARIABLE) -> None:
    """Serve the model as its files and the spec are now, without dropping a request.

    The new version is started beside the old one and takes its place when it is ready; if it
    fails, the old one serves on.
    """
    _order(name, "reload", {}, url, api_key_env)


def _order(name: str, verb: str, order: dict[str, Any], url: str, api_key_env: str) -> None:
    from urllib.parse import quote  # noqa: PLC0415 - keeps --help fast

    with _server(url, api_key_env) as server:
        model = _ask(server, "POST", f"/admin/models/{quote(name)}/{verb}", order)
    _print([model])


@contextmanager
def _server(url: str, api_key_env: str) -> Iterator[httpx.Client]:
    import httpx  # noqa: PLC0415 - keeps --help fast

    from tokenpath.protocol.errors import UnavailableError  # noqa: PLC0415

    key = os.environ.get(api_key_env, "")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    # No limit on reading: an answer comes when the order has been carried out.
    timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
    try:
        with httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=timeout) as server:
            yield server
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise UnavailableError(
            f"nothing answers at {url} ({error}); name the server with --url"
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UnavailableError(f"the connection to {url} broke: {error}") from error


def _ask(
    server: httpx.Client, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    from tokenpath.protocol.errors import (  # noqa: PLC0415 - keeps --help fast
        ErrorInfo,
        UnavailableError,
        from_info,
    )

    answer = server.request(method, path, json=body)
    try:
        told = answer.json()
        if answer.is_success:
            return dict(told)
        error = told["error"]
        raise from_info(ErrorInfo(code=str(error["code"]), message=str(error["message"])))
    except (ValueError, KeyError, TypeError) as error:
        raise UnavailableError(
            f"{server.base_url} answered {path} with status {answer.status_code} and nothing that "
            "a tokenpath server says"
        ) from error


def _print(models: list[dict[str, Any]]) -> None:
    from rich import box  # noqa: PLC0415 - keeps --help fast
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from tokenpath.models.sizes import human_bytes  # noqa: PLC0415

    table = Table("MODEL", "STATE", "REPLICA", "PID", "MEMORY", "IN FLIGHT", "RELOAD", "WHY",
                  box=box.SIMPLE)  # fmt: skip
    for model in models:
        resident, reload = model["resident_bytes"], model["reload"] or {}
        table.add_row(
            model["name"],
            model["state"],
            model["replica"],
            str(model["pid"] or ""),
            "" if resident is None else human_bytes(resident),
            str(model["in_flight"]),
            reload.get("state", ""),
            model["reason"] or reload.get("reason", ""),
        )
    width = None if sys.stdout.isatty() else _PIPE_COLUMNS
    Console(width=width, markup=False).print(table)
