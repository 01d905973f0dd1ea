"""The one place where centicores (PostgreSQL) and whole cores (Redis, placement) meet.

Source of the rules: the Redis accounting reference ("the unit invariant") and design section 4: what is
booked rounds up, what may be booked rounds down, so every rounding error under-books.
"""

from __future__ import annotations

CENTICORES_PER_CORE = 100
UNLIMITED = -1
MOST_CENTICORES = 2**31 - 1
"""What the columns of caps hold. A layer that asks for more, or a host that has more, is a mistake."""
MOST_GPUS = MOST_CENTICORES
MOST_KB = 2**50
"""2^60 bytes: no machine has as much memory."""


def centicores(cores: int) -> int:
    """Whole cores to centicores, for a value on its way into PostgreSQL."""
    return cores * CENTICORES_PER_CORE


def booked_cores(reserved_centicores: int) -> int:
    """Cores one proc occupies: rounded up, so that half a core never counts as none."""
    return -(-reserved_centicores // CENTICORES_PER_CORE)


def idle_cores(idle_centicores: int) -> int:
    """Whole cores that can still be booked on a host: rounded down, never negative."""
    return max(0, idle_centicores // CENTICORES_PER_CORE)


def cap_cores(cap_centicores: int) -> int | float:
    """A cap as the counters hold it, in cores.

    The sentinels (0 and negative) pass through unchanged. A positive cap below one core becomes that fraction
    rather than 0, because 0 means "unlimited" to a folder or a job; the fraction refuses every booking.
    """
    if cap_centicores <= 0:
        return cap_centicores
    if cap_centicores < CENTICORES_PER_CORE:
        return cap_centicores / CENTICORES_PER_CORE
    return cap_centicores // CENTICORES_PER_CORE
