"""tokenpath: the complete inference path for generative models.

The public names are loaded on first use, so that importing the package costs nothing and needs no
torch: ``Engine`` runs a model in this process, without a server; ``Spec`` is the deployment file.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenpath.config.spec import Spec as Spec
    from tokenpath.engine.offline import Engine as Engine
    from tokenpath.protocol.errors import TokenpathError as TokenpathError
    from tokenpath.protocol.grammar import Grammar as Grammar
    from tokenpath.protocol.request import SamplingParams as SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "Engine": "tokenpath.engine.offline",
    "Grammar": "tokenpath.protocol.grammar",
    "SamplingParams": "tokenpath.protocol.request",
    "Spec": "tokenpath.config.spec",
    "TokenpathError": "tokenpath.protocol.errors",
}

__all__ = ["Engine", "Grammar", "SamplingParams", "Spec", "TokenpathError", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tokenpath' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
