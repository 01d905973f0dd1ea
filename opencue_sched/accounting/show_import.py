"""Whether what runs of a show is in the ledger, before this scheduler books its first frame there.

Our own flip counts first. But a Cuebot hands a show over by changing its flag and nothing else: then the ledger knows
nothing of the procs that run, and bookings would fill a cap a second time. So a show that is not noted here is counted
by whoever would book there first. If Cuebots may be there, it is left alone for as long as one may believe that it is
still its own, whether anything runs there or not, and counted again. The note has the version of the show's row: when
somebody has changed the row since (the show may have been away and back), it is counted once more; and left alone as
well if that finds procs that somebody else has booked.
"""

from __future__ import annotations

import structlog
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from opencue_sched.accounting import keys
from opencue_sched.accounting.caps import reseed_limits
from opencue_sched.accounting.ledger import Ledger, answering
from opencue_sched.accounting.managed import Note, imported_shows
from opencue_sched.accounting.recompute import RecomputeReport, recompute
from opencue_sched.accounting.reconcile import Cause
from opencue_sched.errors import NotReady
from opencue_sched.store import accounting as store

log = structlog.get_logger(__name__)

CUEBOT_CACHE_SECONDS = 30.0
"""How long a Cuebot may believe that a show is still its own."""


class ImportedShows:
    """``cuebots``: some may be there. Thread-safe; remembers per process what it has seen to be counted."""

    def __init__(self, engine: Engine, ledger: Ledger, *, cuebots: bool, age_seconds: float) -> None:
        self._engine = engine
        self._ledger = ledger
        self._cuebots = cuebots
        self._age = age_seconds
        self._seen: dict[str, tuple[str, str]] = {}

    def admits(self, show_id: str) -> bool:
        """Whether frames of the show may be booked now; counts it if that is what it takes.

        Raises NotReady and SQLAlchemy's errors: then nothing may be booked.
        """
        with self._engine.begin() as connection:
            version = store.show_version(connection, show_id)
        if version is None:
            return False
        seen = (self._ledger.epoch().text, version)
        if self._seen.get(show_id) == seen:
            return True
        note, now = self._read(show_id)
        wanted = self._next(show_id, note, version, now)
        if wanted != note:
            with answering():
                self._ledger.client.hset(keys.IMPORTED, show_id, wanted.text)
        if wanted.due:
            return False
        self._seen[show_id] = seen
        return True

    def import_all(self) -> list[str]:
        """Count the managed shows that are not, also those that book nothing; returns those that cannot be counted.

        Until a show is counted its frames count as foreign under their licences, and twice once a recompute has found
        them. Raises as admits() does when a store is lost.
        """
        failed = []
        counted = imported_shows(self._ledger.client)
        with self._engine.begin() as connection:
            versions = store.managed_show_versions(connection)
        for show_id, version in versions.items():
            if counted.get(show_id) == version:
                continue
            # The note is what others go by: somebody may have taken down the one that this process has seen.
            self._seen.pop(show_id, None)
            try:
                self.admits(show_id)
            except Exception as error:
                if _is_loss(error):
                    raise
                log.exception("show_not_counted", show=show_id)
                failed.append(show_id)
        return failed

    def _read(self, show_id: str) -> tuple[Note | None, float]:
        with answering(), self._ledger.client.pipeline(transaction=False) as pipe:
            pipe.hget(keys.IMPORTED, show_id)
            pipe.time()
            text, (seconds, micros) = pipe.execute()
        return Note.parse(text), float(seconds) + float(micros) / 1e6

    def _next(self, show_id: str, note: Note | None, version: str, now: float) -> Note:
        """What to note next; counts the show unless it was counted, or has to wait."""
        if note is None:
            self._count(show_id)
            return self._noted(version, now, theirs=True)
        if note.due > now:
            return note
        if note.version != version:
            return self._noted(version, now, theirs=Cause.MISSING in self._count(show_id).causes)
        if note.due:
            self._count(show_id)
        return Note(version)

    def _noted(self, version: str, now: float, *, theirs: bool) -> Note:
        """The note of a show that was counted; ``theirs``: a Cuebot may still take it for its own."""
        return Note(version, now + CUEBOT_CACHE_SECONDS if theirs and self._cuebots else 0.0)

    def _count(self, show_id: str) -> RecomputeReport:
        """Bring caps and ledger of the show up to date."""
        reseed_limits(self._engine, self._ledger, [show_id])
        report = recompute(self._engine, self._ledger, [show_id], age_seconds=self._age, write_tables=False, renew=True)
        log.info("show_counted", show=show_id, procs=report.procs, healed=report.healed)
        return report


def _is_loss(error: Exception) -> bool:
    """Whether the stores are lost, which no show is to blame for: PostgreSQL then says nothing at all."""
    if not isinstance(error, DBAPIError):
        return isinstance(error, NotReady | PoolTimeout)
    silent = isinstance(error, OperationalError | InterfaceError) and not getattr(error.orig, "pgcode", None)
    return silent or error.connection_invalidated
