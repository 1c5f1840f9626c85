"""What goes right along the path: one ``GenerationRequest``, whatever the front door or backend."""

from __future__ import annotations

import msgspec

from tokenpath.protocol.grammar import Grammar
from tokenpath.protocol.handover import PrefillPeer

GREEDY_TEMPERATURE = 0.0


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to turn logits into tokens, for one sequence. Validated by the front door, not here."""

    max_tokens: int
    """Most tokens to generate; at least 1."""
    min_tokens: int = 0
    """Until this many are generated, end-of-sequence and stop token ids cannot be sampled."""
    temperature: float = 1.0
    """0 is greedy: the highest logit, the lowest id on a tie."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; in (0, 1]."""
    top_k: int = 0
    """Keep the k likeliest; 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens below this fraction of the likeliest token's probability."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already generated."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per time it was generated."""
    repetition_penalty: float = 1.0
    """Divides positive, multiplies negative logits of tokens in the prompt or the output."""
    seed: int | None = None
    """With a seed, output depends on the request alone; without, the engine draws one."""
    logit_bias: dict[int, float] = {}
    """Added to these token ids' logits, before everything else."""
    stop: tuple[str, ...] = ()
    """Generation ends before the first of these strings; it is not part of the text."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends at the first of these; its text is not part of the output."""
    shown_token_ids: tuple[int, ...] = ()
    """Control tokens whose text is part of the output all the same: the marks of tool calls and
    reasoning, which the gateway reads."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""
    logprobs: int | None = None
    """None: no logprobs. k >= 0: the chosen token's, and the k likeliest, before penalties
    and temperature are applied."""
    grammar: Grammar | None = None
    """What the output must be; it ends where the grammar does. Not together with ``ignore_eos``."""


class TokenPrompt(msgspec.Struct, frozen=True, tag="tokens"):
    """A prompt as token ids, rendered and tokenized once by the gateway for the chosen model."""

    token_ids: list[int]


Prompt = TokenPrompt
"""A tagged union with one member so far; audio and images will be further ones."""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate. ``n`` choices of one API call are ``n`` of these."""

    request_id: str
    """Unique among the live requests of a replica."""
    model: str
    prompt: Prompt
    sampling: SamplingParams
    priority: int = 0
    """Lower runs earlier; equal priorities run in order of arrival."""
    cache_salt: str = ""
    """Part of the prefix-cache key: sequences with different salts never share blocks."""
    adapter: str | None = None
    """Name of the LoRA adapter; part of the prefix-cache key."""
    tenant: str = ""
    """On whose behalf: the API key's name; empty for anybody's."""
    prefill_at: PrefillPeer | None = None
    """A replica that may compute the prompt for the one that this is sent to."""
    timeout_s: float | None = None
    """Seconds left to the request when it was sent; a duration, since clocks differ."""
