"""Checks of a decoded request against the spec and the model, and the sampling parameters it means.

Bounds that never change are in the schema; here are those that depend on the deployment
(``gateway.limits`` in the spec) or on the model (vocabulary, context).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tokenpath.config.spec import Limits
from tokenpath.gateway.openai.schema import NOT_IMPLEMENTED, Sampling
from tokenpath.protocol.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from tokenpath.protocol.grammar import Grammar
from tokenpath.protocol.replica import ModelCard
from tokenpath.protocol.request import SamplingParams

STOP_CHARACTERS = 1_000
"""Longest stop string: output is held back while it may be the beginning of one."""
STOP_TOKEN_IDS = 1_000
LOGIT_BIASES = 1_000
"""Each is added to a row of logits at every token."""
_ID_DIGITS = 10
SEED_MODULUS = 2**63
"""Seeds are taken modulo this, so that negative ones work and seed + i never overflows."""


def check_supported(request: Sampling) -> None:
    """Refuse fields that are not implemented. Raises ``UnsupportedError`` naming the first."""
    for name, accepted in NOT_IMPLEMENTED[type(request)].items():
        value = getattr(request, name)
        if value is not None and not any(_same(value, harmless) for harmless in accepted):
            raise UnsupportedError(f"Field '{name}' is not implemented; leave it out.", param=name)


def check_limits(request: Sampling, limits: Limits) -> None:
    """What the spec bounds. Raises ``InvalidRequestError`` naming the field and the bound."""
    if request.n is not None and request.n > limits.choices:
        raise InvalidRequestError(
            f"Field 'n' is {request.n}; this server allows 1 to {limits.choices}.", param="n"
        )
    stops = stop_strings(request)
    if len(stops) > limits.stop_strings:
        raise InvalidRequestError(
            f"Field 'stop' has {len(stops)} strings; this server allows {limits.stop_strings}.",
            param="stop",
        )
    if any(len(stop) > STOP_CHARACTERS for stop in stops):
        raise InvalidRequestError(
            f"A string in 'stop' is longer than {STOP_CHARACTERS} characters.", param="stop"
        )
    if request.stop_token_ids and len(request.stop_token_ids) > STOP_TOKEN_IDS:
        raise InvalidRequestError(
            f"Field 'stop_token_ids' has more than {STOP_TOKEN_IDS} entries.",
            param="stop_token_ids",
        )
    if request.logit_bias and len(request.logit_bias) > LOGIT_BIASES:
        raise InvalidRequestError(
            f"Field 'logit_bias' has more than {LOGIT_BIASES} entries.", param="logit_bias"
        )
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError(
            "Field 'stream_options' needs 'stream': true.", param="stream_options"
        )


def check_logprobs(asked: int | None, param: str, limits: Limits) -> int | None:
    """How many of the likeliest tokens to report. Raises ``InvalidRequestError``."""
    if asked is not None and asked > limits.logprobs:
        raise InvalidRequestError(
            f"Field '{param}' is {asked}; this server allows 0 to {limits.logprobs}.", param=param
        )
    return asked


def stop_strings(request: Sampling) -> tuple[str, ...]:
    """``stop`` as a tuple, whatever its form."""
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


def sampling_params(
    request: Sampling,
    card: ModelCard,
    *,
    logprobs: int | None,
    max_tokens: int,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """The parameters of the call's first choice.

    ``grammar`` is what the request's own fields for it mean.
    Raises ``InvalidRequestError`` for token ids that the model does not have and for a
    ``min_tokens`` beyond ``max_tokens``.
    """
    minimum = request.min_tokens or 0
    if minimum > max_tokens:
        raise InvalidRequestError(
            f"Field 'min_tokens' is {minimum}, more than the {max_tokens} tokens of output "
            "that are possible.",
            param="min_tokens",
        )
    check_token_ids(request.stop_token_ids or (), card, "stop_token_ids")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=minimum,
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=max(0, request.top_k or 0),
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        seed=None if request.seed is None else request.seed % SEED_MODULUS,
        logit_bias=_biases(request.logit_bias or {}, card),
        stop=stop_strings(request),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        grammar=grammar,
    )


def choice_params(first: SamplingParams, choice: int) -> SamplingParams:
    """The parameters of choice ``choice``: those of the first, with seed + choice."""
    if first.seed is None or choice == 0:
        return first
    return msgspec.structs.replace(first, seed=(first.seed + choice) % SEED_MODULUS)


def output_budget(
    asked: int | None,
    default: int | None,
    prompt_tokens: int,
    *,
    card: ModelCard,
    limits: Limits,
    param: str,
) -> int:
    """Most tokens to generate after a prompt of ``prompt_tokens`` tokens.

    ``asked`` is the client's number, ``default`` what the API says without one (None: what is left
    of the context). Raises ``InvalidRequestError`` for more than the spec allows, and
    ``ContextLengthError`` if it does not fit the model.
    """
    if prompt_tokens == 0:
        raise InvalidRequestError("The prompt is empty: it has no tokens.", param=param)
    if limits.input_tokens is not None and prompt_tokens > limits.input_tokens:
        raise ContextLengthError(
            f"The prompt has {prompt_tokens} tokens; this server allows {limits.input_tokens}.",
            param=param,
        )
    if asked is not None and limits.output_tokens is not None and asked > limits.output_tokens:
        raise InvalidRequestError(
            f"{asked} tokens of output were asked for; this server allows 1 to "
            f"{limits.output_tokens}.",
            param="max_tokens",
        )
    left = card.max_context_tokens - prompt_tokens
    if left < (1 if asked is None else asked):
        output = "at least 1" if asked is None else str(asked)
        raise ContextLengthError(
            f"This model's context holds {card.max_context_tokens} tokens, but {prompt_tokens} "
            f"of prompt and {output} of output were asked for.",
            param=param,
        )
    if asked is not None:
        return asked
    default = limits.default_output_tokens or default
    bounds = [bound for bound in (left, default, limits.output_tokens) if bound is not None]
    return min(bounds)


def check_token_ids(token_ids: Sequence[int], card: ModelCard, param: str) -> None:
    """Refuse token ids that the model does not have."""
    if token_ids and max(token_ids) >= card.vocab_size:
        raise InvalidRequestError(
            f"Field '{param}' has token id {max(token_ids)}; this model's ids are 0 to "
            f"{card.vocab_size - 1}.",
            param=param,
        )


def _biases(given: Mapping[str, float], card: ModelCard) -> dict[int, float]:
    biases: dict[int, float] = {}
    for name, bias in given.items():
        known = name.isascii() and name.isdecimal() and len(name) <= _ID_DIGITS
        if not known or int(name) >= card.vocab_size:
            raise InvalidRequestError(
                f"Field 'logit_bias' has the key {name[:20]!r}; keys are token ids of this model, "
                f"0 to {card.vocab_size - 1}.",
                param="logit_bias",
            )
        biases[int(name)] = bias
    return biases


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _same(value: object, harmless: object) -> bool:
    """Equality that keeps ``1`` and ``True`` apart."""
    return value == harmless and isinstance(value, bool) == isinstance(harmless, bool)
