"""From a spec to models on this disk that are ready to be served: chosen, fetched, opened.

Everything that can be wrong about a model is found here, in this process and before an engine is
started: a misspelt source, a broken file, a template that does not compile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenpath.config.spec import Model, Spec
from tokenpath.models import choice, gguf_tokenizer, hf_folder, memory
from tokenpath.models.architecture import KvDtype
from tokenpath.models.dialects.detect import PLAIN, Dialect, dialect_of
from tokenpath.models.input_tokenizer import InputTokenizer
from tokenpath.models.local import LocalModel
from tokenpath.models.progress import Progress
from tokenpath.models.servable import Servable, input_tokenizer, open_servable, settle_task
from tokenpath.models.sizes import human_bytes
from tokenpath.models.source import resolve
from tokenpath.models.spelling import Source, parse_source
from tokenpath.models.template import ChatTemplate, read_chat_template
from tokenpath.models.tokenizer import Tokenizer
from tokenpath.protocol.errors import SpecError
from tokenpath.protocol.replica import ModelCard, Task

_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16"}
_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """A model that an engine can be started for."""

    name: str
    spec: Model
    local: Servable
    tokenizer: Tokenizer | InputTokenizer
    template: ChatTemplate | None
    dialect: Dialect = PLAIN
    task: Task = "generate"
    inputs: InputTokenizer | None = None
    """How texts become inputs; None for a model that generates."""


def prepare(
    spec: Spec, *, models_dir: Path, progress: Progress, say: Callable[[str], None]
) -> list[ReadyModel]:
    """Choose, pull and open every model of the spec; ``say`` is told what is being done.

    Raises ``ModelError`` and ``SpecError``, each naming the model at fault.
    """
    chosen = _choose(spec, models_dir, say)
    return [_opened(model, source, models_dir, progress, say) for model, source in chosen]


def prepare_again(
    spec: Spec, name: str, *, models_dir: Path, progress: Progress, say: Callable[[str], None]
) -> ReadyModel:
    """The model called ``name`` as the spec and the disk have it now.

    Raises as ``prepare``, and ``SpecError`` if the spec has no such model any more.
    """
    for model in spec.models:
        listed = [model.source] if isinstance(model.source, str) else model.source
        for source in map(parse_source, listed):
            if name == (model.name or source.name):
                return _opened(model, source, models_dir, progress, say)
    raise SpecError(f"the spec has no model called {name!r} any more")


def _opened(
    model: Model,
    source: Source,
    models_dir: Path,
    progress: Progress,
    say: Callable[[str], None],
) -> ReadyModel:
    name = model.name or source.name
    path = resolve(source.text, models_dir=models_dir, progress=progress)
    local = open_servable(path, name=name)
    say(f"Model {name}: {local.config.architecture}, {memory.parameters(local):,} parameters, "
        f"{local.path}")  # fmt: skip
    return _ready(name, model, local)


def _ready(name: str, model: Model, local: Servable) -> ReadyModel:
    task = settle_task(local, model.engine.task)
    if task == "generate" and isinstance(local, LocalModel):
        tokenizer, template = local.tokenizer(), _template(model, local)
        dialect = dialect_of(
            template,
            tokenizer,
            tool_parser=model.tool_parser,
            reasoning_parser=model.reasoning_parser,
        )
        return ReadyModel(name, model, local, tokenizer, template, dialect)
    _check_settings(name, model)
    inputs = input_tokenizer(local)
    return ReadyModel(name, model, local, inputs, None, task=task, inputs=inputs)


def _check_settings(name: str, model: Model) -> None:
    """Raise ``SpecError`` for what only a model that generates can have."""
    if model.chat_template is not None:
        raise SpecError(f"{name} makes no conversation; leave out its chat_template")
    if model.engine.dtype in {"int8", "int4"}:
        raise SpecError(
            f"dtype {model.engine.dtype!r} is for models that generate; {name} is computed in "
            "'float32' or 'bfloat16'"
        )


def _choose(spec: Spec, models_dir: Path, say: Callable[[str], None]) -> list[tuple[Model, Source]]:
    """A source for each model, so that all of them together fit in memory."""
    available = memory.available_bytes()
    chosen: list[tuple[Model, Source]] = []
    for model in spec.models:
        dtype = _expected_dtype(model.engine.dtype)
        kv_bytes = model.engine.kv_cache_bytes + model.engine.kv_tiers.host_bytes
        listed = [model.source] if isinstance(model.source, str) else model.source
        source = choice.first_that_fits(
            listed,
            models_dir=models_dir,
            dtype=dtype,
            kv_cache_bytes=kv_bytes,
            available_bytes=available,
        )
        needed = choice.estimate_bytes(source, models_dir, dtype, kv_bytes)
        _explain(source, listed, needed, available, say)
        available = max(0, available - (needed or 0))
        chosen.append((model, source))
    names = [model.name or source.name for model, source in chosen]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise SpecError(f"two models are called {repeated[0]!r}; give one of them another name")
    return chosen


def _explain(
    source: Source,
    listed: list[str],
    needed: int | None,
    available: int,
    say: Callable[[str], None],
) -> None:
    if needed is None:
        return
    room = f"about {human_bytes(needed)} needed, {human_bytes(available)} available"
    if needed > available:
        say(f"Warning: {source.text} may not fit in memory ({room}).")
    elif len(listed) > 1:
        skipped = listed[: [parse_source(text).text for text in listed].index(source.text)]
        why = f"{', '.join(skipped)} would not fit" if skipped else "the first choice fits"
        say(f"Serving {source.text}: {why} ({room}).")


def _template(model: Model, local: LocalModel) -> ChatTemplate | None:
    if model.chat_template is None:
        return local.chat_template()
    tokens = (
        hf_folder.template_tokens(local.path)
        if local.gguf is None
        else gguf_tokenizer.template_tokens(local.gguf)
    )
    return read_chat_template(Path(model.chat_template).expanduser(), *tokens)


def room_for(model: ReadyModel, running: ModelCard | None) -> int:
    """About how much memory an engine of this model takes.

    ``running`` is what an engine of the same name says of itself: it knows what ``auto`` means.
    """
    settings = model.spec.engine
    dtype = _expected_dtype(settings.dtype)
    if settings.dtype == "auto" and running is not None and running.dtype in memory.WEIGHT_BYTES:
        dtype = running.dtype
    pool = settings.kv_cache_bytes
    if not isinstance(model.local, LocalModel) or model.task != "generate":
        pool = 0
    elif settings.kv_cache_tokens is not None:
        kv_dtype: KvDtype = "bfloat16" if settings.kv_dtype == "auto" else settings.kv_dtype
        if settings.kv_dtype == "auto" and dtype == "float32":
            kv_dtype = "float32"
        pool = settings.kv_cache_tokens * model.local.config.kv_bytes_per_token(kv_dtype)
    return memory.needed_bytes(model.local, dtype, pool + settings.kv_tiers.host_bytes)


def _expected_dtype(named: str) -> memory.Dtype:
    """The type the engine will choose, told without loading torch; the larger one if unknown."""
    if named in memory.WEIGHT_BYTES:
        return named
    try:
        flags = set(_CPU_INFO.read_text().split())
    except OSError:
        return "float32"
    return "bfloat16" if flags & _BFLOAT16_FLAGS else "float32"
