"""How an error ends a command: one sentence on stderr and an exit code, never a traceback.

Codes: 1 an error, 2 wrong usage, spec or set-up, 3 a model that cannot be had or used, 130 Ctrl-C.
``TOKENPATH_DEBUG=1`` shows the traceback too.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from tokenpath.protocol.errors import TokenpathError

DEBUG_VARIABLE = "TOKENPATH_DEBUG"
_CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""


def run_command(command: Callable[[], object]) -> int:
    """Run a command and return its exit code, with errors reported on stderr.

    An exception that is no ``TokenpathError`` is a bug and passes through, traceback and all; only
    a standard output that cannot be written is none.
    """
    if sys.stdout is None:
        # Closed by the caller (``>&-``); Python then has nothing to write to, not even in vain.
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - to the end
    try:
        command()
        sys.stdout.flush()
    except SystemExit as end:
        return _exit_code(end)
    except TokenpathError as error:
        if os.environ.get(DEBUG_VARIABLE, "0") not in {"", "0"}:
            traceback.print_exception(error)
        print(error.message, file=sys.stderr)  # noqa: T201 - the terminal is what this is for
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader (``| head``) has seen enough
        _give_up_stdout()
        return 1
    except OSError as error:
        # A file that a command names is the command's to explain; none is named by a failed write.
        if error.errno not in _CANNOT_WRITE or error.filename is not None:
            raise
        _give_up_stdout()
        print(f"the output cannot be written: {error.strerror}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _give_up_stdout() -> None:
    """Drop what Python still holds for stdout: flushing it at exit would fail and warn again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _exit_code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    return end.code if isinstance(end.code, int) else 1
