"""Checks of a request that protect the engine, whoever sent it.

The front door validates the API's own limits and spelling; these are the bounds outside of which
sampling has no meaning. The offline engine has no front door.
"""

from __future__ import annotations

import math

from tokenpath.protocol.errors import InvalidRequestError, UnsupportedError
from tokenpath.protocol.request import GenerationRequest, SamplingParams


def check_request(request: GenerationRequest, vocab_size: int) -> None:
    """Raise ``InvalidRequestError`` (or ``UnsupportedError``) naming the field at fault."""
    if request.adapter is not None:
        raise UnsupportedError("this engine serves no adapters", param="adapter")
    prompt = request.prompt.token_ids
    if not prompt:
        raise InvalidRequestError("the prompt is empty; it needs at least one token")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise InvalidRequestError(
            f"the prompt has a token id outside of the vocabulary (0 to {vocab_size - 1})"
        )
    if request.timeout_s is not None and not request.timeout_s > 0:
        _reject("timeout_s", request.timeout_s, "above 0")
    check_sampling(request.sampling, vocab_size)


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raise ``InvalidRequestError`` for the first parameter out of its range."""
    if params.max_tokens < 1:
        _reject("max_tokens", params.max_tokens, "at least 1")
    if params.min_tokens < 0:
        _reject("min_tokens", params.min_tokens, "at least 0")
    if not 0 <= params.temperature < math.inf:
        _reject("temperature", params.temperature, "at least 0 and finite")
    if not 0 < params.top_p <= 1:
        _reject("top_p", params.top_p, "above 0 and at most 1")
    if params.top_k < 0:
        _reject("top_k", params.top_k, "at least 0 (0 keeps all tokens)")
    if not 0 <= params.min_p <= 1:
        _reject("min_p", params.min_p, "from 0 to 1")
    if not math.isfinite(params.presence_penalty):
        _reject("presence_penalty", params.presence_penalty, "finite")
    if not math.isfinite(params.frequency_penalty):
        _reject("frequency_penalty", params.frequency_penalty, "finite")
    if not 0 < params.repetition_penalty < math.inf:
        _reject("repetition_penalty", params.repetition_penalty, "above 0 and finite")
    if params.grammar is not None and params.ignore_eos:
        raise InvalidRequestError(
            f"ignore_eos cannot be combined with {params.grammar.field}: the output ends where the "
            "grammar does",
            param="ignore_eos",
        )
    if params.logprobs is not None and params.logprobs < 0:
        _reject("logprobs", params.logprobs, "at least 0")
    for token_id, bias in params.logit_bias.items():
        if not 0 <= token_id < vocab_size:
            _reject("logit_bias", token_id, f"about token ids from 0 to {vocab_size - 1}")
        if not math.isfinite(bias):
            _reject("logit_bias", bias, "finite")
    for token_id in params.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            _reject("stop_token_ids", token_id, f"token ids from 0 to {vocab_size - 1}")
    for token_id in params.shown_token_ids:
        if not 0 <= token_id < vocab_size:
            _reject("shown_token_ids", token_id, f"token ids from 0 to {vocab_size - 1}")


def _reject(param: str, value: float, right: str) -> None:
    raise InvalidRequestError(f"{param} is {value}; it must be {right}", param=param)
