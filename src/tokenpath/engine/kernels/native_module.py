"""The compiled kernels, if they are there and wanted.

``TOKENPATH_KERNELS`` chooses for a deployment: ``auto`` (the default), ``torch``, or the name of an
instruction set that this processor has (``avx512``, ``avx2``, ``portable``).
"""

from __future__ import annotations

import importlib
import logging
import os
from functools import cache
from types import ModuleType

from tokenpath.protocol.errors import SpecError

VARIABLE = "TOKENPATH_KERNELS"
log = logging.getLogger(__name__)


@cache
def native_module() -> ModuleType | None:
    """The extension module; None where it was not built."""
    try:
        return importlib.import_module("tokenpath.engine.kernels._native")
    except ImportError:
        return None


def chosen_kernels() -> str | None:
    """The instruction set to compute with; None: torch.

    Raises ``SpecError`` when the variable names one that this processor or build does not have.
    """
    wanted = os.environ.get(VARIABLE, "auto")
    module = native_module()
    usable: list[str] = [] if module is None else module.usable()
    if wanted == "torch":
        return None
    if wanted == "auto":
        if not usable:
            log.warning(
                "the native kernels were not built (a C++ compiler was missing at installation); "
                "computing with torch, which is several times slower"
            )
            return None
        return usable[0]
    if wanted not in usable:
        have = ", ".join(["auto", "torch", *usable])
        raise SpecError(f"{VARIABLE} is {wanted!r}, but this machine offers: {have}")
    return wanted
