"""A model on this disk, whatever its format: opened in a moment, checked, nothing decoded.

Opening reads headers only: no tensor is touched and torch is not imported, so that the gateway and
``tokenpath models show`` can do it. ``weights`` reads the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenpath.config import paths
from tokenpath.models import gguf_tokenizer, hf_folder
from tokenpath.models.architecture import ModelConfig
from tokenpath.models.gguf_file import GgufFile, is_gguf
from tokenpath.models.gguf_model import first_gguf, read_gguf_model
from tokenpath.models.layout import TensorInfo
from tokenpath.models.template import ChatTemplate
from tokenpath.models.tokenizer import Tokenizer
from tokenpath.protocol.errors import ModelFileError

__all__ = ["LocalModel", "TensorInfo", "open_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """One checkpoint: its architecture, and where its tensors, tokenizer and template are."""

    name: str
    path: Path
    """The GGUF file (the first of its shards) or the Hugging Face folder."""
    format: Literal["gguf", "safetensors"]
    config: ModelConfig
    tensors: Mapping[str, TensorInfo]
    """By canonical name, such as ``model.layers.0.self_attn.q_proj.weight``. A tied head is not
    among them."""
    gguf: GgufFile | None = None
    """The GGUF's metadata; None for safetensors."""

    def tokenizer(self, cache_dir: Path | None = None) -> Tokenizer:
        """The model's tokenizer.

        Built from a GGUF's metadata it is kept in ``cache_dir`` (by default the cache folder of
        ``config.paths``), which makes the second start fast. Raises ``ModelFileError`` or
        ``ModelUnsupportedError``.
        """
        if self.gguf is None:
            backend = hf_folder.load_tokenizer(self.path)
        else:
            backend = gguf_tokenizer.load(self.gguf, cache_dir or paths.cache_dir())
        return Tokenizer(
            backend,
            bos_id=self.config.bos_id,
            eos_ids=self.config.eos_ids,
            model_vocab_size=self.config.vocab_size,
        )

    def chat_template(self) -> ChatTemplate | None:
        """The template that came with the model; None for a base model.

        Raises ``ModelFileError`` if there is one that is no valid Jinja.
        """
        if self.gguf is None:
            source = hf_folder.chat_template_source(self.path)
        else:
            source = self.gguf.text("tokenizer.chat_template")
        return None if source is None else ChatTemplate(source, *self.template_tokens())

    def template_tokens(self) -> tuple[str, str]:
        """What ``bos_token`` and ``eos_token`` mean in a template for this model; empty if none.

        For a template that does not come with the model: ``read_chat_template(path, *tokens)``.
        """
        if self.gguf is None:
            return hf_folder.template_tokens(self.path)
        return gguf_tokenizer.template_tokens(self.gguf)


def open_model(path: Path, *, name: str | None = None) -> LocalModel:
    """Open a GGUF file, a folder with one GGUF model, or a Hugging Face folder.

    ``name`` defaults to the file's or folder's own. Raises ``ModelFileError`` if it is truncated,
    corrupt or contradicts itself, ``ModelUnsupportedError`` if the engine cannot run it.
    """
    own_name = name or (path.name if path.is_dir() else path.stem)
    if path.is_dir():
        if hf_folder.is_hf_folder(path):
            config, tensors = hf_folder.read_hf_folder(path)
            return LocalModel(
                name=own_name, path=path, format="safetensors", config=config, tensors=tensors
            )
        found = first_gguf(path)
        if found is None:
            raise ModelFileError(
                f"{path} holds no model: neither a *.gguf file nor a {hf_folder.CONFIG} with "
                "*.safetensors"
            )
        path = found
    elif not path.is_file():
        raise ModelFileError(f"{path} does not exist")
    elif not is_gguf(path) and path.suffix == ".safetensors":
        raise ModelFileError(
            f"{path} is one file of a Hugging Face model; open the folder that it is in"
        )
    gguf, config, tensors = read_gguf_model(path)
    return LocalModel(
        name=own_name, path=path, format="gguf", config=config, tensors=tensors, gguf=gguf
    )
