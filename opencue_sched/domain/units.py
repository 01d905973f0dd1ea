"""OpenCue's units.

The one place where centicores (PostgreSQL) and whole cores (Redis, placement) meet. What is booked rounds up, what may
be booked rounds down, so every rounding error under-books (Redis accounting reference, "the unit invariant").
"""

from __future__ import annotations

from opencue_sched.errors import InvalidInput

INT_MAX = 2**31 - 1
"""The most OpenCue's integer columns hold. A layer that asks for more centicores or GPUs, or a host that has more, is a
mistake: no cap holds as much."""
CENTICORES_PER_CORE = 100
KB_PER_GIB = 1024**2
UNLIMITED = -1
"""How OpenCue's cap columns say that there is no cap."""
MOST_KB = 2**50
"""The most memory that is believed of a machine or a layer: 2^60 bytes, which no machine has."""


def centicores_of(cores: float) -> int:
    """Cores as people write them, maybe with a fraction, in centicores. Raises InvalidInput for any other number."""
    if not abs(cores) <= INT_MAX / CENTICORES_PER_CORE:  # nor is NaN
        raise InvalidInput(f"{cores} is not a number of cores")
    if cores != 0 and round(cores * CENTICORES_PER_CORE) == 0:
        raise InvalidInput(f"{cores} is less than a hundredth of a core, the least OpenCue counts")
    return round(cores * CENTICORES_PER_CORE)


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
    return cap_centicores // CENTICORES_PER_CORE or cap_centicores / CENTICORES_PER_CORE


def enforced(cap: float | None) -> float | None:
    """A folder's or job's cap of cores or GPUs; None without one (NULL, 0 or negative)."""
    return cap if cap and cap > 0 else None


def memory_text(kilobytes: float) -> str:
    """KB as GiB, or as MiB below one."""
    gib = kilobytes / KB_PER_GIB
    return f"{gib * 1024:.0f}M" if abs(gib) < 1 else f"{gib:.1f}G"


def duration_text(seconds: float) -> str:
    """A duration as every output for people has it: ``45s``, ``12m``, ``3h 20m``, ``2d 4h``."""
    if seconds < 100:
        return f"{max(0, int(seconds))}s"
    hours, minutes = divmod(int(seconds) // 60, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    return f"{hours}h {minutes}m" if hours else f"{minutes}m"
