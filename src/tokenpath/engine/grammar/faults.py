"""A fault of the grammar library stays an error of one request.

Its Rust code reports what goes wrong as values. Where it panics all the same, Python sees an
exception that is no ``Exception``, which would end the thread that it happens in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tokenpath.protocol.errors import EngineError


@contextmanager
def library_faults() -> Iterator[None]:
    """Around calls of the library: a panic becomes an ``EngineError``."""
    try:
        yield
    except BaseException as error:
        # The class has no importable name.
        if type(error).__name__ != "PanicException":
            raise
        raise EngineError("the grammar library failed on this request's grammar") from error
