"""The change log of hosts: a Redis stream of host ids whose rows changed.

Whoever commits a booking or a release appends the hosts it touched; every worker reads what is new at its next gather
and reads just those hosts again. So freed cores are seen at once by every cache, without waiting for a host report or
for a group to expire. The log is a hint, never a truth: when it cannot answer, the caller reads everything.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from itertools import islice
from typing import Any, cast

import redis
import structlog

log = structlog.get_logger(__name__)

_FIELD = "hosts"
_START = "0-0"
_IDS_PER_ENTRY = 250
_MAX_ENTRIES_KEPT = 10_000
_MAX_ENTRIES_READ = 1_000

_Entry = tuple[str, dict[str, str]]


class HostChanges:
    """Reads and writes the log ``{namespace}:hosts:changed``. Holds no state: readers keep their own cursor."""

    def __init__(self, client: redis.Redis, namespace: str, *, keep_entries: int = _MAX_ENTRIES_KEPT) -> None:
        self._client = client
        # Not in coordination/names.py, which this room may not see.
        self._key = f"{namespace}:hosts:changed"
        self._keep_entries = keep_entries

    def publish(self, host_ids: Collection[str]) -> None:
        """Append the ids, in one round trip; 250 to an entry. Call it after the commit that changed the hosts."""
        ids = iter(dict.fromkeys(host_ids))
        pipeline = self._client.pipeline(transaction=False)
        while batch := list(islice(ids, _IDS_PER_ENTRY)):
            pipeline.xadd(self._key, {_FIELD: json.dumps(batch)}, maxlen=self._keep_entries, approximate=True)
        if len(pipeline):
            pipeline.execute()

    def since(self, cursor: str | None) -> tuple[str, frozenset[str] | None]:
        """What was appended after ``cursor``: the new cursor, and the ids, or None for "read every host again".

        None when there is no cursor yet, when the entry it names is gone (trimmed, or a flushed or failed-over Redis),
        when more than 1,000 entries are new, or when an entry is not ours. Read the hosts *after* this call: then
        nothing can fall between. One round trip.
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
        ids = _ids(new)
        if ids is None:
            log.warning("host_change_log_unreadable", key=self._key)
        return now, ids


def _ids(entries: list[_Entry]) -> frozenset[str] | None:
    """All ids of the entries; None if one of them was not written by ``publish``."""
    ids: set[str] = set()
    for _, fields in entries:
        try:
            batch: Any = json.loads(fields[_FIELD])
        except (KeyError, ValueError):
            return None
        if not isinstance(batch, list) or not all(isinstance(host_id, str) for host_id in batch):
            return None
        ids.update(batch)
    return frozenset(ids)
