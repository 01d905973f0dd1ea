"""OpenCue's units: which way an amount is rounded, and how amounts are written for people.

PostgreSQL has centicores, hundredths of a core; the counters in Redis and the planner have cores. What a proc takes is
rounded up to whole cores, what may still be booked is rounded down, so every rounding error books less than the farm
has, never more (docs/references.md). Exact amounts are multiplied or divided by CENTICORES_PER_CORE wherever they are
used. A KB has 1024 bytes everywhere.
"""

from __future__ import annotations

import math

from opencue_sched.errors import InvalidInput

INT_MAX = 2**31 - 1
"""The most OpenCue's integer columns hold. A layer that asks for more centicores or GPUs, or a host that has more, is a
mistake: no cap holds as much."""
CENTICORES_PER_CORE = 100
"""OpenCue counts cores in hundredths (its ``core points``)."""
KB_PER_GIB = 1024**2
"""OpenCue counts memory in KB, which are 1024 bytes."""
UNLIMITED = -1
"""What OpenCue writes into a column of a cap where there is no cap. Any number below 0 says the same."""
MOST_KB = 2**50
"""The most memory that is believed of a machine or a layer: 2^60 bytes, which no machine has."""


def centicores_of(cores: float) -> int:
    """Cores as people write them, maybe with a fraction, in centicores, rounded to the nearest. Cores below 0 stay
    below 0: in some columns they have a meaning of their own.

    Raises InvalidInput for cores that no integer column holds, for NaN, and for a fraction that would round to none.
    """
    if abs(cores) > INT_MAX / CENTICORES_PER_CORE or math.isnan(cores):
        raise InvalidInput(f"{cores} is not a number of cores")
    if cores != 0 and round(cores * CENTICORES_PER_CORE) == 0:
        raise InvalidInput(f"{cores} is less than a hundredth of a core, the least OpenCue counts")
    return round(cores * CENTICORES_PER_CORE)


def booked_cores(reserved_centicores: int) -> int:
    """Cores one proc occupies: rounded up, so that half a core never counts as none."""
    return (reserved_centicores + CENTICORES_PER_CORE - 1) // CENTICORES_PER_CORE


def idle_cores(idle_centicores: int) -> int:
    """Whole cores that can still be booked on a host: rounded down, never negative."""
    return max(0, idle_centicores // CENTICORES_PER_CORE)


def cap_cores(cap_centicores: int) -> int | float:
    """A cap as the counters hold it, in cores.

    A cap of 0 or below is no number of cores but says what its column says by it, and stays as it is. Any other is
    rounded down to whole cores. A cap below one core becomes that fraction rather than 0, because 0 means "unlimited"
    to a folder or a job; the fraction refuses every booking.
    """
    if cap_centicores <= 0:
        return cap_centicores
    if cap_centicores < CENTICORES_PER_CORE:
        return cap_centicores / CENTICORES_PER_CORE
    return cap_centicores // CENTICORES_PER_CORE


def enforced(cap: float | None) -> float | None:
    """The cap of a folder or job as it is enforced, in the unit it has; None where a cap of NULL, 0 or below says that
    there is none."""
    return cap if cap is not None and cap > 0 else None


def memory_text(kilobytes: float) -> str:
    """An amount of memory for people: ``512M``, or ``1.5G`` from 1 GiB on."""
    gib = kilobytes / KB_PER_GIB
    return f"{gib * 1024:.0f}M" if abs(gib) < 1 else f"{gib:.1f}G"


def duration_text(seconds: float) -> str:
    """A duration as every output for people has it: ``45s``, ``12m``, ``3h 20m``, ``2d 4h``. It is rounded down, and 0
    for one below 0. Up to 99 it has seconds, of which a minute alone would tell too little."""
    if seconds < 100:
        return f"{max(0, int(seconds))}s"
    hours, minutes = divmod(int(seconds) // 60, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    return f"{hours}h {minutes}m" if hours else f"{minutes}m"
