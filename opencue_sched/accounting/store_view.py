"""What a look at the store tells people: its generation, and how old the last recompute is."""

from __future__ import annotations

from dataclasses import dataclass

import redis

from opencue_sched.accounting import keys
from opencue_sched.accounting.store_epoch import Epoch

_GENERATION_DIGITS = 12


@dataclass(frozen=True, slots=True)
class StoreView:
    """``generation``: a number made from the epoch, 0 while the store is not open.

    ``recompute_age_seconds``: since the mark of the last whole recompute, or the filling; None when there was none.
    """

    generation: int
    recompute_age_seconds: float | None


def look_at_store(client: redis.Redis) -> StoreView:
    """One round trip. Raises RedisError."""
    with client.pipeline(transaction=False) as pipe:
        pipe.mget(keys.EPOCH, keys.RECOMPUTED_AT)
        pipe.time()
        (stored, recomputed_at), (seconds, _) = pipe.execute()
    try:
        age = None if recomputed_at is None else max(0.0, float(seconds) - float(recomputed_at))
    except ValueError:  # somebody else wrote it; the next recompute writes over it
        age = None
    return StoreView(generation_of(Epoch.parse(stored)), age)


def generation_of(epoch: Epoch | None) -> int:
    """Small enough to be exact as a floating-point number."""
    if epoch is None:
        return 0
    try:
        return int(epoch.text.split("|")[1][:_GENERATION_DIGITS], 16)
    except ValueError:
        return 0
