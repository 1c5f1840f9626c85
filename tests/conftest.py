"""Shared fixtures. ``HYPOTHESIS_PROFILE=soak`` runs the property tests at length."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "default",
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile("soak", settings.get_profile("default"), max_examples=10_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure() -> None:
    """Give each of pytest-xdist's workers CPUs of its own.

    An engine's threads wait for each other after every operation, so those of two engines on the
    same CPUs would keep each other from working.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None or not hasattr(os, "sched_setaffinity"):
        return
    number, workers = int(worker.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    own = sorted(os.sched_getaffinity(0))[number::workers]
    if own:
        os.sched_setaffinity(0, own)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory) -> Iterator[None]:
    """Packed weights of the tests' models must not push out those of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENPATH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    """The real Gemma 3 270M GGUF; `make test` pulls it before the tests start."""
    from tokenpath.config.paths import models_dir
    from tokenpath.models.source import resolve

    return resolve("gemma-3-270m", models_dir=models_dir(), pull=False)
