"""``tokenpath keys``: who may ask this machine's server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tokenpath.store.keys import KeyStore

app = typer.Typer(
    help="Create, list and revoke API keys.", no_args_is_help=True, add_completion=False
)


_PIPE_COLUMNS = 250


@contextmanager
def _store() -> Iterator[KeyStore]:
    from tokenpath.config.paths import state_file  # noqa: PLC0415 - keeps --help fast
    from tokenpath.store.database import open_database  # noqa: PLC0415
    from tokenpath.store.keys import KeyStore  # noqa: PLC0415

    with open_database(state_file()) as database:
        yield KeyStore(database)


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="Who or what will use the key; need not be unique.")],
    *,
    admin: Annotated[
        bool,
        typer.Option("--admin", help="The key may also operate the server: tokenpath replicas."),
    ] = False,
) -> None:
    """Create a key and show it, this once.

    The key goes to stdout and the words around it to stderr, so KEY=$(tokenpath keys create ME)
    works. A running server accepts it within a second; from the first key on it requires one.
    """
    with _store() as store:
        first = not store.snapshot().ever_created
        new = store.create(name, now=datetime.now(UTC), admin=admin)
    typer.echo(new.secret)
    typer.echo(
        f"Key {new.record.key_id} ({name}). Keep it now: it is stored hashed and cannot be shown "
        "again.",
        err=True,
    )
    if first:
        typer.echo("It is the first key: from now on every request needs one.", err=True)


@app.command("list")
def list_keys() -> None:
    """List every key ever created, revoked ones too."""
    from rich import box  # noqa: PLC0415 - keeps --help fast
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    with _store() as store:
        records = store.records()
    if not records:
        typer.echo("No API key was ever created; `tokenpath keys create NAME` makes one.", err=True)
        return
    table = Table("ID", "Name", "Begins with", "Role", "Created", "Last used", "Revoked",
                  box=box.SIMPLE)  # fmt: skip
    for record in records:
        table.add_row(
            str(record.key_id),
            record.name,
            f"{record.prefix}…",
            "admin" if record.admin else "user",
            _moment(record.created_at),
            _moment(record.last_used_at),
            _moment(record.revoked_at),
            style="dim" if record.revoked_at else "",
        )
    # Cutting columns to 80 would spoil what a pipe is for.
    width = None if sys.stdout.isatty() else _PIPE_COLUMNS
    Console(width=width, markup=False).print(table)


@app.command()
def revoke(
    which: Annotated[
        str, typer.Argument(metavar="ID|PREFIX", help="The key's id, its beginning, or all of it.")
    ],
) -> None:
    """Revoke a key; a running server refuses it within a second.

    Revoking the last key does not open the server again: it then refuses everybody.
    """
    with _store() as store:
        record = store.revoke(which, now=datetime.now(UTC))
        left = sum(r.revoked_at is None for r in store.records())
    typer.echo(f"Key {record.key_id} ({record.name}, {record.prefix}…) is revoked.", err=True)
    if not left:
        typer.echo(
            "No valid key is left, so nobody can use the server; "
            "`tokenpath keys create NAME` makes a new one.",
            err=True,
        )


def _moment(moment: datetime | None) -> str:
    return "–" if moment is None else moment.astimezone().strftime("%Y-%m-%d %H:%M")  # noqa: RUF001 - an en dash
