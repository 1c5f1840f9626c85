"""What can be measured, by name: ``prefill_512``, ``decode_8_1024``, ``shared_2000``.

A name is also the key of its figure in the JSON report. Any size may be named; ``ALL`` are the
sizes that peers are compared on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tokenpath.protocol.errors import SpecError

DECODE_STEPS = 32
"""Steps of one measured span of decoding; every sequence gets a token in each."""
STEP_OVERHEAD = "step_overhead"
STRUCTURED_OVERHEAD = "structured_overhead"
_NAME = re.compile(
    r"(?P<one>prefill|tiers|shared)_(?P<tokens>[1-9]\d{0,6})"
    r"|(?P<text>edit|json|prose)_(?P<answers>[1-9]\d{0,3})"
    r"|(?P<kind>decode|structured)_(?P<sequences>[1-9]\d{0,3})_(?P<context>[1-9]\d{0,6})"
)


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prompt of random tokens, computed up to its first output token."""

    tokens: int

    @property
    def name(self) -> str:
        return f"prefill_{self.tokens}"

    @property
    def sequence_tokens(self) -> int:
        """Most tokens that a sequence of the work comes to have."""
        return self.tokens + 1

    @property
    def sequences(self) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class Decode:
    """Sequences that advance together from a context of so many tokens each."""

    sequences: int
    context: int
    structured: bool = False
    """Under a JSON schema, each."""

    @property
    def name(self) -> str:
        kind = "structured" if self.structured else "decode"
        return f"{kind}_{self.sequences}_{self.context}"

    @property
    def sequence_tokens(self) -> int:
        """Most tokens that a sequence of the work comes to have.

        The first one computed may run ahead of the last by a token for each step of prefill, whose
        number is not more than that of the sequences.
        """
        return self.context + self.sequences + DECODE_STEPS + 1

    def prompts(self, step_tokens: int) -> list[int]:
        """Lengths of the prompts, so that all contexts are about equal once all are computed.

        A step computes ``step_tokens`` tokens, and a sequence that is computed early decodes until
        the last one is: its prompt is shorter by that.
        """
        waits = (
            (self.sequences - 1 - index) * self.context // step_tokens
            for index in range(self.sequences)
        )
        return [max(1, self.context - wait) for wait in waits]


@dataclass(frozen=True, slots=True)
class Tiering:
    """Prompts of so many tokens that were evicted; see ``bench.engine.tiering``."""

    tokens: int

    @property
    def name(self) -> str:
        return f"tiers_{self.tokens}"

    @property
    def sequence_tokens(self) -> int:
        """Most tokens that a sequence of the work comes to have."""
        return self.tokens + 1

    @property
    def sequences(self) -> int:
        """That the pool holds at a time."""
        return 2


SHARERS = 4
"""Callers after the first one of a shared prompt."""
OWN_TOKENS = 32
"""Of each caller."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Callers whose prompts begin with the same tokens; see ``bench.engine.sharing``."""

    tokens: int

    @property
    def name(self) -> str:
        return f"shared_{self.tokens}"

    @property
    def sequence_tokens(self) -> int:
        """Most tokens that a sequence of the work comes to have."""
        return self.tokens + OWN_TOKENS + 1

    @property
    def sequences(self) -> int:
        """That the pool holds at a time."""
        return 2


@dataclass(frozen=True, slots=True)
class Speculating:
    """Answers to real prompts with and without speculation; see ``bench.engine.speculating``."""

    kind: str
    """``edit``: code that is repeated with a change; ``json``: records in a schema's form;
    ``prose``: a story."""
    sequences: int
    output_tokens: int = 128
    """Of each sequence."""

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.sequences}"

    @property
    def sequence_tokens(self) -> int:
        """Most tokens that a sequence of the work comes to have, by any common tokenizer."""
        return 800 + self.output_tokens


Task = Tiering | Sharing | Speculating
"""A work with a measurement of its own."""
Work = Prefill | Decode | Task
OVERHEAD_WORK = Decode(8, 64)
"""The step overhead is taken from its steps."""
STRUCTURED_WORK = Decode(8, 64, structured=True)
"""What a grammar costs is taken from its steps and those of ``OVERHEAD_WORK``."""
ALL: tuple[Work, ...] = (
    Prefill(512),
    Prefill(2048),
    *(Decode(sequences, context) for context in (64, 1024) for sequences in (1, 4, 8, 16, 32)),
)


_OF_TOKENS: dict[str, Callable[[int], Work]] = {
    "prefill": Prefill,
    "tiers": Tiering,
    "shared": Sharing,
}


def chosen(only: str | None) -> list[Work]:
    """The works of a comma-separated list, in its order and each once; all of them for None.

    Structured decoding comes with the same decoding that is free, just before it.
    Raises ``SpecError`` naming what is no work.
    """
    if only is None:
        return list(ALL)
    works: list[Work] = []
    for name in (part.strip() for part in only.split(",")):
        work = OVERHEAD_WORK if name == STEP_OVERHEAD else _parse(name)
        if isinstance(work, Decode) and work.structured:
            free = Decode(work.sequences, work.context)
            works += [free] if free not in works else []
        works += [work] if work not in works else []
    return works


def check_fit(
    works: Iterable[Work], *, model: str, model_tokens: int, pool_tokens: int, block_tokens: int
) -> None:
    """Raise ``SpecError`` for the first work that the model's context or the KV pool cannot hold.

    ``model_tokens`` is the longest sequence the model allows, ``pool_tokens`` the pool's size.
    """
    for work in works:
        needed = work.sequence_tokens
        if needed > model_tokens:
            raise SpecError(
                f"{work.name} needs sequences of {needed} tokens, but {model} allows "
                f"{model_tokens}; choose other works with --only"
            )
        pool = work.sequences * -(-needed // block_tokens) * block_tokens
        if pool > pool_tokens:
            raise SpecError(
                f"{work.name} needs a KV cache of {pool} tokens, but there are {pool_tokens}; "
                "raise --kv-cache-bytes or choose other works with --only"
            )


def speculate(works: Iterable[Work]) -> bool:
    """Whether the engine must be able to speculate."""
    return any(isinstance(work, Speculating) for work in works)


def most_sequences(works: Iterable[Work]) -> int:
    """The largest batch of any of the works."""
    return max((work.sequences for work in works), default=1)


def _parse(name: str) -> Work:
    found = _NAME.fullmatch(name)
    if found is None:
        raise SpecError(
            f"--only: {name!r} is no work; works are prefill_TOKENS, decode_SEQUENCES_CONTEXT, "
            "structured_SEQUENCES_CONTEXT, tiers_TOKENS, shared_TOKENS, edit_SEQUENCES, "
            f"json_SEQUENCES, prose_SEQUENCES and {STEP_OVERHEAD}, such as prefill_512,"
            "decode_8_1024"
        )
    if found["one"]:
        return _OF_TOKENS[found["one"]](int(found["tokens"]))
    if found["text"]:
        return Speculating(found["text"], int(found["answers"]))
    return Decode(int(found["sequences"]), int(found["context"]), found["kind"] == "structured")
