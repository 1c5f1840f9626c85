"""Finds the file of a model's family: every other module of this folder is one, by its name."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Protocol, cast

from tokenpath.engine import families
from tokenpath.engine.layers import Decoder
from tokenpath.engine.loading import WeightLoader
from tokenpath.models.architecture import ModelConfig
from tokenpath.protocol.errors import ModelUnsupportedError


class Family(Protocol):
    """What a family's module offers."""

    def build(self, config: ModelConfig, weights: WeightLoader) -> Decoder:
        """Assemble the model, taking every tensor it needs from ``weights``.

        Raises ``ModelFileError`` through ``weights`` when a tensor is missing or misshapen.
        """
        ...


def family_names() -> tuple[str, ...]:
    """The families there are, sorted."""
    found = {module.name for module in pkgutil.iter_modules(families.__path__)}
    return tuple(sorted(found - {"registry"}))


def find_family(config: ModelConfig) -> Family:
    """The family that runs a model. Raises ``ModelUnsupportedError`` naming those there are."""
    names = family_names()
    if config.family not in names:
        raise ModelUnsupportedError(
            f"the engine has no family {config.family!r} for architecture "
            f"{config.architecture}; it runs {', '.join(names)}"
        )
    module = importlib.import_module(f"{families.__name__}.{config.family}")
    return cast("Family", module)
