"""The change log of hosts: which of them were booked on or freed, told to every worker through Redis."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

import redis

from opencue_sched.coordination import keys

_FIELD = "hosts"
_START = "0-0"
_MAX_ENTRIES_KEPT = 10_000
_MAX_ENTRIES_READ = 1_000
_Entry = tuple[str, dict[str, str]]


class HostChanges:
    """Reads and writes ``{namespace}:hosts:changed``, a Redis stream with the ids of hosts whose rows changed.

    Who commits a booking or a release appends the hosts it touched; every worker reads what is new at its next gather
    and reads just those hosts again. So every cache sees freed cores at once, without waiting for a host report or for
    a group to expire. The log is a hint, never a truth: when it cannot answer, the caller reads every host. Holds no
    state: readers keep their own cursor.
    """

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        self._client = client
        self._key = keys.host_changes(namespace)

    def publish(self, host_ids: Collection[str]) -> None:
        """Append the ids, in one round trip. Call it after the commit that changed the hosts."""
        if host_ids:
            ids = " ".join(dict.fromkeys(host_ids))
            self._client.xadd(self._key, {_FIELD: ids}, maxlen=_MAX_ENTRIES_KEPT, approximate=True)

    def since(self, cursor: str | None) -> tuple[str, frozenset[str] | None]:
        """What was appended after ``cursor``: the new cursor, and the ids, or None for "read every host again".

        None when there is no cursor yet, when the entry it names is gone (trimmed, or a flushed or failed-over Redis),
        or when more than 1,000 entries are new. Read the hosts *after* this call: then nothing can fall between. One
        round trip.
        """
        pipeline = self._client.pipeline(transaction=True)
        at = cursor or _START
        pipeline.xrange(self._key, at, at)
        pipeline.xrange(self._key, f"({at}", "+", count=_MAX_ENTRIES_READ + 1)
        pipeline.xrevrange(self._key, count=1)
        answers = cast("list[list[_Entry]]", pipeline.execute())
        named, new, last = answers
        if not last:
            return _START, frozenset() if cursor == _START else None
        now = last[0][0]
        if cursor is None or not named or len(new) > _MAX_ENTRIES_READ:
            return now, None
        return now, frozenset(host_id for _, fields in new for host_id in fields.get(_FIELD, "").split())
