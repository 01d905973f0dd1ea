"""How long something that failed is left alone: longer each time it fails again, and not at all once it has worked."""

from __future__ import annotations

FIRST_SECONDS = 2.0
LONGEST_SECONDS = 300.0


def cooldown_seconds(failures: int, *, first: float = FIRST_SECONDS, longest: float = LONGEST_SECONDS) -> float:
    """The cooldown after so many failures in a row, of which the last has just happened: doubled by each of them."""
    return float(min(longest, first * 2 ** min(failures - 1, 30)))
