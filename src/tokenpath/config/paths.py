"""Where tokenpath keeps things on this machine: state, models and caches.

Each folder has an environment variable of its own and falls back to the XDG base directories, so
that a laptop, a container and a test each choose without a flag. Variables are read at every call:
a test or a notebook may change them at any time.
"""

from __future__ import annotations

import os
from pathlib import Path

from tokenpath.protocol.errors import SpecError

HOME_VARIABLE = "TOKENPATH_HOME"
MODELS_VARIABLE = "TOKENPATH_MODELS"
CACHE_VARIABLE = "TOKENPATH_CACHE"


def home_dir() -> Path:
    """The folder of durable state: the API keys' database.

    ``TOKENPATH_HOME``, else ``$XDG_STATE_HOME/tokenpath``, else ``~/.local/state/tokenpath``.
    Created with mode 0700. Raises ``SpecError`` if it cannot be a folder that we may use.
    """
    return _private_folder(HOME_VARIABLE, "XDG_STATE_HOME", ".local/state", "tokenpath")


def state_file() -> Path:
    """The state database, in ``home_dir()``; it may not exist yet. Raises as ``home_dir``."""
    return home_dir() / "state.db"


def models_dir() -> Path:
    """The folder of pulled models.

    ``TOKENPATH_MODELS``, else ``$XDG_DATA_HOME/tokenpath/models``, else
    ``~/.local/share/tokenpath/models``. Created with mode 0700. Raises ``SpecError`` if it cannot
    be a folder that we may use.
    """
    return _private_folder(MODELS_VARIABLE, "XDG_DATA_HOME", ".local/share", "tokenpath/models")


def cache_dir() -> Path:
    """The folder of what may be deleted at any time.

    ``TOKENPATH_CACHE``, else ``$XDG_CACHE_HOME/tokenpath``, else ``~/.cache/tokenpath``. Created
    with mode 0700. Raises ``SpecError`` if it cannot be a folder that we may use.
    """
    return _private_folder(CACHE_VARIABLE, "XDG_CACHE_HOME", ".cache", "tokenpath")


def _private_folder(variable: str, xdg_variable: str, fallback: str, leaf: str) -> Path:
    own = os.environ.get(variable)
    folder = Path(own) if own else _xdg_base(xdg_variable, fallback) / leaf
    try:
        # A shell expands ``~`` itself; a systemd unit or a container's manifest does not.
        folder = folder.expanduser().absolute()
        if folder.parent != folder:
            folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpecError(
            f"{folder} cannot be used as a folder ({reason}); "
            f"set {variable} to one that you may write to"
        ) from error
    return folder


def _xdg_base(variable: str, fallback: str) -> Path:
    value = os.environ.get(variable)
    # The XDG specification says that a relative path here is to be ignored.
    if value and Path(value).is_absolute():
        return Path(value)
    try:
        return Path.home() / fallback
    except RuntimeError as error:
        raise SpecError(
            f"this user has no home folder; set {variable} or HOME to an absolute path"
        ) from error
