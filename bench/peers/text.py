"""The windows of text that `tokenpath bench perplexity` scores, as token ids for other engines."""

from __future__ import annotations

from pathlib import Path

from tokenpath.bench.perplexity.text import fixed_text
from tokenpath.bench.perplexity.windows import beginning, cut
from tokenpath.config.paths import cache_dir
from tokenpath.models.local import open_model
from tokenpath.models.progress import SilentProgress

_WINDOW_TOKENS = 1024
_SCORED_TOKENS = 24_000


def token_windows(model: Path) -> list[list[int]]:
    """Each part's windows, cut as the command cuts them by default."""
    tokenizer = open_model(model).tokenizer()
    parts = fixed_text(cache_dir(), SilentProgress())
    share = -(-_SCORED_TOKENS // len(parts))
    first = beginning(tokenizer)
    return [
        window
        for part in parts
        for window in cut(
            tokenizer.encode(part.text, add_special=False),
            window=_WINDOW_TOKENS,
            first=first,
            least_scored=share,
        )
    ]
