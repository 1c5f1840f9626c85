"""Any model that can be served, whatever it does: opened, and its task settled.

A task is what a model is served for. An encoder without a head embeds; one whose head has a single
logit reranks, one with several classifies; a decoder generates, or embeds if its folder was written
by sentence-transformers or the spec says so.
"""

from __future__ import annotations

from pathlib import Path

from tokenpath.config import paths
from tokenpath.models import gguf_tokenizer, hf_folder
from tokenpath.models.encoder_model import EncoderModel, is_encoder_folder, open_encoder
from tokenpath.models.input_tokenizer import InputTokenizer
from tokenpath.models.local import LocalModel, open_model
from tokenpath.models.pooling import Pooling, Recipe, read_recipe
from tokenpath.protocol.errors import SpecError
from tokenpath.protocol.replica import Task

Servable = LocalModel | EncoderModel

DECODER_TOKENS = 8192
"""Longest input of a decoder, unless the spec says more; OpenAI's models read as many."""

_GGUF_POOLING: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}


def open_servable(path: Path, *, name: str | None = None) -> Servable:
    """Open whatever is at ``path``. Raises as ``open_model`` and ``open_encoder``."""
    if is_encoder_folder(path):
        return open_encoder(path, name=name)
    return open_model(path, name=name)


def recipe_of(model: Servable) -> Recipe:
    """What the model's files say about pooling. Raises ``ModelFileError`` and its siblings."""
    if isinstance(model, EncoderModel):
        return model.recipe
    if model.gguf is None:
        return read_recipe(model.path)
    architecture = model.gguf.text("general.architecture")
    named = model.gguf.integer(f"{architecture}.pooling_type")
    pooling = None if named is None else _GGUF_POOLING.get(named)
    return Recipe(pooling, None if pooling is None else True)


def settle_task(model: Servable, asked: str) -> Task:
    """What ``model`` is served for; ``asked`` is the spec's ``engine.task``.

    Raises ``SpecError`` if it cannot do what is asked.
    """
    able = _tasks(model)
    if asked == "auto":
        return able[0]
    for task in able:
        if task == asked:
            return task
    raise SpecError(
        f"task {asked!r} is not what {model.name} ({model.config.architecture}) can do; it can "
        f"{' or '.join(able)}",
        param="task",
    )


def _tasks(model: Servable) -> tuple[Task, ...]:
    """What a model can do, what it does by itself first."""
    if isinstance(model, EncoderModel):
        match len(model.config.labels):
            case 0:
                return ("embed",)
            case 1:
                return ("rerank",)
            case _:
                return ("classify",)
    if hf_folder.is_headless(model.config):
        return ("embed",)
    return ("embed", "generate") if recipe_of(model).present else ("generate", "embed")


def input_tokenizer(model: Servable) -> InputTokenizer:
    """How texts become inputs of ``model``. Raises ``ModelFileError``."""
    if isinstance(model, EncoderModel):
        return model.input_tokenizer()
    if model.gguf is None:
        backend = hf_folder.load_tokenizer(model.path)
    else:
        backend = gguf_tokenizer.load(model.gguf, paths.cache_dir())
    return InputTokenizer(backend, vocab_size=model.config.vocab_size)


def input_limit(model: Servable, cap: int | None) -> int:
    """Longest input in tokens; ``cap`` is the spec's ``max_context_tokens``.

    An input is read in one step, so what it takes grows with the square of its length; a decoder's
    context may be far longer than anybody embeds.
    """
    if isinstance(model, EncoderModel):
        own = model.max_tokens
    else:
        own = min(model.config.max_context_tokens, recipe_of(model).max_tokens or 1 << 62)
        cap = cap or DECODER_TOKENS
    return own if cap is None else min(own, cap)
