"""Reads moments as people type them."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from opencue_sched.errors import InvalidInput

_TIME_OF_DAY = re.compile(r"([01]?[0-9]|2[0-3]):[0-5][0-9]\Z")


def moment_of(words: str, now: datetime) -> datetime:
    """A moment with its time zone: ``2026-12-24 18:00`` or ``2026-12-24``, local unless an offset follows, or
    ``18:00``, the next time that it is so. ``now`` has the local zone. Raises InvalidInput."""
    typed = words.strip()
    if _TIME_OF_DAY.match(typed):
        hour, minute = map(int, typed.split(":"))
        # Naive, as people read clocks: a day on is the same time of day, also where clocks change between.
        today = now.replace(tzinfo=None, hour=hour, minute=minute, second=0, microsecond=0)
        moment = today.astimezone()
        return moment if moment > now else (today + timedelta(days=1)).astimezone()
    if found := _of_a_day(typed):
        return found
    raise InvalidInput(f"{words[:60]!r} is no moment; write 18:00, 2026-12-24 18:00 or 2026-12-24")


def past_moment_of(words: str) -> datetime:
    """A moment that was: ``2026-12-24T18:00:05+01:00`` or the like, local unless an offset follows. Raises
    InvalidInput."""
    if moment := _of_a_day(words.strip()):
        return moment
    raise InvalidInput(f"{words[:60]!r} is no moment; write 2026-12-24T18:00:05, with the day")


def _of_a_day(typed: str) -> datetime | None:
    """The moment that an ISO date, with or without a time, names, local unless an offset follows; None for any other
    text, and for a moment that has no four-digit year in some zone."""
    try:
        moment = datetime.fromisoformat(typed).astimezone()
        moment + timedelta(days=2)  # in every zone the year has four digits, or nobody could read it again
    except (ValueError, OverflowError):
        return None
    return moment
