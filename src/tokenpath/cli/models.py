"""``tokenpath models``: what can be served, and what of it is on this disk."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenpath.cli.quantize import quantize

if TYPE_CHECKING:
    from rich.table import Table

    from tokenpath.models.catalogue import Entry
    from tokenpath.models.library import Library
    from tokenpath.models.show import Description, EncoderDescription
    from tokenpath.models.source import Source

app = typer.Typer(
    help="List, pull, show, quantize and remove models.",
    no_args_is_help=True,
    add_completion=False,
)
app.command()(quantize)

_SOURCE_HELP = "A catalogue name, pypi:NAME[==VERSION] or hf:ORG/NAME[@REV][:FILE]."
_PIPE_COLUMNS = 250


class _From(enum.StrEnum):
    """Origins that a catalogue model may have."""

    PYPI = "pypi"
    HF = "hf"


@app.command("list")
def list_models(
    *, as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False
) -> None:
    """List the catalogue and every model that was pulled."""
    from tokenpath.models.sizes import human_bytes  # noqa: PLC0415 - keeps --help fast

    rows = list(_rows(_library()))
    if as_json:
        _print_json(rows)
        return
    table = _table("NAME", "STATE", "SIZE", "KIND", "LICENCE", "DESCRIPTION")
    for row in rows:
        table.add_row(
            row["name"],
            row["state"],
            human_bytes(row["bytes"]),
            row["kind"] or "",
            row["licence"] or "",
            row["description"] or f"from {row['origin']}",
        )
    _print(table)


@app.command()
def pull(
    source: Annotated[str, typer.Argument(help=_SOURCE_HELP)],
    *,
    origin: Annotated[
        _From | None, typer.Option("--from", help="Only this origin of a catalogue model.")
    ] = None,
) -> None:
    """Download a model, or go on with a download that broke off; checks its hash.

    Prints the path of the finished model.
    """
    from tokenpath.config.paths import models_dir  # noqa: PLC0415 - keeps --help fast
    from tokenpath.models.progress_terminal import terminal_progress  # noqa: PLC0415
    from tokenpath.models.pull import pull_model  # noqa: PLC0415
    from tokenpath.models.source import (  # noqa: PLC0415
        CatalogueSource,
        PathSource,
        existing,
        parse_source,
    )
    from tokenpath.protocol.errors import ModelError  # noqa: PLC0415

    parsed = parse_source(source)
    if origin is not None and not isinstance(parsed, CatalogueSource):
        raise ModelError(f"--from chooses among a catalogue model's origins; {source} has only one")
    if isinstance(parsed, PathSource):
        typer.echo(f"{existing(parsed)} is on this machine; it is used where it lies", err=True)
        return
    model = pull_model(
        parsed,
        models_dir=models_dir(),
        progress=terminal_progress(),
        origin=None if origin is None else origin.value,
    )
    typer.echo(model.path)


@app.command()
def show(
    source: Annotated[str, typer.Argument(help=f"{_SOURCE_HELP} Or a path.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Show a model's architecture, its quantization and the memory it needs."""
    import msgspec  # noqa: PLC0415 - keeps --help fast

    from tokenpath.models.source import CatalogueSource, parse_source  # noqa: PLC0415
    from tokenpath.protocol.errors import ModelError  # noqa: PLC0415

    parsed = parse_source(source)
    found = _describe(parsed)
    if found is not None:
        if as_json:
            _print_json(msgspec.to_builtins(found))
        else:
            _print_description(found)
        return
    if not isinstance(parsed, CatalogueSource):
        raise ModelError(f"{parsed.text} is not pulled; run `tokenpath models pull {parsed.text}`")
    facts = {"pulled": False, **parsed.entry.model_dump(exclude={"sources"})}
    facts["origins"] = [origin.text for origin in parsed.entry.sources]
    if as_json:
        _print_json(facts)
    else:
        _print_facts(parsed.entry)


@app.command()
def rm(
    source: Annotated[str, typer.Argument(help=_SOURCE_HELP)],
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a pulled model with its packed weights, or what an unfinished pull left of one."""
    from tokenpath.engine.packed_cache import PackedCache  # noqa: PLC0415 - keeps --help fast
    from tokenpath.models.sizes import human_bytes  # noqa: PLC0415 - keeps --help fast
    from tokenpath.models.source import PathSource, parse_source  # noqa: PLC0415
    from tokenpath.protocol.errors import ModelError  # noqa: PLC0415

    parsed = parse_source(source)
    if isinstance(parsed, PathSource):
        raise ModelError(f"{parsed.path} was not pulled by tokenpath; delete it yourself")
    library = _library()
    pulled = next((m for m in library.models() if m.manifest.source == parsed.text), None)
    held = library.partial_bytes(parsed) + (pulled.bytes if pulled else 0)
    if not held:
        raise ModelError(f"{parsed.text} is not pulled")
    cache = PackedCache.usual() if pulled else None
    packed = 0
    if cache is not None and pulled is not None:
        packed = sum(path.stat().st_size for path in cache.of(pulled.folder))
    if not yes:
        of_them = f", {human_bytes(packed)} of them packed weights" if packed else ""
        typer.confirm(f"Delete {parsed.text} ({human_bytes(held + packed)}{of_them})?", abort=True)
    freed = library.remove(parsed)
    if cache is not None and pulled is not None:
        freed += cache.remove(pulled.folder)
    typer.echo(f"{parsed.text} is deleted; {human_bytes(freed)} are free again", err=True)


def _library() -> Library:
    from tokenpath.config.paths import models_dir  # noqa: PLC0415 - keeps --help fast
    from tokenpath.models.library import Library  # noqa: PLC0415

    return Library(models_dir())


def _rows(library: Library) -> Iterable[dict[str, Any]]:
    """The catalogue in its order, then what else was pulled."""
    from tokenpath.models import catalogue  # noqa: PLC0415 - keeps --help fast
    from tokenpath.models.source import CatalogueSource  # noqa: PLC0415

    pulled = {model.manifest.source: model for model in library.models()}
    for entry in catalogue.entries():
        model = pulled.pop(entry.name, None)
        partial = library.partial_bytes(CatalogueSource(entry))
        yield {
            "name": entry.name,
            "state": "pulled" if model else "partly pulled" if partial else "not pulled",
            "bytes": model.bytes if model else entry.bytes,
            "kind": entry.kind,
            "licence": entry.licence,
            "description": entry.description,
            "origin": model.manifest.origin if model else None,
            "path": str(model.path) if model else None,
        }
    for name, model in pulled.items():
        yield {
            "name": name,
            "state": "pulled",
            "bytes": model.bytes,
            "kind": None,
            "licence": None,
            "description": None,
            "origin": model.manifest.origin,
            "path": str(model.path),
        }


def _describe(source: Source) -> Description | EncoderDescription | None:
    """None if the model is not on this disk."""
    from tokenpath.models.encoder_model import EncoderModel  # noqa: PLC0415 - keeps --help fast
    from tokenpath.models.servable import open_servable  # noqa: PLC0415
    from tokenpath.models.show import describe, describe_encoder  # noqa: PLC0415
    from tokenpath.models.source import PathSource, existing  # noqa: PLC0415

    if isinstance(source, PathSource):
        model = open_servable(existing(source))
    else:
        pulled = _library().find(source)
        if pulled is None:
            return None
        model = open_servable(pulled.path, name=source.name)
    return describe_encoder(model) if isinstance(model, EncoderModel) else describe(model)


def _print_description(found: Description | EncoderDescription) -> None:
    from tokenpath.models.show import Description  # noqa: PLC0415 - keeps --help fast
    from tokenpath.models.sizes import human_bytes  # noqa: PLC0415

    _print(_two_columns(_facts(found)))
    if not isinstance(found, Description):
        return
    table = _table("TENSORS", "COUNT", "PARAMETERS", "STORED", "TYPES")
    for group in found.groups:
        several = len(group.types) > 1
        table.add_row(
            group.kind,
            f"{group.tensors:,}",
            f"{group.parameters:,}",
            human_bytes(group.stored_bytes),
            ", ".join(
                f"{kind} ({human_bytes(size)})" if several else kind
                for kind, size in group.types.items()
            ),
        )
    _print(table)
    table = _table("MEMORY", *found.weight_bytes)
    table.add_row("weights", *map(human_bytes, found.weight_bytes.values()))
    kv = found.kv_bytes_per_1000_tokens
    held = (human_bytes(kv[dtype]) if dtype in kv else "-" for dtype in found.weight_bytes)
    table.add_row("KV cache per 1,000 tokens", *held)
    _print(table)


def _facts(found: Description | EncoderDescription) -> list[tuple[str, str]]:
    from tokenpath.models.show import Description  # noqa: PLC0415 - keeps --help fast
    from tokenpath.models.sizes import human_bytes  # noqa: PLC0415

    facts = [
        ("name", found.name),
        ("path", found.path),
        ("architecture", found.architecture),
        ("parameters", f"{found.parameters:,}"),
        ("stored", human_bytes(found.stored_bytes)),
    ]
    if not isinstance(found, Description):
        memory = ", ".join(f"{human_bytes(b)} in {d}" for d, b in found.weight_bytes.items())
        return [
            *facts,
            ("task", found.task),
            *([("labels", ", ".join(found.labels))] if found.labels else []),
            ("layers", f"{found.layers}"),
            ("heads", f"{found.heads}"),
            ("dimensions", f"{found.dimensions}"),
            ("vocabulary", f"{found.vocab_size:,}"),
            ("context", f"{found.max_context_tokens:,} tokens"),
            ("types", ", ".join(found.types)),
            ("memory", memory),
        ]
    window = f", {found.sliding_layers} of them see {found.sliding_window} tokens back"
    return [
        *facts,
        ("format", found.format),
        ("family", found.family),
        ("layers", f"{found.layers}{window if found.sliding_layers else ''}"),
        ("heads", f"{found.heads} query, {found.kv_heads} key-value, of {found.head_dim}"),
        ("sizes", f"hidden {found.hidden_size:,}, feed-forward {found.intermediate_size:,}"),
        ("vocabulary", f"{found.vocab_size:,}{', head tied' if found.tied_embeddings else ''}"),
        ("context", f"{found.max_context_tokens:,} tokens"),
        ("chat template", "yes" if found.chat_template else "no: a base model"),
    ]


def _print_facts(entry: Entry) -> None:
    """What the catalogue knows of a model that is not here."""
    from tokenpath.models.sizes import human_bytes  # noqa: PLC0415 - keeps --help fast

    facts = [
        ("name", entry.name),
        ("description", entry.description),
        ("licence", entry.licence),
        ("kind", entry.kind),
        ("parameters", f"{entry.parameters:,}"),
        ("size", human_bytes(entry.bytes)),
        ("weights in bfloat16", human_bytes(entry.bfloat16_bytes)),
        *(("origin", origin.text) for origin in entry.sources),
    ]
    _print(_two_columns(facts))
    typer.echo(f"Not pulled; to pull it: tokenpath models pull {entry.name}")


def _table(*columns: str) -> Table:
    from rich import box  # noqa: PLC0415 - keeps --help fast
    from rich.table import Table  # noqa: PLC0415

    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)


def _two_columns(facts: Iterable[tuple[str, str]]) -> Table:
    from rich.table import Table  # noqa: PLC0415 - keeps --help fast

    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in facts:
        table.add_row(name, value)
    return table


def _print(table: Table) -> None:
    from rich.console import Console  # noqa: PLC0415 - keeps --help fast

    # Into a pipe nothing should be wrapped to the width of a terminal that is not there.
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_COLUMNS)
    console.print(table, highlight=False, markup=False)


def _print_json(value: object) -> None:
    import msgspec  # noqa: PLC0415 - keeps --help fast

    typer.echo(msgspec.json.format(msgspec.json.encode(value)).decode())
