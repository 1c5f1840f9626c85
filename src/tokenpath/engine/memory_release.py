"""Giving memory back to the machine after a model has been dropped."""

from __future__ import annotations

import contextlib
import ctypes
import gc


def give_back() -> None:
    """Collect cycles, and have the C library return the pages that it keeps for later.

    Large tensors go back by themselves when they are freed; what was read and parsed in small
    pieces does not, with glibc.
    """
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)
