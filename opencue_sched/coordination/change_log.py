"""The change logs: which hosts and which waiting layers changed, told to every worker through Redis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import cast

import redis

from opencue_sched.coordination import keys

_WRITER = "by"
"""The field of an entry that names the instance that wrote it."""
_START = "0-0"
"""The cursor before the first entry."""
_MAX_ENTRIES_KEPT = 10_000
"""How many entries the log keeps, about: ten times as many as one read takes, beyond which a reader reads everything
again anyhow."""
_MAX_ENTRIES_READ = 1_000
"""How many new entries one read takes: with more, everything counts as changed."""
_Entry = tuple[str, dict[str, str]]
"""The id of an entry and its fields."""


class ChangeLog:
    """Reads and writes a Redis stream of ids of rows that changed.

    A process that changed rows, or found them changed, appends their ids; every worker reads the new entries, and then
    just those rows. So what all workers keep in memory is right again at once, without waiting until each has read
    everything. The log is a hint, never a truth: when it cannot answer, the caller reads everything. Holds no state:
    readers keep their own cursor.
    """

    def __init__(self, client: redis.Redis, key: str, field: str) -> None:
        """``field`` of an entry has the ids, which contain no blank."""
        self._client = client
        self._key = key
        self._field = field

    def publish(self, ids: Collection[str], *, by: str = "") -> None:
        """Append the ids, in one round trip, with the instance that writes them. Call it after the commit that changed
        the rows."""
        if ids:
            entry = {self._field: " ".join(dict.fromkeys(ids))} | ({_WRITER: by} if by else {})
            self._client.xadd(self._key, entry, maxlen=_MAX_ENTRIES_KEPT, approximate=True)  # type: ignore[arg-type]

    def since(self, cursor: str | None, *, but_of: str = "") -> tuple[str, frozenset[str] | None]:
        """What was appended after ``cursor``: the new cursor, and the ids, or None for "read everything again"."""
        now, by_writer = self.by_writer_since(cursor, but_of=but_of)
        return now, None if by_writer is None else frozenset[str]().union(*by_writer.values())

    def by_writer_since(
        self, cursor: str | None, *, but_of: str = ""
    ) -> tuple[str, Mapping[str, frozenset[str]] | None]:
        """What was appended after ``cursor``: the new cursor, and the ids by the instance that wrote them, "" where
        none is named, or None for "read everything again".

        None when there is no cursor yet, when the entry it names is gone (trimmed, or a flushed or failed-over Redis),
        or when more than 1,000 entries are new. Read the rows *after* this call: then nothing can fall between. One
        command, and another one before "everything". ``but_of``: an instance whose own entries are left out; those
        that name no writer are others'.
        """
        entries: list[_Entry] = []
        if cursor is not None:
            # From the entry of the cursor on: as long as that comes first, none after it was trimmed.
            entries = cast("list[_Entry]", self._client.xrange(self._key, cursor, count=_MAX_ENTRIES_READ + 2))
        if not entries and cursor == _START:
            return _START, {}
        if not entries or entries[0][0] != cursor or len(entries) > _MAX_ENTRIES_READ + 1:
            last = cast("list[_Entry]", self._client.xrevrange(self._key, count=1))
            return last[0][0] if last else _START, None
        now, new = entries[-1][0], entries[1:]
        by_writer = defaultdict[str, set[str]](set)
        for _, entry in new:
            writer = entry.get(_WRITER, "")
            if not but_of or writer != but_of:
                by_writer[writer].update(entry.get(self._field, "").split())
        return now, {writer: frozenset(ids) for writer, ids in by_writer.items()}


class HostChanges(ChangeLog):
    """The hosts that were booked on or freed: ``{namespace}:hosts:changed``. Freed cores are seen without waiting for a
    host report."""

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        super().__init__(client, keys.host_changes(namespace), "hosts")


class BacklogChanges(ChangeLog):
    """The layers that a worker's resync found to differ from what it knew: ``{namespace}:backlog:changed``. Each worker
    does a part of the layers, and what one finds the others know by this."""

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        super().__init__(client, keys.backlog_changes(namespace), "layers")
