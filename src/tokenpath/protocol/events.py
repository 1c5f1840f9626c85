"""What comes back left: ``TokenDelta``s, closed by one with a ``Finish`` or by a ``Failed``.

Per request the order is: zero or more deltas without ``finish``, then exactly one delta with it or
exactly one ``Failed``; a request that is withdrawn ends with a ``Finish`` like any other, of reason
``abort``. Either ending carries what the sequence cost until then. A token id and its logprob
travel in the delta that releases the token's text, so that a token swallowed by a stop string is
never seen by the client.
"""

from __future__ import annotations

import enum

import msgspec

from tokenpath.protocol.errors import ErrorInfo


class FinishReason(enum.StrEnum):
    """Why a sequence ended; the values are OpenAI's where it has one."""

    STOP = "stop"
    """The model's end token, a stop token or a stop string."""
    LENGTH = "length"
    """``max_tokens`` or the context's end."""
    ABORT = "abort"
    """The client or the server withdrew it."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probability of one token, and of the likeliest candidates at its place."""

    token_id: int
    logprob: float
    token: str
    """The token's own text; U+FFFD where its bytes are no whole character."""
    token_bytes: bytes
    top: list[tuple[int, float, str, bytes]] = []
    """(token id, logprob, text, bytes), likeliest first."""


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Token counts as the engine knows them. ``None`` is unknown, which is never zero."""

    prompt_tokens: int | None = None
    cached_prompt_tokens: int | None = None
    """Of the prompt's tokens, those whose KV was reused; counted once even after a preemption."""
    completion_tokens: int | None = None
    estimated: bool = False
    """True when a backend did not report and the counts are the gateway's estimate."""


class EngineStages(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds a sequence spent in the engine's stages, on the engine's own monotonic clock.

    Each is the sum of intervals with a start and an end of their own; a preempted sequence goes
    back to ``queue`` and then to ``prefill``.
    """

    queue_s: float = 0.0
    """From its arrival in the engine's process (or preemption) until its first token is scheduled;
    waiting for the step that is running is part of it."""
    prefill_s: float = 0.0
    """From being scheduled until a token is sampled."""
    kv_transfer_s: float = 0.0
    """Waiting until another replica has computed the prompt and handed its KV over: in its queue,
    in its prefill and on the way."""
    decode_s: float = 0.0
    """From the first sampled token until the end (or a preemption)."""
    preemptions: int = 0


class Finish(msgspec.Struct, frozen=True, omit_defaults=True):
    """The end of a sequence."""

    reason: FinishReason
    usage: Usage
    stages: EngineStages = EngineStages()
    matched_stop: str | int | None = None
    """The stop string or token id that ended it; None for the model's own end token."""


class TokenDelta(msgspec.Struct, frozen=True, tag="delta", omit_defaults=True):
    """New output of one sequence."""

    request_id: str
    token_ids: list[int] = []
    text: str = ""
    """Valid Unicode text; never part of a character, never a beginning of a stop string."""
    logprobs: list[TokenLogprob] | None = None
    """One per entry of ``token_ids`` when the request asked."""
    finish: Finish | None = None


class Failed(msgspec.Struct, frozen=True, tag="failed", omit_defaults=True):
    """The sequence ended with an error; its neighbours are untouched."""

    request_id: str
    error: ErrorInfo
    stages: EngineStages | None = None
    """Until the failure; None where nobody can tell any more."""
    usage: Usage | None = None
    """What was computed for it until then; None where nobody can tell any more."""


GenerationEvent = TokenDelta | Failed
