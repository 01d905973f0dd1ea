"""The clock that leases and claims are timed by, and which boot of which machine it counts from."""

from __future__ import annotations

import time
import uuid
from functools import cache
from pathlib import Path


def boot_clock() -> float:
    """Seconds since boot, suspend included where the system can say so."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


@cache
def boot_id() -> str:
    """A name for this boot of this machine; for this process alone where the system gives none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"process-{uuid.uuid4()}"
