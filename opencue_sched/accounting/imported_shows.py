"""Notes of imported shows: those whose frames the ledger has. The frames of all other shows are foreign: they lower the
cap of each limit under which they run.

The notes are the fields of the hash ``acct:counted`` (keys.IMPORTED). Workers of the release before and of the release
after this one read them as well, so their format does not change.
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
    """The note that a show was imported, and whether it may be booked since then (accounting.show_handover)."""

    version: str
    """The version of the show's row at the import: a number in decimal, which every change of the row changes
    (store.accounting.managed_show_versions)."""
    due: float = 0.0
    """The end of the show's quarantine, in seconds of Redis TIME: from then on the show is imported once more, and may
    be booked. 0 for a show that may be booked."""

    @property
    def text(self) -> str:
        """The note as the hash has it."""
        return f"{self.version}|{self.due:.3f}"

    @classmethod
    def parse(cls, text: str | None) -> ImportNote | None:
        """The note from the text of a field; None where there is no field, or one that cannot be read."""
        version, separator, due = (text or "").partition("|")
        if not separator:
            return None
        try:
            return cls(version, float(due))
        except ValueError:
            return None


def imported_shows(client: redis.Redis) -> dict[str, str]:
    """The ids of the imported shows that may be booked, each with the version of its row at the import.

    Call this before PostgreSQL is asked for foreign frames, those that the ledger does not have. The frames of a show
    that is imported between the two reads are then foreign and in the ledger, so they count twice for a moment; the
    other way round they would not count at all. Raises NotReady when Redis does not answer.
    """
    with answering(client):
        texts = cast("Mapping[str, str]", client.hgetall(keys.IMPORTED))
    notes = {show_id: ImportNote.parse(text) for show_id, text in texts.items()}
    return {show_id: note.version for show_id, note in notes.items() if note is not None and note.due == 0}


def note_imported(client: redis.Redis, versions: Mapping[str, str]) -> None:
    """Note that shows were imported and may be booked, each at a ``version`` of its row. This ends any quarantine of
    theirs.

    A show whose row has another version by now is imported again before its next booking (ImportedShows). Raises
    NotReady when Redis does not answer.
    """
    if versions:
        with answering(client):
            client.hset(keys.IMPORTED, mapping={show: ImportNote(version).text for show, version in versions.items()})
