"""Since when an in-flight booking has been seen in flight, by a clock that cannot jump.

Redis TIME alone may not decide that a booking is too old: it can be set forward, and a booking that is just being
committed would be thrown away. So an age must also have passed on this machine's boot clock since this machine first
saw the entry at a mark. Sightings are kept in Redis, apart for each boot of each machine, so that any process of the
machine can go on where another stopped; losing them only postpones a judgement.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import cast

import redis

from opencue_sched.accounting import keys
from opencue_sched.accounting.entries import EntryState, Record
from opencue_sched.accounting.ledger import Mark, answering
from opencue_sched.accounting.scripts import chunks

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_KEPT_SECONDS = 24 * 3600
_AT_ONCE = 500


def boot_clock() -> float:
    """Seconds since boot, suspend included where the system can say so."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def boot_id() -> str:
    """A name for this boot of this machine; for this process alone where the system gives none."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return f"process-{uuid.getnode():x}-{time.time_ns():x}"


class Sightings:
    """When this machine first saw each in-flight entry, in the hash ``key``. ``clock`` is in seconds, never jumps."""

    def __init__(
        self, client: redis.Redis, *, clock: Callable[[], float] = boot_clock, boot: str | None = None
    ) -> None:
        self._client = client
        self.key = keys.SIGHTINGS_PREFIX + (boot or boot_id())
        self.clock = clock

    def too_old(self, records: Iterable[Record], mark: Mark, marked_at: float, *, age_seconds: float) -> frozenset[str]:
        """In-flight ids that were too old at ``mark``, which was taken at ``marked_at`` on the boot clock.

        Remembers those seen for the first time, forgets those that are gone.
        """
        with answering():
            stored = dict(cast("Iterable[tuple[str, str]]", self._client.hscan_iter(self.key, count=_AT_ONCE)))
        in_flight = [r for r in records if r.state is EntryState.IN_FLIGHT and r.changed_seq <= mark.seq]
        seen = {r.proc_id: first_sighting(stored.get(r.proc_id), r, marked_at) for r in in_flight}
        self._remember({r.proc_id: f"{r.changed_seq}|{seen[r.proc_id]!r}" for r in in_flight}, stored)
        return frozenset(
            r.proc_id
            for r in in_flight
            if is_too_old(r, seen[r.proc_id], mark.seconds, marked_at, age_seconds=age_seconds)
        )

    def _remember(self, seen: Mapping[str, str], stored: Mapping[str, str]) -> None:
        if seen == stored:
            return
        gone = [proc_id for proc_id in stored if proc_id not in seen]
        new = [pair for pair in seen.items() if stored.get(pair[0]) != pair[1]]
        with answering(), self._client.pipeline(transaction=False) as pipe:
            for part in chunks(gone, _AT_ONCE):
                pipe.hdel(self.key, *part)
            for piece in chunks(new, _AT_ONCE):
                pipe.hset(self.key, mapping=dict(piece))
            pipe.expire(self.key, _KEPT_SECONDS)
            pipe.execute()


def first_sighting(stored: str | None, record: Record, marked_at: float) -> float:
    """When the entry was first seen as it is now; this mark, when it never was."""
    changed, _, seen = (stored or "").partition("|")
    return float(seen) if changed == str(record.changed_seq) else marked_at


def is_too_old(record: Record, first_seen: float, mark_seconds: int, marked_at: float, *, age_seconds: float) -> bool:
    """Both clocks say that an age has passed: Redis TIME since the booking, the boot clock since the first sighting."""
    return mark_seconds - record.booked_at >= age_seconds and marked_at - first_seen >= age_seconds
