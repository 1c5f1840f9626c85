"""``tokenpath bench retrieval``: measure an embedding model, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokenpath.cli.bench_engine import JSON, MODEL, THREADS, check_writable, publish


def retrieval(
    model: MODEL = "all-minilm-l6-v2",
    threads: THREADS = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Cut the task out of this UTF-8 file instead of the fixed text; may be given "
            "several times.",
        ),
    ] = None,
    passages: Annotated[
        int, typer.Option(min=2, metavar="N", help="Passages of the task, at most.")
    ] = 400,
    step_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens of a step. Default: the spec's."),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Embed everything N times; speeds are medians.")
    ] = 3,
    json: JSON = None,
) -> None:
    """Measure an embedding model in float32 and bfloat16: what it finds, and how fast.

    The text that `bench perplexity` has, half prose, half code, is cut into passages of 96 words; a
    question is 12 words out of a passage's middle, which the passage then lacks. Reported are how
    often a question finds its passage, how much of float32's ranking stays, and tokens/s.
    """
    check_writable(json)
    from tokenpath.bench.engine import progress  # noqa: PLC0415 - keeps --help fast
    from tokenpath.bench.perplexity import text as texts  # noqa: PLC0415 - as above
    from tokenpath.bench.retrieval import report, run  # noqa: PLC0415 - as above
    from tokenpath.config.paths import cache_dir  # noqa: PLC0415 - as above
    from tokenpath.config.spec import EngineSettings  # noqa: PLC0415 - as above

    given = None if text is None else texts.given_text([Path(path) for path in text])
    plain = EngineSettings()
    settings = plain.model_copy(
        update={
            "task": "embed",
            "threads": threads,
            "max_step_tokens": step_tokens or plain.max_step_tokens,
        }
    )
    with progress.Reporter(model) as reporter:
        found = run.run(
            model,
            settings,
            lambda: texts.fixed_text(cache_dir(), reporter.pulling) if given is None else given,
            passages=passages,
            rounds=rounds,
            reporter=reporter,
        )
    publish(report.render(found), found.json(), json)
