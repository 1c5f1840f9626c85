"""``tokenpath bench perplexity`` without its options: text to windows to scores."""

from __future__ import annotations

import datetime as dt
import itertools
import time
from collections.abc import Callable, Sequence

from tokenpath.bench.engine.loaded import PACKAGES, load, open_source, pool_tokens
from tokenpath.bench.engine.progress import Reporter
from tokenpath.bench.machine import machine, versions
from tokenpath.bench.perplexity.report import FORMAT, PerplexityReport, fingerprint, summarize
from tokenpath.bench.perplexity.score import Scorer, ScoringRunner
from tokenpath.bench.perplexity.text import Part
from tokenpath.bench.perplexity.windows import beginning, check_window, cut
from tokenpath.config.spec import EngineSettings
from tokenpath.engine.runner import ModelRunner
from tokenpath.models.source import parse_source
from tokenpath.models.tokenizer import Tokenizer
from tokenpath.protocol.errors import SpecError


def run(
    source: str,
    settings: EngineSettings,
    read_text: Callable[[], Sequence[Part]],
    *,
    window: int,
    tokens: int | None,
    reporter: Reporter,
) -> PerplexityReport:
    """Score about ``tokens`` tokens, an equal share of each part; None: all of the text.

    Raises ``ModelError`` and ``SpecError`` as loading does, ``SpecError`` for a window that does
    not fit or a text without tokens, ``EngineError`` if the engine fails.
    """
    local, name = open_source(source, reporter.pulling), parse_source(source).name
    held = min(local.config.max_context_tokens, pool_tokens(local, settings))
    check_window(window, model=name, model_tokens=held)
    tokenizer = local.tokenizer()
    windows = {
        part.name: found
        for part, found in _windows(read_text(), tokenizer, window=window, tokens=tokens)
    }
    runners: list[ScoringRunner] = []

    def around(runner: ModelRunner) -> ScoringRunner:
        runners.append(ScoringRunner(runner))
        return runners[0]

    loaded = load(local, settings, name=name, around=around, progress=reporter.loading)
    scorer = Scorer(loaded.core, runners[0])
    started = time.perf_counter()
    scores: dict[str, list[list[float]]] = {}
    for part, found in windows.items():
        scores[part] = []
        for number, one in enumerate(found, 1):
            reporter.say(f"scoring {part}: window {number} of {len(found)}")
            scores[part].append(scorer.score(one))
    whole = summarize(list(itertools.chain.from_iterable(scores.values())))
    return PerplexityReport(
        perplexity=whole.perplexity,
        nll=whole.nll,
        tokens=whole.tokens,
        windows=whole.windows,
        parts={part: summarize(found) for part, found in scores.items()},
        window_tokens=window,
        first_token_ids=beginning(tokenizer),
        token_ids_sha256=fingerprint(itertools.chain.from_iterable(windows.values())),
        seconds=time.perf_counter() - started,
        format=FORMAT,
        date=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        measured=loaded.subject(),
        machine=machine(),
        versions=versions(PACKAGES),
    )


def _windows(
    parts: Sequence[Part], tokenizer: Tokenizer, *, window: int, tokens: int | None
) -> list[tuple[Part, list[list[int]]]]:
    """Each part's windows. Raises ``SpecError`` for a part with nothing to score."""
    share = None if tokens is None else -(-tokens // len(parts))
    first = beginning(tokenizer)
    found = []
    for part in parts:
        ids = tokenizer.encode(part.text, add_special=False)
        windows = list(cut(ids, window=window, first=first, least_scored=share))
        if not windows:
            raise SpecError(f"the text {part.name} has {len(ids)} tokens, too few to score any")
        found.append((part, windows))
    return found
