"""The rehearsal before a model says ready: a prompt, some tokens, and an output with a schema.

The first use of anything costs more than the second: libraries are imported, buffers are touched
for the first time, threads are started, a vocabulary is prepared for grammars. A rehearsal pays for
it before anybody waits. It runs through a core of its own, which is then forgotten.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from tokenpath.protocol.errors import EngineError, TokenpathError
from tokenpath.protocol.events import Failed
from tokenpath.protocol.grammar import Grammar
from tokenpath.protocol.pooling import PoolingInput, PoolingRequest
from tokenpath.protocol.request import GenerationRequest, SamplingParams, TokenPrompt

if TYPE_CHECKING:
    from tokenpath.engine.core import EngineCore
    from tokenpath.engine.pooling.core import PoolingCore

PROMPT_TOKENS: Final = 64
"""Enough rows for the kernels that prompts use, little enough for a quarter of a second."""
OUTPUT_TOKENS: Final = 3
"""One from the prompt, and two steps of decoding."""

Progress = Callable[[str, float], None]
log = logging.getLogger("tokenpath.engine")


def rehearse(core: EngineCore, progress: Progress | None = None) -> None:
    """Let a core without requests generate a little, with and without a schema.

    Raises ``EngineError`` if it cannot: a model that fails here would fail its first request. A
    grammar that cannot be compiled is a warning, since most requests have none.
    """
    room = core.card.max_context_tokens - OUTPUT_TOKENS
    if room < 1:
        return
    _tell(progress, 0.0)
    prompt = [place % core.card.vocab_size for place in range(min(PROMPT_TOKENS, room))]
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, seed=0)
    _run(core, _generation(core, "plain", prompt, params))
    _tell(progress, 0.5)
    if core.grammars is not None:
        held = SamplingParams(max_tokens=OUTPUT_TOKENS, seed=0, grammar=Grammar.json_object())
        try:
            _run(core, _generation(core, "held", prompt[:1], held))
        except TokenpathError as error:
            log.warning("the first schema was not rehearsed: %s", error.message)
    _tell(progress, 1.0)


def rehearse_pooling(core: PoolingCore, progress: Progress | None = None) -> None:
    """Let a pooling core without requests read one input. Raises ``EngineError``."""
    _tell(progress, 0.0)
    length = min(PROMPT_TOKENS, core.card.max_context_tokens)
    ids = [place % core.card.vocab_size for place in range(length)]
    request = PoolingRequest(
        request_id="rehearsal", model=core.card.name, inputs=[PoolingInput(ids)]
    )
    _run(core, request)
    _tell(progress, 1.0)


def _generation(
    core: EngineCore, name: str, prompt: list[int], params: SamplingParams
) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"rehearsal-{name}",
        model=core.card.name,
        prompt=TokenPrompt(prompt),
        sampling=params,
    )


def _run(core: EngineCore | PoolingCore, request: GenerationRequest | PoolingRequest) -> None:
    core.submit(request)
    while core.has_work():
        for event in core.step():
            if isinstance(event, Failed):
                raise EngineError(f"the model failed its warm-up: {event.error.message}")


def _tell(progress: Progress | None, fraction: float) -> None:
    if progress is not None:
        progress("warming up", fraction)
