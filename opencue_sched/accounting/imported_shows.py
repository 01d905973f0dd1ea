"""Notes of the shows whose frames the ledger has. Frames of all other shows are foreign to a limit: they lower its cap.

A note is a field of the hash ``acct:counted``, which workers of the version before and after this one read as well.
"""

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
    """The version that the show's row had when the show was imported: a text that is another after each change of the
    row (store.accounting.managed_show_versions)."""
    due: float = 0.0
    """The moment at which to import the show again so that it may be booked, in seconds of Redis TIME; 0 when the show
    may be booked (accounting.show_handover)."""

    @property
    def text(self) -> str:
        """The note as the hash has it."""
        return f"{self.version}|{self.due:.3f}"

    @classmethod
    def parse(cls, text: str | None) -> ImportNote | None:
        """The note that a field of the hash is; None where there is no field, or an unreadable one."""
        version, found, due = (text or "").partition("|")
        try:
            return cls(version, float(due)) if found else None
        except ValueError:
            return None


def imported_shows(client: redis.Redis) -> dict[str, str]:
    """The ids of the imported shows that may be booked, each with the version of its row at the import.

    Raises NotReady. Call this before PostgreSQL is asked for frames that the ledger does not have: a show that is
    imported between the two reads is then taken for one that is not, and its frames count twice for a moment rather
    than not at all.
    """
    with answering(client):
        texts = cast("Mapping[str, str]", client.hgetall(keys.IMPORTED))
    notes = {show_id: ImportNote.parse(text) for show_id, text in texts.items()}
    return {show_id: note.version for show_id, note in notes.items() if note is not None and not note.due}


def note_imported(client: redis.Redis, versions: Mapping[str, str]) -> None:
    """Note that shows were imported, each at a version of its row. A show whose row was changed since then is imported
    again."""
    if versions:
        with answering(client):
            client.hset(keys.IMPORTED, mapping={show: ImportNote(version).text for show, version in versions.items()})
