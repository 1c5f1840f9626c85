"""A deterministic core for link tests, and a script that runs it as a real engine process.

A request's i-th token is ``prompt[0] * 1000 + i``. What goes wrong is chosen by the prompt's first
token (per request) or by the model's path (per process).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tokenpath.engine.__main__ import end_process, read_launch, run
from tokenpath.engine.stage_clock import StageClock
from tokenpath.protocol.errors import EngineError, InvalidRequestError, ModelFileError
from tokenpath.protocol.events import (
    Failed,
    Finish,
    FinishReason,
    GenerationEvent,
    TokenDelta,
    Usage,
)
from tokenpath.protocol.replica import ModelCard, ReplicaStats
from tokenpath.protocol.request import GenerationRequest
from tokenpath.protocol.stages import Stage

REFUSED = 901
"""``submit`` raises a typed error."""
SUBMIT_BUG = 902
"""``submit`` raises something else."""
FAILS_ALONE = 903
"""Fails in its second step, by itself."""
BREAKS_ALL = 904
"""``step`` raises."""
HANGS = 906
"""``step`` does not return."""
WIDE = 905
"""Every token comes with 100 kB of text."""


class ScriptedCore:
    grammars = None

    def __init__(self, step_s: float = 0.001, max_running: int = 64) -> None:
        self.step_s = step_s
        self.max_running = max_running
        self.live: dict[str, tuple[GenerationRequest, int]] = {}
        """Request and how many tokens it has had."""
        self.clocks: dict[str, StageClock] = {}
        self.aborted: dict[str, int] = {}
        """Request id to the number of steps done when the abort came."""
        self.steps = 0
        self.generated = 0
        self.integrity_checks = 0
        self.closed = False

    @property
    def card(self) -> ModelCard:
        return ModelCard(
            name="scripted",
            architecture="script",
            parameters=0,
            vocab_size=1000,
            max_context_tokens=10_000,
            dtype="none",
            kv_dtype="bfloat16",
            weight_bytes=0,
            kv_bytes_per_token=0,
            kv_blocks_total=100,
            block_tokens=16,
        )

    def submit(self, request: GenerationRequest, *, arrived: float, grammar=None) -> None:
        kind = request.prompt.token_ids[0]
        if kind == REFUSED:
            raise InvalidRequestError("refused by the script", param="prompt")
        if kind == SUBMIT_BUG:
            raise ZeroDivisionError("a bug")
        assert request.request_id not in self.live
        self.live[request.request_id] = (request, 0)
        self.clocks[request.request_id] = StageClock(arrived)

    def abort(self, request_id: str) -> Finish | None:
        if request_id not in self.live:
            return None
        self.aborted[request_id] = self.steps
        _, done = self.live[request_id]
        return self.finish(request_id, FinishReason.ABORT, done)

    def finish(self, request_id: str, reason: FinishReason, done: int) -> Finish:
        del self.live[request_id]
        stages = self.clocks.pop(request_id).total(time.monotonic())
        return Finish(reason, Usage(prompt_tokens=1, completion_tokens=done), stages)

    def has_work(self) -> bool:
        return bool(self.live)

    def step(self) -> list[GenerationEvent]:
        batch = list(self.live.items())[: self.max_running]
        for request_id, _ in batch:
            if self.clocks[request_id].stage is Stage.QUEUE:
                self.clocks[request_id].enter(Stage.PREFILL, time.monotonic())
        time.sleep(self.step_s)
        self.steps += 1
        events: list[GenerationEvent] = []
        for request_id, (request, before) in batch:
            if self.clocks[request_id].stage is Stage.PREFILL:
                self.clocks[request_id].enter(Stage.DECODE, time.monotonic())
            kind = request.prompt.token_ids[0]
            if kind == HANGS:
                time.sleep(1000)
            if kind == BREAKS_ALL:
                raise RuntimeError("the script breaks here")
            if kind == FAILS_ALONE and before == 1:
                finish = self.finish(request_id, FinishReason.STOP, before)
                error = EngineError("this one failed").info()
                events.append(Failed(request_id, error, finish.stages, finish.usage))
                continue
            done = before + 1
            self.generated += 1
            finish = None
            if done == request.sampling.max_tokens:
                finish = self.finish(request_id, FinishReason.LENGTH, done)
            else:
                self.live[request_id] = (request, done)
            text = "x" * 100_000 if kind == WIDE else f"t{done}"
            events.append(TokenDelta(request_id, [kind * 1000 + done - 1], text, None, finish))
        return events

    def stats(self) -> ReplicaStats:
        return ReplicaStats(
            requests_running=len(self.live),
            kv_blocks_used=len(self.live),
            kv_blocks_total=100,
            generated_tokens_total=self.generated,
            steps_total=self.steps,
            aborts_total=len(self.aborted),
        )

    def check_integrity(self) -> None:
        self.integrity_checks += 1
        assert not self.live

    def close(self, *, keep_kv: bool = True) -> None:
        self.closed = True
        self.kept_kv = keep_kv


def script(path: Path, progress) -> ScriptedCore:
    progress("weights", 0.5)
    match path.name:
        case "bad-file":
            raise ModelFileError("bad-file is truncated")
        case "bug":
            raise ZeroDivisionError("a bug in the loader")
        case "dies-loading":
            sys.stderr.write("the last words\n")
            sys.stderr.flush()
            os._exit(9)
        case "loads-forever":
            time.sleep(1000)
        case "loads-slowly":
            time.sleep(0.3)
            progress("weights", 0.9)
        case "slow-steps":
            return ScriptedCore(step_s=0.05)
    return ScriptedCore()


def main() -> int:
    launch = read_launch(sys.argv[1:])
    token = os.environ.pop("TOKENPATH_LINK_TOKEN")
    return run(launch, token, lambda progress: script(launch.model, progress))


if __name__ == "__main__":
    end_process(main())
