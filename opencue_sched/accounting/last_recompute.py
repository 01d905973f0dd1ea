"""What the last whole recompute found wrong and set out to put right, kept for whoever asks whether it has had its turn
at something: a ledger entry without a proc, or a counter that is off its entries, has nothing that says since when.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import redis

from opencue_sched.accounting import keys
from opencue_sched.accounting.consistency import Amounts
from opencue_sched.accounting.differences import Pass

_MOST_NAMED = 1000
"""Entries, and counters, of one pass that are kept: after a Redis that was away they may be as many as the procs."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a recompute found wrong."""

    entries: Mapping[str, int] = field(default_factory=dict)
    """Entries of procs that were gone: proc id to ``changed_seq``."""
    counters: Mapping[str, Amounts] = field(default_factory=dict)
    """Counters that were off: key to how much."""

    @classmethod
    def of(cls, done: Pass) -> Found:
        """What a pass found."""
        gone = (change.proc_id for change in done.changes if change.entry is None)
        return cls(
            {proc_id: done.check.records[proc_id].changed_seq for proc_id in islice(gone, _MOST_NAMED)},
            dict(islice(done.check.healed.items(), _MOST_NAMED)),
        )

    def packed(self) -> str:
        """The text of the recompute that Redis keeps."""
        return json.dumps({"entries": self.entries, "counters": self.counters})


def last_found(client: redis.Redis) -> Found:
    """What the last whole recompute found; nothing where the key holds something else. Raises RedisError."""
    # MGET answers None for a key of another type; GET would raise an error.
    (text,) = client.mget(keys.FOUND)
    try:
        read: Any = json.loads(text or "{}")
        counters = {str(key): (int(cores), int(gpus)) for key, (cores, gpus) in read.get("counters", {}).items()}
        return Found({str(proc_id): int(seq) for proc_id, seq in read.get("entries", {}).items()}, counters)
    except (AttributeError, TypeError, ValueError):
        return Found()
