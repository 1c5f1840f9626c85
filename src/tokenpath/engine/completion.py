"""The whole output of one sequence, gathered from its events."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenpath.protocol.errors import ErrorInfo
from tokenpath.protocol.events import (
    EngineStages,
    Failed,
    Finish,
    FinishReason,
    GenerationEvent,
    TokenLogprob,
    Usage,
)


@dataclass(frozen=True, slots=True)
class Completion:
    """What came of one prompt."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    """One per token, if the sampling parameters asked."""
    finish_reason: FinishReason | None
    """``stop`` or ``length``; None if the sequence failed."""
    usage: Usage
    """Also of a failed sequence: what was computed for it until then."""
    stages: EngineStages
    """Seconds it spent waiting, in prefill and in decode, until its end or its failure."""
    matched_stop: str | int | None = None
    """The stop string or stop token id that ended it."""
    error: ErrorInfo | None = None
    """Why it failed; what was generated until then is kept."""


@dataclass(slots=True)
class CompletionDraft:
    """A completion in the making."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish: Finish | None = None
    failed: Failed | None = None

    @property
    def ended(self) -> bool:
        """Whether the last event has come."""
        return self.finish is not None or self.failed is not None

    def add(self, event: GenerationEvent) -> int:
        """Take an event; how many tokens it brought."""
        if isinstance(event, Failed):
            self.failed = event
            return 0
        self.text.append(event.text)
        self.token_ids += event.token_ids
        if event.logprobs is not None:
            self.logprobs = (self.logprobs or []) + event.logprobs
        self.finish = event.finish
        return len(event.token_ids)

    def completion(self) -> Completion:
        """What has come so far."""
        finish, failed = self.finish, self.failed
        ending = finish or failed
        return Completion(
            text="".join(self.text),
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=None if finish is None else finish.reason,
            usage=(ending and ending.usage) or Usage(),
            stages=(ending and ending.stages) or EngineStages(),
            matched_stop=None if finish is None else finish.matched_stop,
            error=None if failed is None else failed.error,
        )
