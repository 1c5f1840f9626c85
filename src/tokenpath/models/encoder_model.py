"""An encoder on this disk: opened in a moment, checked, nothing decoded; ``local``'s sibling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenpath.models import hf_folder
from tokenpath.models.encoder import EncoderConfig, encoder_config, encoder_shapes, is_encoder
from tokenpath.models.input_tokenizer import InputTokenizer
from tokenpath.models.layout import TensorInfo
from tokenpath.models.pooling import Recipe, read_recipe
from tokenpath.protocol.errors import ModelFileError, ModelUnsupportedError

_READABLE = {"F64", "F32", "F16", "BF16"}
_PREFIXES = ("bert.", "roberta.")
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
_OTHER_HEADS = ("cls.", "lm_head.")
"""Of masked language modelling and pre-training, which say nothing about a text as a whole."""
_OLD_LEAVES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderModel:
    """One encoder's checkpoint: its architecture, and where its tensors and tokenizer are."""

    name: str
    path: Path
    config: EncoderConfig
    tensors: Mapping[str, TensorInfo]
    """By the names of ``encoder_shapes``; exactly those."""
    recipe: Recipe

    @property
    def max_tokens(self) -> int:
        """Longest input: what has a position, or less where the folder says so."""
        return min(self.config.max_context_tokens, self.recipe.max_tokens or 1 << 62)

    def input_tokenizer(self) -> InputTokenizer:
        """Raises ``ModelFileError`` if the folder has no readable tokenizer."""
        backend = hf_folder.load_tokenizer(self.path)
        return InputTokenizer(backend, vocab_size=self.config.vocab_size)


def is_encoder_folder(path: Path) -> bool:
    """Whether a path is a Hugging Face folder with an encoder. Raises ``ModelFileError``."""
    return (
        path.is_dir()
        and hf_folder.is_hf_folder(path)
        and is_encoder(hf_folder.read_json(path / hf_folder.CONFIG))
    )


def open_encoder(path: Path, *, name: str | None = None) -> EncoderModel:
    """Open a Hugging Face folder with an encoder. ``name`` defaults to the folder's own.

    Raises ``ModelFileError`` if it is truncated, corrupt or contradicts itself,
    ``ModelUnsupportedError`` if the engine cannot run it.
    """
    config_path = path / hf_folder.CONFIG
    config = encoder_config(hf_folder.read_json(config_path), config_path)
    tensors: dict[str, TensorInfo] = {}
    for stored, info in hf_folder.stored_tensors(path).items():
        canonical = _canonical(stored, config)
        if canonical is not None:
            tensors[canonical] = info
    _check(config, tensors, path)
    return EncoderModel(
        name=name or path.name,
        path=path,
        config=config,
        tensors=tensors,
        recipe=read_recipe(path),
    )


def _canonical(stored: str, config: EncoderConfig) -> str | None:
    """The name in ``encoder_shapes``, or None for what no embedding and no score needs."""
    name = stored
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    for old, new in _OLD_LEAVES.items():
        name = name.replace(old, new)
    if name in _BUFFERS or name.startswith(_OTHER_HEADS):
        return None
    if name.startswith("pooler.") and not (config.labels and config.family == "bert"):
        return None
    return name


def _check(config: EncoderConfig, tensors: Mapping[str, TensorInfo], source: Path) -> None:
    expected = encoder_shapes(config)
    for name, shape in expected.items():
        found = tensors.get(name)
        if found is None:
            raise ModelFileError(
                f"{source} lacks the tensor {name!r} of shape {list(shape)}, which its "
                f"{config.architecture} configuration calls for"
            )
        if found.shape != shape:
            raise ModelFileError(
                f"{source}: tensor {name!r} has shape {list(found.shape)}, but its configuration "
                f"calls for {list(shape)}"
            )
        if found.dtype not in _READABLE:
            raise ModelUnsupportedError(
                f"{found.file}: tensor {name!r} is stored as {found.dtype}; supported: "
                f"{', '.join(sorted(_READABLE))}"
            )
    unused = sorted(tensors.keys() - expected.keys())
    if unused:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        raise ModelUnsupportedError(
            f"{source} holds the tensor {unused[0]!r}{more}, which {config.architecture} does not "
            "use here"
        )
