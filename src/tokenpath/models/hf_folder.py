"""A Hugging Face folder: ``config.json``, safetensors in one file or several, side files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tokenpath.models.architecture import ModelConfig
from tokenpath.models.hf_config import hf_config, token_ids
from tokenpath.models.layout import HEAD, TensorInfo, check_config, check_tensors, expected_shapes
from tokenpath.models.quantized.methods import OLD_FILES, Method, method_named, read_method
from tokenpath.models.safetensors_file import read_safetensors
from tokenpath.models.special_tokens import end_ids
from tokenpath.protocol.errors import ModelFileError, ModelUnsupportedError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"

_READABLE = {"F64", "F32", "F16", "BF16"}
_LANGUAGE_PREFIXES = ("language_model.model.", "model.language_model.")
"""Where multi-modal checkpoints keep the decoder; before and since transformers 4.52."""
_BARE_PREFIXES = ("embed_tokens.", "layers.", "norm.")
"""How a decoder saved without its head names what is ``model.…`` elsewhere."""
_OTHER_MODALITIES = ("vision_tower.", "multi_modal_projector.", "vision_model.")
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Buffers that old checkpoints saved, though they follow from the configuration."""


def is_hf_folder(path: Path) -> bool:
    """Whether a folder claims to be a Hugging Face model."""
    return (path / CONFIG).is_file()


def read_hf_folder(path: Path) -> tuple[ModelConfig, dict[str, TensorInfo]]:
    """The configuration and the tensors, under canonical names, checked against each other.

    Raises ``ModelFileError`` and ``ModelUnsupportedError``.
    """
    config_path = path / CONFIG
    raw = read_json(config_path)
    config = hf_config(raw, config_path)
    config = dataclasses.replace(config, eos_ids=_eos_ids(path, config))
    check_config(config, config_path)
    tensors: dict[str, TensorInfo] = {}
    stored_names: dict[str, str] = {}
    method = _method(raw, path)
    expected = expected_shapes(config)
    found = stored_tensors(path)
    if method is not None:
        found = method.assemble(found)
    for stored, info in found.items():
        name = _canonical(stored, config)
        if name is None:
            continue
        if method is not None and name.endswith(".bias") and name not in expected and _zero(info):
            continue  # older quantizers gave one to every module
        if info.dtype not in _READABLE and info.quantized is None:
            raise ModelUnsupportedError(
                f"{info.file}: tensor {stored!r} is stored as {info.dtype}; supported: "
                f"{', '.join(sorted(_READABLE))}"
            )
        tensors[name] = info
        stored_names[name] = stored
    if HEAD not in tensors and is_headless(config):
        config = dataclasses.replace(config, tie_embeddings=True)  # nobody will ask for logits
    check_tensors(config, tensors, path, stored_names=stored_names)
    return config, tensors


def _zero(info: TensorInfo) -> bool:
    """Whether a tensor's bytes are all zero."""
    with info.file.open("rb") as file:
        file.seek(info.offset)
        return not any(file.read(info.stored_bytes))


def _method(raw: Mapping[str, Any], path: Path) -> Method | None:
    """How the folder's weights are quantized; None: not."""
    method = read_method(raw, path / CONFIG)
    if method is not None:
        return method
    for file, name in OLD_FILES.items():
        if (path / file).is_file():
            return method_named(name, read_json(path / file), path / file)
    return None


def is_headless(config: ModelConfig) -> bool:
    """Whether a decoder was saved as a ``…Model``: without a head, so that it only embeds."""
    return config.architecture.endswith("Model")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ``ModelFileError`` if it is none."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelFileError(f"{path} is not valid JSON: {error}") from None
    except RecursionError:
        raise ModelFileError(f"{path} nests lists or objects too deeply") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} should hold a JSON object")
    return value


def optional_json(path: Path) -> dict[str, Any]:
    """As ``read_json``, but a missing file is an empty object."""
    return read_json(path) if path.is_file() else {}


def chat_template_source(path: Path) -> str | None:
    """The folder's chat template: its own file first, then ``tokenizer_config.json``'s entry.

    Of several named templates, ``default``. Raises ``ModelFileError`` if it is not text.
    """
    own = path / CHAT_TEMPLATE
    if own.is_file():
        try:
            return own.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFileError(f"{own} cannot be read as UTF-8 text: {error}") from None
    value = optional_json(path / TOKENIZER_CONFIG).get("chat_template")
    if isinstance(value, list):
        named = (e for e in value if isinstance(e, dict) and e.get("name") == "default")
        value = next((e.get("template") for e in named), None)
    if value is not None and not isinstance(value, str):
        raise ModelFileError(f"{path / TOKENIZER_CONFIG}: 'chat_template' should be a string")
    return value


def _canonical(stored: str, config: ModelConfig) -> str | None:
    """The canonical name, or None for what a text model has no use for."""
    if stored.removeprefix("model.").startswith(_OTHER_MODALITIES):
        return None
    if stored.endswith(_IGNORED_SUFFIXES):
        return None
    for prefix in _LANGUAGE_PREFIXES:
        if stored.startswith(prefix):
            stored = "model." + stored.removeprefix(prefix)
    if stored.startswith(_BARE_PREFIXES):
        stored = "model." + stored
    stored = stored.removeprefix("language_model.") if stored.endswith(HEAD) else stored
    if stored == HEAD and config.tie_embeddings:
        return None  # a copy of the embedding, which transformers overrides too
    return stored


def stored_tensors(path: Path) -> dict[str, TensorInfo]:
    """All tensors of a folder's safetensors under their own names. Raises ``ModelFileError``."""
    index_path = path / INDEX
    if index_path.is_file():
        return _indexed(path, index_path)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelFileError(f"{path} has a {CONFIG}, but no *.safetensors file")
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        found = read_safetensors(file)
        twice = tensors.keys() & found.keys()
        if twice:
            name = min(twice)
            raise ModelFileError(
                f"{path} has the tensor {name!r} in both {tensors[name].file.name} and {file.name}"
            )
        tensors |= found
    return tensors


def _indexed(path: Path, index_path: Path) -> dict[str, TensorInfo]:
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelFileError(f"{index_path} should have a 'weight_map' of tensor names to files")
    shards: dict[str, Mapping[str, TensorInfo]] = {}
    tensors: dict[str, TensorInfo] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelFileError(f"{index_path}: {shard!r} is not a file name in the same folder")
        if shard not in shards:
            if not (path / shard).is_file():
                raise ModelFileError(
                    f"{path} lacks the shard {shard!r}, which {INDEX} names for tensor {name!r}"
                )
            shards[shard] = read_safetensors(path / shard)
        if name not in shards[shard]:
            raise ModelFileError(
                f"{path / shard} lacks the tensor {name!r}, which {INDEX} says is in it"
            )
        tensors[name] = shards[shard][name]
    return tensors


def _eos_ids(path: Path, config: ModelConfig) -> tuple[int, ...]:
    generation_path = path / GENERATION_CONFIG
    named = token_ids(optional_json(generation_path).get("eos_token_id"), generation_path)
    chat = chat_template_source(path) is not None
    return end_ids(
        (*named, *config.eos_ids), _special_tokens(path), chat=chat, vocab_size=config.vocab_size
    )


def _special_tokens(path: Path) -> dict[str, int]:
    """The special tokens' ids by their text, from the smaller of the two files that may say."""
    decoder = optional_json(path / TOKENIZER_CONFIG).get("added_tokens_decoder")
    if isinstance(decoder, dict):
        listed = [(token, index) for index, token in decoder.items()]
    else:
        added = optional_json(path / TOKENIZER).get("added_tokens")
        added = added if isinstance(added, list) else []
        listed = [(token, token.get("id")) for token in added if isinstance(token, dict)]
    return {
        token["content"]: int(index)
        for token, index in listed
        if isinstance(token, dict)
        and token.get("special")
        and isinstance(token.get("content"), str)
        and str(index).isdecimal()
    }


def load_tokenizer(path: Path) -> Tokenizer:
    """The folder's ``tokenizer.json``.

    It also says what is added around a text; flags such as ``add_bos_token`` in
    ``tokenizer_config.json`` are for folders without it, and transformers ignores them too. Raises
    ``ModelFileError`` if it is missing or broken.
    """
    file = path / TOKENIZER
    if not file.is_file():
        raise ModelFileError(f"{path} has no {TOKENIZER}, which its text would be tokenized by")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001  tokenizers raises bare Exception for any broken file
        raise ModelFileError(f"{file} is not a tokenizer that can be read: {error}") from None


def template_tokens(path: Path) -> tuple[str, str]:
    """The texts of ``bos_token`` and ``eos_token``, as chat templates use them; empty if none."""
    settings = optional_json(path / TOKENIZER_CONFIG)
    bos, eos = (_token_text(settings.get(key)) for key in ("bos_token", "eos_token"))
    return bos, eos


def _token_text(value: object) -> str:
    """A token's text, written alone or, in older files, as an object with ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""
