"""How an error ends a command: one sentence on stderr and an exit code, never a traceback.

Codes: 1 an error, 2 wrong usage, spec or set-up, 3 a model that cannot be had or used, 130 Ctrl-C.
``TOKENPATH_DEBUG=1`` shows the traceback too.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from tokenpath.protocol.errors import TokenpathError

DEBUG_VARIABLE = "TOKENPATH_DEBUG"
INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""


def run_command(command: Callable[[], object]) -> int:
    """Run a command and return its exit code, with errors reported on stderr.

    An exception that is no ``TokenpathError`` is a bug and passes through, traceback and all.
    """
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
    except BrokenPipeError:
        # The reader (``| head``) has seen enough. What Python still holds for it must not be
        # flushed at exit, where failing again would print a warning.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _exit_code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    return end.code if isinstance(end.code, int) else 1
