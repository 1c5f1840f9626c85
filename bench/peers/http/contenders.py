"""Who is compared over HTTP, and how each server is started: in its best way for the load.

Prefix caches and speculation are off everywhere; every server may run all callers' requests at
once, and computes with as many threads as there are CPUs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.peers.rivals import OURS

HOST = "127.0.0.1"
_CELL_TOKENS = 256
"""llama.cpp rounds each sequence's share of the KV up to so many tokens."""
_VLLM_KV_GIB = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a server is started with."""

    python: Path
    """Of the contender's environment; its programs are in the same folder."""
    model: str
    """A path, or for tokenpath a name of the catalogue."""
    port: int
    cpus: tuple[int, ...]
    """Those that it may use, by their numbers: one compute thread for each."""
    slots: int
    """Requests at once: the load's callers."""
    sequence_tokens: int
    """Most tokens of any request, prompt and output together."""
    scratch: Path
    """A folder for files of this run."""

    @property
    def threads(self) -> int:
        return len(self.cpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command line, and variables on top of the environment."""

    arguments: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One contender."""

    name: str
    rival: str
    """Its environment."""
    ready: str
    """The path that answers 200 once the model is loaded."""
    command: Callable[[Launch], Command]
    form: str | None = None
    """None for the model as it was pulled."""

    @property
    def ours(self) -> bool:
        return self.rival == OURS


def _tokenpath(dtype: str) -> Callable[[Launch], Command]:
    def command(launch: Launch) -> Command:
        engine = {"dtype": dtype, "threads": launch.threads, "prefix_cache": False}
        spec = launch.scratch / "spec.yaml"
        models = [{"source": launch.model, "engine": engine}]
        spec.write_text(json.dumps({"version": 1, "models": models}))  # JSON is YAML
        return Command(
            arguments=[
                *(str(launch.python), "-m", "tokenpath.cli.main", "serve", str(spec)),
                *("--host", HOST, "--port", str(launch.port), "--auth", "none"),
            ]
        )

    return command


def _llama(*options: str) -> Callable[[Launch], Command]:
    def command(launch: Launch) -> Command:
        cells = launch.slots * -(-launch.sequence_tokens // _CELL_TOKENS) * _CELL_TOKENS
        threads = str(launch.threads)
        return Command(
            arguments=[
                str(launch.python.with_name("llama-server")),
                *("--model", launch.model, "--host", HOST, "--port", str(launch.port)),
                *("--threads", threads, "--threads-batch", threads),
                *("--parallel", str(launch.slots), "--ctx-size", str(cells), "--cont-batching"),
                *("--no-cache-prompt", "--cache-ram", "0", "--offline", *options),
            ]
        )

    return command


def _vllm(launch: Launch) -> Command:
    return Command(
        arguments=[
            *(str(launch.python), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", launch.model, "--host", HOST, "--port", str(launch.port)),
            *("--dtype", "bfloat16", "--max-model-len", str(launch.sequence_tokens + 8)),
            *("--max-num-seqs", str(launch.slots), "--max-num-batched-tokens", "2048"),
            *("--no-enable-prefix-caching", "--disable-log-stats", "--disable-uvicorn-access-log"),
        ],
        environment={
            "VLLM_CPU_KVCACHE_SPACE": str(_VLLM_KV_GIB),
            # By itself it leaves one CPU without a compute thread; of two, that is half of them.
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, launch.cpus)),
            # As its documentation asks for.
            "LD_PRELOAD": str(launch.python.parents[1] / "lib" / "libiomp5.so"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
    )


def _openvino(launch: Launch) -> Command:
    return Command(
        arguments=[
            *(str(launch.python), "-m", "bench.peers.drivers.openvino_server"),
            *("--model", launch.model, "--host", HOST, "--port", str(launch.port)),
            *("--threads", str(launch.threads), "--sequences", str(launch.slots)),
            *("--sequence-tokens", str(launch.sequence_tokens)),
        ]
    )


SERVERS = {
    server.name: server
    for server in (
        *(
            Server(name=f"tokenpath-{dtype}", rival=OURS, ready="/ready", command=_tokenpath(dtype))
            for dtype in ("int8", "int4")
        ),
        *(
            Server(
                name=f"llama-server-{kind}{suffix}",
                rival="llama-server",
                ready="/health",
                command=_llama(option),
                form=f"gguf-{kind}",
            )
            for kind in ("q4_0", "q8_0")
            for suffix, option in (("", "--no-kv-unified"), ("-unified", "--kv-unified"))
        ),
        *(
            Server(
                name=f"vllm-{kind}",
                rival="vllm",
                ready="/health",
                command=_vllm,
                form=f"hf-{kind}",
            )
            for kind in ("w8a8", "bf16")
        ),
        *(
            Server(
                name=f"openvino-{kind}",
                rival="openvino",
                ready="/health",
                command=_openvino,
                form=form,
            )
            for kind, form in (
                ("gguf-q8_0", "gguf-q8_0"),
                ("int8", "openvino-int8"),
                ("int4", "openvino-int4"),
            )
        ),
    )
}
