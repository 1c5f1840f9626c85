"""Byte counts in the words of people, for messages and tables."""

from __future__ import annotations

_UNITS = ("B", "kB", "MB", "GB", "TB")


def human_bytes(count: int) -> str:
    """``1117320768`` is ``1.1 GB`` (powers of 1,000, as disks and networks are sold)."""
    value = float(count)
    for unit in _UNITS[:-1]:
        if abs(value) < 1000:  # noqa: PLR2004 - the base of decimal prefixes
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} {_UNITS[-1]}"
