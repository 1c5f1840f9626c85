"""Where environments, converted models and sittings are kept: below tokenpath's cache folder.

All of it may be deleted at any time; `make bench-peers` makes it again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.peers.rivals import OURS, RIVALS
from tokenpath.config.paths import cache_dir

REPOSITORY = Path(__file__).parents[2]
"""The drivers are run from here, so that they find `bench.peers.drivers`."""


def peers_dir() -> Path:
    """Everything of this program; created."""
    folder = cache_dir() / "peers"
    folder.mkdir(exist_ok=True)
    return folder


def environment_dir(rival: str) -> Path:
    """A rival's virtual environment, whether it exists or not."""
    return peers_dir() / "environments" / rival


def python_of(rival: str) -> Path:
    """The interpreter that runs a rival's drivers and converters."""
    if rival == OURS:
        return Path(sys.executable)
    assert rival in RIVALS
    return environment_dir(rival) / "bin" / "python"


def model_dir(model: str) -> Path:
    """Where the converted forms of a model are; created."""
    folder = peers_dir() / "models" / model
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def sittings_dir() -> Path:
    """Where journals go that were given no name; created."""
    folder = peers_dir() / "sittings"
    folder.mkdir(exist_ok=True)
    return folder
