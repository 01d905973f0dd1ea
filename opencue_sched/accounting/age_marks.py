"""Marks by which the age of a booking in flight is judged: by a clock that cannot jump.

Redis TIME alone may not decide that a booking is too old: it can be set forward, and a booking that is just being
committed would be thrown away. So an entry must also stand unchanged since a mark that is an age old by the boot
clock of this machine. The marks are kept in Redis, for each boot of each machine, so that any process of the machine
can go on where another stopped; without them a judgement is only postponed.
"""

from __future__ import annotations

import redis

from opencue_sched.accounting import keys
from opencue_sched.accounting.keys import EntryState, Record
from opencue_sched.accounting.ledger import Mark, answering
from opencue_sched.clock import boot_id

DEFAULT_AGE_SECONDS = 40.0
"""The age from which a booking in flight may be judged, where the caller gives none: the default of
``accounting.in_flight_age``, four commit deadlines."""
_KEPT_SECONDS = 24 * 3600
"""How long a mark is kept in Redis: far longer than the age of any booking that a pass asks about, so that a recompute
which has paused for hours still finds a mark an age old."""


def seen_an_age_ago(client: redis.Redis, mark: Mark, marked_at: float, age_seconds: float) -> int:
    """Keep the mark. Returns the sequence number of the newest mark that was an age old at ``marked_at``, -1 for
    none."""
    key = keys.MARKS_PREFIX + boot_id()
    with answering(client), client.pipeline(transaction=False) as pipe:
        pipe.zadd(key, {f"{mark.seq:016}": marked_at}, nx=True)  # so that those of one moment are in order too
        pipe.zrevrangebyscore(key, marked_at - age_seconds, "-inf", start=0, num=1)
        pipe.zremrangebyscore(key, "-inf", marked_at - _KEPT_SECONDS)
        pipe.expire(key, _KEPT_SECONDS)
        newest = pipe.execute()[1]
    return int(newest[0]) if newest else -1


def is_too_old(record: Record, seen_seq: int, mark_seconds: int, *, age_seconds: float) -> bool:
    """Whether a booking has been in flight for an age by both clocks.

    Redis TIME must say so of the time since the booking. The boot clock must say so of the time since the mark of
    ``seen_seq``, at which the entry was already what it is now.
    """
    in_flight = record.state is EntryState.IN_FLIGHT
    return in_flight and mark_seconds - record.booked_at >= age_seconds and record.changed_seq <= seen_seq
