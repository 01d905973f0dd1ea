"""The one place where centicores (PostgreSQL) and whole cores (Redis, placement) meet.

Source of the rules: the Redis accounting reference ("the unit invariant") and design section 4: what is
booked rounds up, what may be booked rounds down, so every rounding error under-books.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from opencue_sched.errors import InvalidInput

INT_MAX = 2**31 - 1
"""The most OpenCue's integer columns hold."""
CENTICORES_PER_CORE = 100
UNLIMITED = -1
MOST_CENTICORES = INT_MAX
"""What the columns of caps hold. A layer that asks for more, or a host that has more, is a mistake."""
MOST_GPUS = INT_MAX
MOST_KB = 2**50
"""2^60 bytes: no machine has as much memory."""
MEMORY_FLOOR_KB = 262_144
"""The least memory a layer asks for, and the margin the optimizer leaves above the most that was used."""


def centicores(cores: int) -> int:
    """Whole cores to centicores, for a value on its way into PostgreSQL."""
    return cores * CENTICORES_PER_CORE


def centicores_of(cores: float) -> int:
    """Cores as people write them, which may have a fraction, in centicores. Raises InvalidInput for what is no such."""
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
    if cap_centicores < CENTICORES_PER_CORE:
        return cap_centicores / CENTICORES_PER_CORE
    return cap_centicores // CENTICORES_PER_CORE


# Names, and the widths of the columns that hold them (facts A).

SHOW_NAME_WIDTH = 512
FACILITY_NAME_WIDTH = 36
DEPT_NAME_WIDTH = 36
FOLDER_NAME_WIDTH = 36
JOB_NAME_WIDTH = 255
SHOT_NAME_WIDTH = 64
USER_NAME_WIDTH = 32
JOB_OS_WIDTH = 12
LOG_DIR_WIDTH = 4000
LAYER_NAME_WIDTH = 256
LAYER_RANGE_WIDTH = 4000
LAYER_TAGS_WIDTH = 4000
LAYER_SERVICES_WIDTH = 128
COMMAND_WIDTH = 4000
ENVIRONMENT_WIDTH = 2048
LIMIT_NAME_WIDTH = 255
FRAME_NAME_WIDTH = 256
HOST_TAG_WIDTH = 45

NAME = re.compile(r"(?!\.+\Z)[A-Za-z0-9_.-]+\Z")
"""A name that ends up in paths and commands."""
NAME_CHARACTERS = "letters, digits, '_', '-' and '.'"


def near(word: str, words: Iterable[str]) -> str:
    """``; did you mean x?`` for a mistyped word, or nothing."""
    close = difflib.get_close_matches(word[:64], list(words), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def frame_name(number: int, layer_name: str) -> str:
    """The name of a frame: ``0012-render``, and ``-012-render`` for frame -12 (Java's and Python's ``%04d`` agree)."""
    return f"{number:04d}-{layer_name}"


def os_names(text: str | None) -> tuple[str, ...]:
    """``host_stat.str_os`` as the list Cuebot reads it as: separated by commas, spaces around them ignored."""
    return tuple(name for name in (part.strip() for part in (text or "").split(",")) if name)
