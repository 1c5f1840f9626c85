"""The unit of scheduling: one sequence, and the plan of one engine step.

A sequence is a list of token ids of which the first ``computed`` have their keys and values in the
blocks of ``blocks``. Prefill, chunked prefill, decode and recomputation after a preemption are one
case: a sequence has ``len(token_ids) - computed`` tokens left to compute, and when a step computes
the last of them, its logits are sampled.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class SequenceState(enum.Enum):
    """Where a sequence stands; the scheduler alone moves it."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence's scheduling state. Owned and mutated by the scheduler only."""

    request_id: str
    token_ids: list[int]
    """The prompt, then the output sampled so far."""
    prompt_tokens: int
    """How many of ``token_ids`` are the prompt."""
    max_tokens: int
    """Most output tokens; prompt and output together never exceed the pool (checked on entry)."""
    priority: int = 0
    """Lower runs first."""
    arrival: int = 0
    """Order of arrival, given by the scheduler; kept through preemptions."""
    cache_key: tuple[str, str] = ("", "")
    """(salt, adapter): sequences with different keys never share blocks."""
    state: SequenceState = SequenceState.WAITING
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    """Block ids in order: token ``i`` lives in ``blocks[i // block_tokens]``."""
    cached_prompt_tokens: int | None = None
    """Prompt tokens found in the prefix cache when first admitted; None before that."""
    preemptions: int = 0

    @property
    def output_tokens(self) -> int:
        """How many tokens were sampled so far."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def uncomputed(self) -> int:
        """Tokens whose KV is missing; at least 1 while the sequence lives."""
        return len(self.token_ids) - self.computed


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``start … start + length - 1`` of one sequence, to be computed in this step.

    The last of them may be drafted: guesses of what follows the sequence's own tokens, of which
    those that sampling confirms become the sequence's.
    """

    sequence: Sequence
    start: int
    length: int
    drafted: tuple[int, ...] = ()
    """Ids of the chunk's last tokens; none unless the tokens before them reach the sequence's
    end."""

    @property
    def known(self) -> int:
        """How many of the chunk's tokens are the sequence's own."""
        return self.length - len(self.drafted)

    @property
    def token_ids(self) -> list[int]:
        """All of the chunk's tokens. Not to be asked once the chunk is committed."""
        own = self.sequence.token_ids[self.start : self.start + self.known]
        return [*own, *self.drafted]

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the sequence's end, so that logits of it are sampled.

        Those are its last ``sampled_rows`` ones.
        """
        return self.start + self.known == len(self.sequence.token_ids)

    @property
    def sampled_rows(self) -> int:
        """How many of the chunk's last tokens have their logits sampled: one, and the drafted."""
        return 1 + len(self.drafted) if self.samples else 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one engine step computes. Block ids of every chunk's tokens are already allocated."""

    chunks: tuple[Chunk, ...]
    preempted: tuple[Sequence, ...] = ()
    """Sequences sent back to the queue to make room; they will be computed again."""
    admitted: tuple[Sequence, ...] = ()
    """Sequences that left the queue in this plan (also after a preemption)."""

    @property
    def tokens(self) -> int:
        """Tokens computed by the step."""
        return sum(chunk.length for chunk in self.chunks)
