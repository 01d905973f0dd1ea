"""Sentences about what waits, for people."""

from __future__ import annotations

from opencue_sched.domain.depends import DependType
from opencue_sched.store.jobs import Depend


def describe_depend(depend: Depend, job_name: str) -> str:
    """What is waited for: ``layer sim``, ``frame 0002-sim of job x``, ``layer sim, frame by frame``."""
    elsewhere = "" if depend.on_job == job_name else f" of job {depend.on_job}"
    if depend.on_frame is not None:
        return f"frame {depend.on_frame}{elsewhere}"
    if depend.on_layer is None:
        return f"job {depend.on_job}"
    what = f"layer {depend.on_layer}{elsewhere}"
    if depend.any_frame:
        return f"any frame of {what}"
    if depend.type == DependType.FRAME_BY_FRAME:
        return f"{what}, frame by frame"
    if depend.type == DependType.PREVIOUS_FRAME:
        return f"{what}, each frame for the one before"
    return what


def listed(words: list[str], *, most: int = 4, last: str = "and") -> str:
    """``a``, ``a and b``, ``a, b and 3 more``."""
    if len(words) > most:
        words = [*words[: most - 1], f"{len(words) - most + 1} more"]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
