"""Assembles an engine from a model and its settings, or says why it cannot be."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import psutil
import torch

from tokenpath.config.spec import EngineSettings
from tokenpath.engine.core import EngineCore, Runner
from tokenpath.engine.cpus import default_threads
from tokenpath.engine.grammar.compiler import GrammarCompiler
from tokenpath.engine.grammar.forms import LiveForms
from tokenpath.engine.kernels.native_module import chosen_kernels
from tokenpath.engine.kernels.native_program import obstacle
from tokenpath.engine.kv_cache import kv_blocks_for
from tokenpath.engine.packed_cache import PackedCache
from tokenpath.engine.precision import settle_dtype, settle_kv_dtype, torch_dtype, weight_bits
from tokenpath.engine.runner import ModelRunner
from tokenpath.engine.warm_up import rehearse
from tokenpath.models import memory
from tokenpath.models.architecture import ModelConfig
from tokenpath.models.detokenizer import IncrementalDetokenizer
from tokenpath.models.local import LocalModel
from tokenpath.models.sizes import human_bytes
from tokenpath.models.tokenizer import Tokenizer
from tokenpath.policy.lookup import LookupDrafter
from tokenpath.policy.scheduler import Scheduler, SchedulerConfig
from tokenpath.policy.speculator import Speculator
from tokenpath.protocol.errors import ModelError, SpecError
from tokenpath.protocol.replica import ModelCard

if TYPE_CHECKING:
    from tokenpath.engine.grammar.vocabulary import Vocabulary
    from tokenpath.engine.kv_tiers.tiers import KvTiers

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction of it that is."""
_SPARE = 64
"""The largest setting that is named leaves this part of memory: what is available changes by some
megabytes from one moment to the next, and the setting has to hold at the next start too."""
Around = Callable[[ModelRunner], Runner]
"""Puts something between the core and its runner: a stopwatch, or a reader of all logits."""


def build_engine(
    model: LocalModel,
    settings: EngineSettings,
    *,
    name: str,
    progress: Progress | None = None,
    available_bytes: Callable[[], int] = memory.available_bytes,
    around: Around | None = None,
    warm: bool = False,
) -> EngineCore:
    """Load a model and put an engine around it; takes seconds.

    With ``warm`` it has computed before: what only the first request would wait for is done.
    Sets torch's number of threads for the whole process: to one, where the native kernels have
    threads of their own.

    Raises:
        ModelError: the weights alone do not fit in memory, or the model cannot be loaded (one of
            its leaves).
        SpecError: the settings do not fit the machine or the model.
    """
    device = settle_device(settings.device)
    held = dtype_for(model.config, settings)
    dtype, bits = torch_dtype(held), weight_bits(held)
    kv_dtype = settle_kv_dtype(settings.kv_dtype, held)
    if bits is not None and device.type != "cpu":
        raise SpecError(
            f"dtype {settings.dtype!r} runs on the CPU only; use 'bfloat16' on {settings.device!r}",
            param="dtype",
        )
    torch.set_num_threads(settings.threads or default_threads())
    context = min(model.config.max_context_tokens, settings.max_context_tokens or 1 << 62)
    num_blocks = kv_blocks_for(
        model.config,
        kv_dtype,
        block_tokens=settings.block_tokens,
        kv_cache_bytes=settings.kv_cache_bytes,
        kv_cache_tokens=settings.kv_cache_tokens,
        max_context_tokens=None if settings.max_context_tokens is None else context,
    )
    block_bytes = settings.block_tokens * model.config.kv_bytes_per_token(kv_dtype)
    if device.type == "cpu":
        _check_memory(model, held, settings, num_blocks, block_bytes, available_bytes())
    if progress is not None:
        progress("reading the tokenizer", 0.0)
    with ThreadPoolExecutor(1) as aside:
        # A tokenizer of 150,000 tokens takes as long as reading weights that are packed already.
        tokenizer_made = aside.submit(model.tokenizer)
        runner = ModelRunner(
            model,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device=settings.device,
            num_blocks=num_blocks,
            block_tokens=settings.block_tokens,
            bits=bits,
            packed_cache=None if bits is None else PackedCache.usual(),
            progress=progress,
        )
        tokenizer = tokenizer_made.result()
    if runner.kernels != "torch":
        # The sampler is what is left for torch. Threads of its own would spin for a while after
        # each call, on the CPUs that the native program's threads compute on.
        torch.set_num_threads(1)
    tiers = _tiers(settings, runner, model, name=name, dtype=held)
    config = SchedulerConfig(
        max_step_tokens=settings.max_step_tokens,
        max_running=settings.max_running,
        block_tokens=settings.block_tokens,
        num_blocks=num_blocks,
        max_context_tokens=context,
        prefix_cache=settings.prefix_cache,
    )
    forms = LiveForms(tokenizer)
    speculator = _speculator(settings, forms)
    scheduler = Scheduler(config, tiers=tiers, drafts=speculator, run=secrets.token_bytes(16))
    card = ModelCard(
        name=name,
        architecture=model.config.architecture,
        parameters=runner.parameters,
        vocab_size=model.config.vocab_size,
        max_context_tokens=scheduler.capacity_tokens,
        dtype=held,
        kv_dtype=kv_dtype,
        weight_bytes=runner.weight_bytes,
        kv_bytes_per_token=runner.kv_bytes_per_token,
        kv_blocks_total=num_blocks,
        block_tokens=settings.block_tokens,
    )
    make = functools.partial(
        EngineCore,
        text=_ModelText(tokenizer),
        card=card,
        eos_ids=model.config.eos_ids,
        reducer=runner.reducer,
    )
    vocabulary = _vocabulary(tokenizer, model.config)
    if warm:
        # A core of its own on the same runner: the serving one's counters stay at zero, and
        # neither its pool nor its tiers know of what was computed.
        rehearse(
            make(runner, Scheduler(config), grammars=_grammars(vocabulary, settings)), progress
        )
    process = psutil.Process()
    return make(
        runner if around is None else around(runner),
        scheduler,
        grammars=_grammars(vocabulary, settings),
        tiers=tiers,
        speculator=speculator,
        forms=forms,
        resident_bytes=lambda: int(process.memory_info().rss),
    )


def _tiers(
    settings: EngineSettings, runner: ModelRunner, model: LocalModel, *, name: str, dtype: str
) -> KvTiers | None:
    if not settings.kv_tiers.host_bytes:
        return None
    if not settings.prefix_cache:
        raise SpecError(
            "kv_tiers keep prefixes, but prefix_cache is off; turn it on or leave kv_tiers out",
            param="kv_tiers",
        )
    from tokenpath.engine.kv_tiers.build import make_tiers  # noqa: PLC0415 - only if asked for

    return make_tiers(
        settings.kv_tiers,
        runner.copier(),
        model=model,
        name=name,
        dtype=dtype,
        block_tokens=settings.block_tokens,
    )


def _speculator(settings: EngineSettings, forms: LiveForms) -> Speculator | None:
    speculation = settings.speculation
    if speculation.method == "off":
        return None
    return Speculator(LookupDrafter(), most_tokens=speculation.draft_tokens, forms=forms)


def _vocabulary(tokenizer: Tokenizer, config: ModelConfig) -> Callable[[], Vocabulary]:
    """Makes the grammars' vocabulary when it is first called, and gives the same one after."""

    @functools.cache
    def vocabulary() -> Vocabulary:
        # Loads the library, which a server without grammars never needs.
        from tokenpath.engine.grammar.vocabulary import Vocabulary  # noqa: PLC0415 - see above

        return Vocabulary(tokenizer, size=config.vocab_size, end_ids=config.eos_ids)

    return vocabulary


def _grammars(vocabulary: Callable[[], Vocabulary], settings: EngineSettings) -> GrammarCompiler:
    return GrammarCompiler(
        vocabulary,
        limit_s=settings.grammar_compile_s,
        cache_entries=settings.grammar_cache_entries,
    )


def dtype_for(config: ModelConfig, settings: EngineSettings) -> memory.Dtype:
    """The type that a model's weights will be held in."""
    native = (
        settings.dtype == "auto"
        and torch.device(settings.device).type == "cpu"
        and obstacle(config, settings.block_tokens) is None
        and chosen_kernels() is not None
    )
    return settle_dtype(settings.dtype, settings.device, native=native)


_SMALLER: dict[memory.Dtype, str] = {
    "float32": "; bfloat16 takes half",
    "bfloat16": "; int8 takes half",
    "int8": "; int4 takes less",
}
"""What to say of the next smaller type."""


class _ModelText:
    """A model's tokenizer as the core wants it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    def detokenizer(self, stop: Sequence[str], shown: Sequence[int]) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self._tokenizer, stop, shown=shown)


def settle_device(name: str) -> torch.device:
    """The torch device of a spec. Raises ``SpecError`` if this machine does not have it."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).partition("\n")[0]
        raise SpecError(f"device {name!r} cannot be used: {first_line}", param="device") from error
    if device.type == "meta":
        raise SpecError("device 'meta' computes nothing; use 'cpu' or 'cuda'", param="device")
    return device


def _check_memory(
    model: LocalModel,
    element: memory.Dtype,
    settings: EngineSettings,
    num_blocks: int,
    block_bytes: int,
    available: int,
) -> None:
    """Refuse what would be killed, or would swap, and say what would fit."""
    weights = memory.weight_bytes(model, element)
    host = settings.kv_tiers.host_bytes
    fixed = memory.needed_bytes(model, element, host)
    included = f" ({human_bytes(host)} of that are kv_tiers.host_bytes)" if host else ""
    pool = num_blocks * block_bytes
    if fixed + pool <= available:
        return
    blocks = (available - available // _SPARE - fixed) // block_bytes
    have = f"{human_bytes(available)} of memory are available"
    if blocks < 1:
        hint = _SMALLER.get(element, "")
        raise ModelError(
            f"{model.name} does not fit: {have}, but its weights take {human_bytes(weights)} in "
            f"{element} and running them {human_bytes(fixed - weights)} more{included}{hint}"
        )
    if settings.kv_cache_tokens is None:
        key, largest = "kv_cache_bytes", blocks * block_bytes
    else:
        key, largest = "kv_cache_tokens", blocks * settings.block_tokens
    raise SpecError(
        f"{model.name} does not fit with a KV cache of {human_bytes(pool)}: {have}, and "
        f"{human_bytes(fixed)} of it go to the weights and to running them{included}; the "
        f"largest {key} that fits is {largest}",
        param=key,
    )
