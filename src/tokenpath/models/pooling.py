"""How a model's token vectors become one vector: what its folder says, and what the spec says.

sentence-transformers writes beside a checkpoint which modules follow the transformer: a pooling, a
normalisation, perhaps a dense layer. ``read_recipe`` reads those files; ``settle_pooling`` puts the
spec's word before the files' and the usual rule after them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenpath.protocol.errors import ModelFileError, ModelUnsupportedError

Pooling = Literal["mean", "cls", "last"]
PoolingName = Literal["auto", "mean", "cls", "last"]

MODULES = "modules.json"
SENTENCE_CONFIG = "sentence_bert_config.json"

_MODES: Mapping[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_OLD_MODES: Mapping[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a folder says; None where it says nothing."""

    pooling: Pooling | None = None
    normalize: bool | None = None
    max_tokens: int | None = None
    """Longest text that the model was trained for."""

    @property
    def present(self) -> bool:
        """Whether the folder was written by sentence-transformers."""
        return self.pooling is not None


@dataclass(frozen=True, slots=True)
class SettledPooling:
    """What is done with a text's token vectors."""

    pooling: Pooling
    normalize: bool
    """Divide by the Euclidean norm."""


def settle_pooling(
    recipe: Recipe, *, causal: bool, pooling: PoolingName, normalize: bool | None
) -> SettledPooling:
    """The spec's word, else the folder's, else the rule of the kind.

    The rule for encoders is sentence-transformers' own for a bare checkpoint: the mean, as it
    comes. In a causal model only the last token has seen the whole text; its vector is normalised.
    """
    usual: Pooling = "last" if causal else "mean"
    if normalize is None:
        normalize = recipe.normalize
    return SettledPooling(
        pooling=pooling if pooling != "auto" else recipe.pooling or usual,
        normalize=causal if normalize is None else normalize,
    )


def read_recipe(folder: Path) -> Recipe:
    """What sentence-transformers' files in a model's folder say; empty if there are none.

    Raises ``ModelFileError`` if they cannot be read, ``ModelUnsupportedError`` if they call for
    something that the engine does not compute.
    """
    if not (folder / MODULES).is_file():
        return Recipe(max_tokens=_max_tokens(folder))
    modules = _json(folder / MODULES)
    if not isinstance(modules, list):
        raise ModelFileError(f"{folder / MODULES} should hold a list")
    pooling: Pooling | None = None
    normalize = False
    for module in modules:
        kind, path = _module(module, folder)
        match kind:
            case "Transformer":
                if path != folder:
                    raise ModelUnsupportedError(
                        f"{folder / MODULES} keeps the transformer in {path.name!r}; supported: "
                        "the model's own folder"
                    )
            case "Pooling":
                pooling = _pooling_mode(path / "config.json")
            case "Normalize":
                normalize = True
            case _:
                raise ModelUnsupportedError(
                    f"{folder / MODULES} calls for the module {kind!r}; supported: Transformer, "
                    "Pooling, Normalize"
                )
    return Recipe(pooling or "mean", normalize, _max_tokens(folder))


def _module(module: object, folder: Path) -> tuple[str, Path]:
    """A module's class and its folder."""
    if isinstance(module, dict):
        kind, path = module.get("type"), module.get("path", "")
        if isinstance(kind, str) and isinstance(path, str) and Path(path).name == path:
            return kind.rpartition(".")[2], folder / path if path else folder
    raise ModelFileError(f"{folder / MODULES}: {str(module)[:80]!r} is not a module with its path")


def _pooling_mode(file: Path) -> Pooling:
    config = _object(file)
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in _OLD_MODES.items() if config.get(key)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in _MODES:
        raise ModelUnsupportedError(
            f"{file} pools by {modes!r}; supported: one of {', '.join(_MODES)}"
        )
    if config.get("include_prompt") is False:
        raise ModelUnsupportedError(
            f"{file} leaves the prompt's tokens out of the pooling; supported: all tokens"
        )
    return _MODES[modes[0]]


def _max_tokens(folder: Path) -> int | None:
    file = folder / SENTENCE_CONFIG
    if not file.is_file():
        return None
    value = _object(file).get("max_seq_length")
    if value is not None and (type(value) is not int or value < 1):
        raise ModelFileError(f"{file}: 'max_seq_length' is {value!r}, but should be at least 1")
    return value


def _object(path: Path) -> dict[str, Any]:
    value = _json(path)
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} should hold a JSON object")
    return value


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not valid JSON: {error}") from None
