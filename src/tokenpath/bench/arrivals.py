"""When requests arrive: an open loop's schedule, decided before the run and by nothing else.

An open loop sends at these moments however slow the server answers; that is what independent users
do, and what a closed loop hides.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_STREAM = 1
"""Keeps the arrivals' random stream apart from the lengths' under one seed."""
_BATCH = 256


def poisson_offsets(rate: float, seed: int) -> Iterator[float]:
    """Yield the moments, in seconds from the start, of a Poisson process; it never ends.

    ``rate`` is in arrivals per second and above 0. The same rate and seed give the same moments.
    """
    rng = np.random.default_rng([seed, _STREAM])
    now = 0.0
    while True:
        for gap in rng.exponential(1.0 / rate, _BATCH).tolist():
            now += gap
            yield now
