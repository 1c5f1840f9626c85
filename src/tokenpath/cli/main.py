"""``tokenpath``: the root of the command line.

A command's module is imported when that command runs, so that ``tokenpath --help`` and a typo
answer at once, whatever libraries the others need.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import tokenpath
from tokenpath.cli.errors import run_command


@dataclass(frozen=True, slots=True)
class _Entry:
    module: str
    attribute: str
    """A ``typer.Typer`` with commands of its own, or the function that is the command."""
    summary: str
    """The line in the list of commands; the same as the first of the command's own help."""


COMMANDS = {
    "serve": _Entry("tokenpath.cli.serve", "serve", "Serve models over an OpenAI-compatible API."),
    "chat": _Entry("tokenpath.cli.chat", "chat", "Chat with a served model in the terminal."),
    "models": _Entry(
        "tokenpath.cli.models", "app", "List, pull, show, quantize and remove models."
    ),
    "replicas": _Entry(
        "tokenpath.cli.replicas",
        "app",
        "Show a running server's models, and put them to sleep, wake and reload them.",
    ),
    "keys": _Entry("tokenpath.cli.keys", "app", "Create, list and revoke API keys."),
    "spec": _Entry("tokenpath.cli.spec", "app", "Check a spec, and show what may stand in it."),
    "bench": _Entry("tokenpath.cli.bench", "app", "Measure an endpoint, or the engine itself."),
}


class LazyGroup(TyperGroup):
    """A group whose commands are modules not yet imported."""

    _listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of ``COMMANDS``."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | TyperGroup | None:
        """Import a command; while help is being written, only its name and summary."""
        del ctx
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        if self._listing:
            return TyperCommand(cmd_name, help=entry.summary)
        return load_command(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As typer's, whose suggestions after a typo come from ``commands``."""
        if args and args[0] not in COMMANDS:
            self.commands = {name: TyperCommand(name) for name in COMMANDS}
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """As typer's, without importing any command."""
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False


def load_command(name: str) -> TyperCommand | TyperGroup:
    """Import one command of ``COMMANDS``."""
    entry = COMMANDS[name]
    found = getattr(importlib.import_module(entry.module), entry.attribute)
    sub = found if isinstance(found, typer.Typer) else _single(found)
    command: Any = typer.main.get_command(sub)
    command.name = name
    loaded: TyperCommand | TyperGroup = command
    return loaded


def _single(function: Callable[..., object]) -> typer.Typer:
    sub = typer.Typer(add_completion=False)
    sub.command()(function)
    return sub


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tokenpath {tokenpath.__version__}")
        raise typer.Exit


@app.callback()
def root(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Serve open models: gateway, router and inference engine in one.

    Start with: tokenpath serve
    """
    del version  # acted on by its callback


def run() -> None:
    """Entry point of the ``tokenpath`` script."""
    sys.exit(run_command(app))


if __name__ == "__main__":
    run()
