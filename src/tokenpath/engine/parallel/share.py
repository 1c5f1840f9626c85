"""Which part of a model one rank holds.

Stages divide the layers, parts divide every matrix by its *output* rows: a part has whole rows, so
each number it puts out is summed by one rank in the order in which a single rank would sum it. What
ranks exchange is finished numbers, never sums to be added up, and the result is the same.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from tokenpath.models.architecture import ModelConfig
from tokenpath.protocol.errors import SpecError

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's place: part ``part`` of ``parts`` in stage ``stage`` of ``stages``."""

    part: int = 0
    parts: int = 1
    stage: int = 0
    stages: int = 1

    @property
    def rank(self) -> int:
        """Number among all ranks; stage after stage."""
        return self.stage * self.parts + self.part

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.parts * self.stages

    @property
    def first(self) -> bool:
        """Whether the stage embeds tokens."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether the stage makes logits."""
        return self.stage == self.stages - 1

    def held(self, rows: int) -> int:
        """Rows of a matrix of ``rows`` that every part has room for; the last may fill fewer."""
        return -(-rows // self.parts)

    def rows(self, rows: int) -> range:
        """Which rows of a matrix this part has."""
        held = self.held(rows)
        return range(min(rows, self.part * held), min(rows, (self.part + 1) * held))

    def layers(self, layers: int) -> range:
        """Which layers this stage has; earlier stages have one less where it does not come out.

        The last stage has the head as well, but the head's work is done for sampled rows alone.
        """
        return range(layers * self.stage // self.stages, layers * (self.stage + 1) // self.stages)

    def own(self, config: ModelConfig) -> ModelConfig:
        """The model's metadata with the heads and layers of this rank alone."""
        layers = self.layers(config.layers)
        return dataclasses.replace(
            config,
            heads=config.heads // self.parts,
            kv_heads=config.kv_heads // self.parts,
            layers=len(layers),
            layer_kinds=config.layer_kinds[layers.start : layers.stop],
        )

    def has(self, tensor: str, config: ModelConfig) -> bool:
        """Whether this stage has (a part of) a tensor, by its canonical name."""
        layer = _LAYER.match(tensor)
        if layer is not None:
            return int(layer[1]) in self.layers(config.layers)
        if tensor.startswith("model.embed_tokens."):
            return self.first or (self.last and config.tie_embeddings)
        return self.last

    def ranks(self) -> tuple[Share, ...]:
        """Everybody's, by rank."""
        return tuple(
            dataclasses.replace(self, part=part, stage=stage)
            for stage in range(self.stages)
            for part in range(self.parts)
        )


ALL = Share()
"""The share of a model that is not divided."""


def divided(config: ModelConfig, *, name: str, parts: int, stages: int) -> Share:
    """Rank 0's share. Raises ``SpecError`` if the model cannot be divided so."""
    if stages > config.layers:
        raise SpecError(
            f"pipeline_parallel is {stages}, but {name} has {config.layers} layers, and every "
            f"stage needs one; it can be {config.layers} at most",
            param="pipeline_parallel",
        )
    reason = undivided(config, parts)
    if reason is not None:
        possible = [str(n) for n in range(1, config.heads + 1) if undivided(config, n) is None]
        hint = " or ".join(filter(None, (", ".join(possible[:-1]), possible[-1])))
        otherwise = "" if len(possible) > 1 else " (pipeline_parallel divides its layers instead)"
        raise SpecError(
            f"tensor_parallel is {parts}, but {name} has {reason}, which {parts} ranks cannot "
            f"share equally; for this model it can be {hint}{otherwise}",
            param="tensor_parallel",
        )
    return Share(parts=parts, stages=stages)


def undivided(config: ModelConfig, parts: int) -> str | None:
    """What of a model so many parts cannot share equally; None if they can."""
    sizes = (
        (config.heads, f"{config.heads} query head{'s' * (config.heads != 1)}"),
        (config.kv_heads, f"{config.kv_heads} KV head{'s' * (config.kv_heads != 1)}"),
        (config.hidden_size, f"a hidden size of {config.hidden_size}"),
        (config.intermediate_size, f"a feed-forward size of {config.intermediate_size}"),
    )
    for size, said in sizes:
        if size % parts:
            return said
    # A vocabulary of any size is shared, the last part being smaller; but it must not be empty.
    if not Share(parts - 1, parts).rows(config.vocab_size):
        return f"a vocabulary of {config.vocab_size}"
    return None
