"""``tokenpath spec``: check a spec, and show what may stand in one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Check a spec, and show what may stand in it.", no_args_is_help=True, add_completion=False
)


@app.command()
def check(file: Annotated[Path, typer.Argument(help="The YAML file.")]) -> None:
    """Check a spec: exit code 0, or 2 with every error and its line."""
    from tokenpath.config.reader import load_spec  # noqa: PLC0415 - keeps --help fast

    spec = load_spec(file)
    count = len(spec.models)
    typer.echo(f"{file} is a valid spec of {count} model{'s' if count > 1 else ''}.")


@app.command()
def show(
    file: Annotated[
        Path | None, typer.Argument(help="The YAML file; without it, the shipped default.")
    ] = None,
) -> None:
    """Show a spec with every default filled in, as YAML."""
    import yaml  # noqa: PLC0415 - keeps --help fast

    from tokenpath.config.reader import default_spec, load_spec  # noqa: PLC0415

    spec = default_spec() if file is None else load_spec(file)
    data = spec.model_dump(mode="json")
    typer.echo(yaml.safe_dump(data, sort_keys=False, allow_unicode=True).rstrip())


@app.command()
def schema() -> None:
    """Print the JSON schema of a spec, for editors and other tools."""
    from tokenpath.config.spec import Spec  # noqa: PLC0415 - keeps --help fast

    typer.echo(json.dumps(Spec.model_json_schema(), indent=2))


@app.command()
def docs() -> None:
    """Print the reference page of the spec, as Markdown."""
    from tokenpath.config.reference import spec_page  # noqa: PLC0415 - keeps --help fast

    typer.echo(spec_page().rstrip())
