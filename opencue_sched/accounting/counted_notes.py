"""The notes of which shows are counted: what runs of them is in the ledger (accounting.counted)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import cast

import redis
from redis.exceptions import WatchError

from opencue_sched.accounting import keys
from opencue_sched.accounting.ledger import answering

_TRIES = 3


@dataclass(frozen=True, slots=True)
class Note:
    """``version`` of the show's row when it was counted; ``due``: when to count it again, by Redis TIME, or 0."""

    version: str
    due: float = 0.0

    @property
    def text(self) -> str:
        return f"{self.version}|{self.due:.3f}"

    @classmethod
    def parse(cls, text: str | None) -> Note | None:
        """None for no note, and for one nobody understands."""
        version, found, due = (text or "").partition("|")
        try:
            return cls(version, float(due)) if found else None
        except ValueError:
            return None


def counted_shows(client: redis.Redis) -> dict[str, str]:
    """Shows that are counted for good, each with the version of its row then. Raises NotReady.

    To be read before PostgreSQL is asked for frames that the ledger does not have: a show that is counted in between is
    taken for one that is not, and its frames count twice for a moment rather than not at all.
    """
    with answering():
        texts = cast("Mapping[str, str]", client.hgetall(keys.COUNTED))
    notes = {show_id: Note.parse(text) for show_id, text in texts.items()}
    return {show_id: note.version for show_id, note in notes.items() if note is not None and not note.due}


def note_counted(client: redis.Redis, versions: Mapping[str, str]) -> None:
    """These shows are counted, as their rows were in these versions: by a flip, or by filling the store.

    A row that was changed since belongs to a show that may have been away meanwhile: it is counted again.
    """
    if versions:
        with answering():
            client.hset(keys.COUNTED, mapping={show: Note(version).text for show, version in versions.items()})


def forget_others(client: redis.Redis, managed: Callable[[], Collection[str]]) -> list[str]:
    """Forget the shows that are not managed any more; returns them.

    The notes are read before ``managed`` is asked, and nothing is forgotten if any was written since: a show that is
    handed over meanwhile keeps its note. What is left then is found by the next call.
    """
    with answering(), client.pipeline(transaction=True) as pipe:
        for _ in range(_TRIES):
            pipe.watch(keys.COUNTED)  # type: ignore[no-untyped-call]
            noted = cast("list[str]", pipe.hkeys(keys.COUNTED))
            gone = sorted(set(noted) - set(managed()))
            if not gone:
                return []
            pipe.multi()
            pipe.hdel(keys.COUNTED, *gone)
            try:
                pipe.execute()
            except WatchError:
                continue
            return gone
    return []
