"""``tokenpath models quantize``: write a model with fewer bits, and show what it cost."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from tokenpath.protocol.errors import SpecError

_MEASURED_TOKENS = 8000


class Target(enum.StrEnum):
    """Number types that a model can be written in."""

    INT8 = "int8"
    INT4 = "int4"


def quantize(
    source: Annotated[
        str,
        typer.Argument(help="A catalogue name, pypi:NAME, hf:ORG/NAME, or a path."),
    ],
    *,
    to: Annotated[
        Target,
        typer.Option(
            help="int8: a scale for each output channel. int4: a scale for each 32 weights."
        ),
    ],
    calibrate: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A UTF-8 text of what the model will read; scales are chosen by the activations "
            "that it causes.",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Where to write it. Default: NAME-int4 or -int8 here."),
    ] = None,
    symmetric: Annotated[
        bool,
        typer.Option(
            "--symmetric/--zero-points",
            help="int4 without or with a zero point for each 32 weights. int8 has none.",
        ),
    ] = False,
    measure: Annotated[
        bool,
        typer.Option(help="Measure perplexity and decode speed before and after."),
    ] = True,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Measure perplexity on this UTF-8 file instead of the fixed text; may be given "
            "several times.",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Score at least N tokens. Default: 8,000 of the fixed text, all of --text.",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=4096, metavar="N", help="Compute threads while measuring."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Write a model in int8 or int4, as a folder that other engines load too.

    The folder is a Hugging Face model in compressed-tensors' format with tokenizer and chat
    template; it appears when it is complete. Then perplexity and decode speed are measured for the
    source in bfloat16, for the source rounded as it is loaded, and for the result.
    """
    from tokenpath.bench.perplexity.text import fixed_text, given_text  # noqa: PLC0415 - for --help
    from tokenpath.cli.bench_engine import publish  # noqa: PLC0415 - as above
    from tokenpath.config.paths import cache_dir  # noqa: PLC0415 - as above
    from tokenpath.models.source import parse_source  # noqa: PLC0415 - as above

    name = parse_source(source).name
    target = Path(out) if out is not None else Path(f"{Path(name).name}-{to.value}")
    if calibrate is not None and text is not None and calibrate in text:
        raise SpecError(
            f"--calibrate and --text are both {calibrate}; a text that scales were chosen by does "
            "not show how good they are"
        )
    given = None if text is None else given_text([Path(path) for path in text])
    calibration = None if calibrate is None else given_text([Path(calibrate)], "--calibrate")[0]
    from tokenpath.bench.engine import progress  # noqa: PLC0415 - slow, so only for sound options
    from tokenpath.bench.quantize import report, run  # noqa: PLC0415 - as above

    with progress.Reporter(name) as reporter:
        plan = None
        if measure:
            plan = run.Measure(
                text=given or fixed_text(cache_dir(), reporter.pulling),
                tokens=_MEASURED_TOKENS if given is None and tokens is None else tokens,
                threads=threads,
            )
        found = run.run(
            source,
            to.value,
            target,
            symmetric=symmetric,
            calibrate=calibration,
            measure=plan,
            reporter=reporter,
        )
    publish(report.render(found), found.json(), "-" if as_json else None)
