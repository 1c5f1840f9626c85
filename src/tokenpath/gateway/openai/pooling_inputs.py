"""Inputs of the calls for vectors: counted, tokenized, and checked against the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenpath.config.spec import Limits
from tokenpath.gateway.limits import check_token_ids
from tokenpath.gateway.plan import off_loop
from tokenpath.protocol.errors import ContextLengthError, InvalidRequestError
from tokenpath.protocol.pooling import PoolingInput
from tokenpath.router.served import InputReader, ServedModel


def check_count(count: int, limits: Limits, param: str) -> None:
    """Raise ``InvalidRequestError`` for more inputs than the spec allows."""
    if count > limits.inputs:
        raise InvalidRequestError(
            f"Field '{param}' has {count} entries; this server allows {limits.inputs} in one call.",
            param=param,
        )


def check_filled(inputs: Sequence[str | list[int]], param: str) -> None:
    """Raise ``InvalidRequestError`` for a text without characters, or no token ids."""
    for index, each in enumerate(inputs):
        if not each:
            which = f"Field '{param}'" if len(inputs) == 1 else f"Entry {index} of field '{param}'"
            raise InvalidRequestError(f"{which} is empty.", param=param)


def check_vocabulary(inputs: Sequence[str | list[int]], model: ServedModel) -> None:
    """Raise ``InvalidRequestError`` for token ids that the model does not have."""
    for each in inputs:
        if not isinstance(each, str):
            check_token_ids(each, model.card, "input")


def reader_of(model: ServedModel) -> InputReader:
    """How the model's inputs are made; it has passed ``check_task``."""
    assert model.inputs is not None
    return model.inputs


def kept_tokens(asked: int | None, model: ServedModel) -> int | None:
    """Tokens to cut inputs to; None: do not cut. Raises ``InvalidRequestError``."""
    if asked is None:
        return None
    limit = model.card.max_context_tokens
    if asked == -1:
        return limit
    if not 1 <= asked <= limit:
        raise InvalidRequestError(
            f"Field 'truncate_prompt_tokens' is {asked}; this model reads 1 to {limit} tokens (-1 "
            "cuts to what it reads).",
            param="truncate_prompt_tokens",
        )
    return asked


async def tokenized(
    model: ServedModel,
    limits: Limits,
    work: Callable[[], list[PoolingInput]],
    *,
    characters: int,
    param: str,
) -> list[PoolingInput]:
    """Run a call's tokenization, and check each input's length. Raises ``ContextLengthError``."""
    inputs = await off_loop(characters, work)
    longest = model.card.max_context_tokens
    if limits.input_tokens is not None:
        longest = min(longest, limits.input_tokens)
    for index, each in enumerate(inputs):
        tokens = len(each.token_ids)
        if tokens > longest:
            which = "The input" if len(inputs) == 1 else f"Input {index}"
            raise ContextLengthError(
                f"{which} has {tokens} tokens, but at most {longest} can be read here; shorten it, "
                "or cut it with 'truncate_prompt_tokens': -1.",
                param=param,
            )
    return inputs


def embedding_inputs(
    given: Sequence[str | list[int]], model: ServedModel, keep: int | None
) -> list[PoolingInput]:
    """Texts with the model's own tokens around them; token ids as they are."""
    reader = reader_of(model)
    return [
        reader.single(each, keep=keep) if isinstance(each, str) else PoolingInput(each[:keep])
        for each in given
    ]


def listed(given: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The inputs, whatever form they came in. Raises ``InvalidRequestError``."""
    if isinstance(given, str):
        inputs: list[str | list[int]] = [given]
    else:
        if not given:
            raise InvalidRequestError(
                "Field 'input' is an empty list; it needs at least one input.", param="input"
            )
        numbers = [item for item in given if isinstance(item, int)]
        if numbers and len(numbers) < len(given):
            raise InvalidRequestError(
                "Field 'input' mixes token ids with inputs; give one or the other.", param="input"
            )
        inputs = [numbers] if numbers else [i for i in given if not isinstance(i, int)]
    check_filled(inputs, "input")
    return inputs
