"""A model as the gateway's side knows it: its name, how to turn text into its tokens, its replicas.

The tokenizer and the template are described by what is used of them, so that tests and remote
backends can bring their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenpath.models.dialects.detect import PLAIN, Dialect
from tokenpath.protocol.errors import (
    AsleepError,
    DrainingError,
    NotReadyError,
    UnavailableError,
)
from tokenpath.protocol.pooling import PoolingInput
from tokenpath.protocol.replica import RESTING, ModelCard, Replica, ReplicaState, Task

LOADING_RETRY_S = 5.0
"""Retry-After of a model that is loading: loading takes seconds to minutes."""
ASLEEP_RETRY_S = 60.0
"""Retry-After of a model that sleeps until somebody wakes it on purpose."""


class TextTokenizer(Protocol):
    """What the gateway needs of a tokenizer; ``models.tokenizer.Tokenizer`` is one."""

    def encode(self, text: str, /, *, add_special: bool = ...) -> list[int]:
        """Token ids of ``text``, with the model's own beginning token if ``add_special``."""
        ...

    def decode(self, token_ids: Sequence[int], /) -> str:
        """Text of ``token_ids``."""
        ...


class MessageTemplate(Protocol):
    """What the gateway needs of a chat template; ``models.template.ChatTemplate`` is one."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = ...,
        tools: Sequence[Mapping[str, Any]] | None = ...,
        **switches: Any,
    ) -> str:
        """The prompt's text; ``switches`` are the template's own.

        Raises ``InvalidRequestError`` if the template refuses.
        """
        ...


class InputReader(Protocol):
    """How texts become inputs of a model that embeds, scores or classifies.

    ``models.input_tokenizer.InputTokenizer`` is one. ``keep`` cuts an input to so many tokens.
    """

    def single(self, text: str, /, *, keep: int | None = ...) -> PoolingInput:
        """A text by itself. Raises ``InvalidRequestError``."""
        ...

    def pair(self, first: str, second: str, /, *, keep: int | None = ...) -> PoolingInput:
        """Two texts as one input. Raises ``InvalidRequestError``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServedModel:
    """One model that clients can name."""

    name: str
    created: int
    """Unix seconds; shown by ``/v1/models``."""
    tokenizer: TextTokenizer
    template: MessageTemplate | None
    """None for a base model: it answers completions, and chat is refused with the reason."""
    replicas: Sequence[Replica]
    """At least one. A restarted replica keeps its place."""
    dialect: Dialect = PLAIN
    """How the model writes tool calls and reasoning."""
    max_running: int = 64
    """Sequences that one replica runs at once (the spec's ``engine.max_running``)."""
    task: Task = "generate"
    inputs: InputReader | None = None
    """None for a model that generates."""
    wakes: bool = True
    """Whether a request wakes a sleeping replica (the spec's ``engine.when_asleep``)."""

    @property
    def card(self) -> ModelCard:
        """What a replica said of the loaded model. Raises as ``unready`` until one has loaded."""
        for replica in self.replicas:
            if replica.card is not None:
                return replica.card
        raise self.unready()

    @property
    def ready(self) -> bool:
        """Whether some replica can answer, were it after a wake."""
        return any(self.takes(replica) for replica in self.replicas)

    def takes(self, replica: Replica) -> bool:
        """Whether a replica takes requests in its present state."""
        state = replica.state
        return state is ReplicaState.READY or (self.wakes and state in RESTING)

    @property
    def state(self) -> ReplicaState:
        """That of the replica that is closest to answering."""
        return min((replica.state for replica in self.replicas), key=_CLOSENESS.index)

    def unready(self) -> UnavailableError:
        """The error that says why no replica can answer."""
        states = {replica.state for replica in self.replicas}
        if states & {ReplicaState.PENDING, ReplicaState.LOADING}:
            return NotReadyError(
                f"Model '{self.name}' is still loading; try again in a moment.",
                retry_after_s=LOADING_RETRY_S,
            )
        if states & RESTING:
            return AsleepError(
                f"Model '{self.name}' sleeps, and requests do not wake it.",
                retry_after_s=ASLEEP_RETRY_S,
            )
        if ReplicaState.DRAINING in states:
            return DrainingError(
                f"Model '{self.name}' is shutting down.", retry_after_s=LOADING_RETRY_S
            )
        return UnavailableError(
            f"No replica of model '{self.name}' is running.", retry_after_s=LOADING_RETRY_S
        )


_CLOSENESS = (
    ReplicaState.READY,
    ReplicaState.FALLING_ASLEEP,
    ReplicaState.WAKING,
    ReplicaState.ASLEEP,
    ReplicaState.LOADING,
    ReplicaState.PENDING,
    ReplicaState.DRAINING,
    ReplicaState.FAILED,
    ReplicaState.STOPPED,
)
