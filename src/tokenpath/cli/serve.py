"""``tokenpath serve``: the spec and the flags that override it. ``start`` does the rest."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tokenpath.config.spec import Spec


class Auth(enum.StrEnum):
    """The spec's ``gateway.auth``."""

    KEYS = "keys"
    NONE = "none"


class LogFormat(enum.StrEnum):
    """The spec's ``logging.format``."""

    TEXT = "text"
    JSON = "json"


def serve(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="SPEC", help="The spec, a YAML file; without it, the shipped one."),
    ] = None,
    *,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Serve this instead of the spec's model: a catalogue name, pypi:NAME, hf:ORG/NAME "
            "or a path.",
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on, instead of the spec's.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port to listen on, instead of the spec's; 0: any."),
    ] = None,
    auth: Annotated[
        Auth | None,
        typer.Option(help="Whether API keys are required, instead of what the spec says."),
    ] = None,
    log_format: Annotated[
        LogFormat | None, typer.Option(help="Form of the log, instead of the spec's.")
    ] = None,
) -> None:
    """Serve models over an OpenAI-compatible API.

    Without a spec it serves Qwen2.5-Coder-1.5B if that fits in memory, else Gemma 3 270M. Ctrl-C
    finishes what is running; a second Ctrl-C ends at once.
    """
    from tokenpath.config.reader import default_spec, load_spec  # noqa: PLC0415 - fast --help

    def read() -> Spec:
        spec = default_spec() if file is None else load_spec(file)
        return with_flags(spec, model=model, host=host, port=port, auth=auth, log_format=log_format)

    spec = read()
    from tokenpath.cli.start import start  # noqa: PLC0415 - slow, so only for a sound spec

    code = start(spec, read_again=read)
    if code:
        raise typer.Exit(code)


def with_flags(
    spec: Spec,
    *,
    model: str | None = None,
    host: str | None = None,
    port: int | None = None,
    auth: str | None = None,
    log_format: str | None = None,
) -> Spec:
    """The spec with the flags that were given in place of its own values.

    Raises ``SpecError`` if ``model`` is given for a spec of several models.
    """
    from tokenpath.protocol.errors import SpecError  # noqa: PLC0415 - keeps --help fast

    changes: dict[str, Any] = {}
    if model is not None:
        if len(spec.models) > 1:
            raise SpecError(
                f"--model replaces the spec's only model, but this spec has {len(spec.models)}; "
                "leave the flag out or change the spec"
            )
        changes["models"] = [spec.models[0].model_copy(update={"source": model})]
    door = {"host": host, "port": port, "auth": None if auth is None else str(auth)}
    given = {name: value for name, value in door.items() if value is not None}
    changes["gateway"] = spec.gateway.model_copy(update=given)
    if log_format is not None:
        changes["logging"] = spec.logging.model_copy(update={"format": str(log_format)})
    return spec.model_copy(update=changes)
