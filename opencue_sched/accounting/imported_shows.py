"""Which shows the ledger has the frames of. Frames of all other shows are foreign to a limit: they lower its cap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import redis

from opencue_sched.accounting import keys
from opencue_sched.accounting.ledger import answering


@dataclass(frozen=True, slots=True)
class ImportNote:
    """A note that a show was imported, or is to be: a field of ``acct:counted``."""

    version: str
    """The version of the show's row when it was imported."""
    due: float = 0.0
    """The moment at which to import it again so that it may be booked, in seconds of Redis TIME; 0 when it may be
    booked (accounting.show_handover)."""

    @property
    def text(self) -> str:
        return f"{self.version}|{self.due:.3f}"

    @classmethod
    def parse(cls, text: str | None) -> ImportNote | None:
        """None for no note, and for an unreadable one."""
        version, found, due = (text or "").partition("|")
        try:
            return cls(version, float(due)) if found else None
        except ValueError:
            return None


def imported_shows(client: redis.Redis) -> dict[str, str]:
    """Shows that are ours, each with the version of its row then. Raises NotReady.

    Read it before PostgreSQL is asked for frames that the ledger does not have. A show that is imported between the two
    is then taken for one that is not, and its frames count twice for a moment rather than not at all.
    """
    with answering(client):
        texts = cast("Mapping[str, str]", client.hgetall(keys.IMPORTED))
    notes = {show_id: ImportNote.parse(text) for show_id, text in texts.items()}
    return {show_id: note.version for show_id, note in notes.items() if note is not None and not note.due}


def note_imported(client: redis.Redis, versions: Mapping[str, str]) -> None:
    """These shows are ours, as their rows were in these versions; one whose row was changed since is imported again."""
    if versions:
        with answering(client):
            client.hset(keys.IMPORTED, mapping={show: ImportNote(version).text for show, version in versions.items()})
