"""How many examples a property is tried with."""

from __future__ import annotations

import os

DEEP = bool(os.environ.get("OPENCUE_SCHED_TEST_DEEP"))
"""``make test-deep``: every example, and others in each run, instead of the same few."""

_PART = 3
"""Every other run tries one of so many: what breaks a property mostly shows in the first dozens."""


def examples(in_all: int) -> int:
    """How many of the examples that ``make test-deep`` tries this run tries."""
    return in_all if DEEP else -(-in_all // _PART)
