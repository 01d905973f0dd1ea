"""What a limit that is used up, or whose report is too old, says to people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Row

from opencue_sched.domain.names import name_ranges, plural
from opencue_sched.domain.units import duration_text

MOST_NAMED = 4
"""How many names, or ranges of names, of hosts are written out."""


def full_limit(limit: Row[Any], holders: Sequence[Row[Any]], free: Iterable[str]) -> str:
    """Why no frame may start under a limit of which nothing is left. ``holders``: who holds it; ``free``: names of
    hosts that could take a frame otherwise."""
    if not limit.counts_machines:
        said = f"limit {limit.name} is full ({limit.running} of {limit.max_value} "
        if limit.reported_at is None:
            return f"{said}frames run)"
        return f"{said}licences: {limit.settled} reported, {plural(limit.pending, 'frame')} started since)"
    if not limit.threshold:
        said = f"{limit.name} has no seat"
    elif limit.threshold == 1:
        said = f"the only seat of {limit.name} is taken"
    else:
        said = f"all {limit.threshold} seats of {limit.name} are taken"
    if limit.running > limit.threshold:
        said += f", and {plural(limit.running - limit.threshold, 'machine')} more hold one"
    names = [holder.machine for holder in holders if holder.host_id is not None]
    others = sum(holder.host_id is None for holder in holders)
    who = _ranges(names) if names else ""
    if others:
        nowhere = f"{plural(others, 'machine')} that {'is no host' if others == 1 else 'are no hosts'} here"
        who = f"{who}, and {nowhere}" if who else nowhere
    without = sorted(set(free) - set(names))
    none = f"; {_ranges(without)} {'holds' if len(without) == 1 else 'hold'} none" if without else ""
    return f"{said}: {who}{none}" if who else said + none


def still_running(limit: Row[Any]) -> str:
    """How many frames run on the machines that hold a limit: these start more of its frames, others none."""
    run = "frame runs" if limit.frames == 1 else "frames run"
    return f"{limit.frames} {run} on the machines that hold {limit.name}; only those start more of its frames"


def why_open(limit: Row[Any]) -> str:
    """Why a limit keeps nothing from starting; empty for one that does."""
    if limit.enforcement != "ENFORCED":
        return str(limit.enforcement).lower()
    return f"no report for {duration_text(limit.ttl)}" if limit.report_is_too_old else ""


def flagged_words(names: Sequence[str]) -> str:
    """What limits do that count machines by ``b_host_limit``."""
    one = len(names) == 1
    told = f"{', '.join(names)} {'counts' if one else 'count'} machines, since {'its' if one else 'their'} b_host_limit"
    return (
        f"limit{'' if one else 's'} {told} is true; `opencue-sched limit set NAME --type FRAME` where frames are meant"
    )


def _ranges(names: Iterable[str]) -> str:
    """Names in words, shortened to ranges (``name_ranges``); of more than MOST_NAMED ranges the rest is only
    counted."""
    ranges = name_ranges(names)
    if len(ranges) > MOST_NAMED:
        rest = len(ranges) - MOST_NAMED + 1
        ranges = [*ranges[: MOST_NAMED - 1], f"{rest} more"]
    return ranges[0] if len(ranges) == 1 else f"{', '.join(ranges[:-1])} and {ranges[-1]}"
