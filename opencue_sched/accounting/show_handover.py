"""A show's way from Cuebot to this scheduler and back: the one state machine of it.

::

      Cuebot's --- flag set ---> new --- first import ---> quarantined --- second import ---> ours
         ^                        ^                             |                              |
         |                        +---------------------------- | ------- row changed since ---+
         |                                                      |                              |
         +-- tables written again -- handed back <-------- flag cleared ----------------------+

========== ======================= ============================================ ============================
state      b_scheduler_managed     acct:counted (ImportNote)                    booked by this scheduler
========== ======================= ============================================ ============================
Cuebot's   off                     none                                         no: Cuebot does
new        on                      none, or one of another version of the row   no: an import comes first
quarantined on                     ``due`` is ahead                             no
ours       on                      this version of the row, ``due`` is 0        yes
handed back off                    none; ``handed-back:shows`` has it           no
========== ======================= ============================================ ============================

An *import* brings caps and ledger to what runs of the show. The flag alone moves a show, whoever changes it: a Cuebot,
or our own command (hand_over, hand_back), which then does at once what others would do later: the first worker that
would book the show imports it (ImportedShows), and a notification makes one process do what is left of handing it back
(follow_handed_back). So nothing has to be completed when a command dies.

Why to wait: a Cuebot remembers for ``CUEBOT_CACHE_SECONDS`` whose a show is. It may book a quarantined show as its own,
which the second import finds; and it may delete procs of a show that was handed back without decrementing the
accounting tables, which are therefore brought up to date once more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import cast

import redis
import structlog
from sqlalchemy import Engine
from sqlalchemy.exc import DataError

from opencue_sched.accounting import keys
from opencue_sched.accounting.caps import reseed_limits
from opencue_sched.accounting.imported_shows import ImportNote, imported_shows
from opencue_sched.accounting.ledger import Cause, Ledger, answering
from opencue_sched.accounting.recompute import RecomputeReport, recompute, renew_entries
from opencue_sched.clients.postgres import ask
from opencue_sched.domain.names import plural
from opencue_sched.errors import InvalidInput, NotReady
from opencue_sched.store import shows
from opencue_sched.store.accounting import managed_show_ids, managed_show_versions
from opencue_sched.store.accounting_tables import refresh_tables
from opencue_sched.store.schema import ANNOUNCES_RELEASES, triggers_of_proc

log = structlog.get_logger(__name__)

CUEBOT_CACHE_SECONDS = 30.0
"""How long a Cuebot may believe that a show is still its own, or still ours."""

_REFRESHED_SECONDS = 600
"""A show stays in keys.HANDED_BACK this much longer: a refresh passes over rows that are locked."""


def check_release_feed(engine: Engine, release_feed: str) -> tuple[bool, str]:
    """Whether managed shows exist whose deleted procs are not announced to us (the reference's gauge
    ``cuebot_redis_publish_misconfigured``), and a message about it. A worker starts all the same.

    ``release_feed`` is accounting.release_feed. ``cuebot-redis`` is not checked: whether every Cuebot publishes only a
    recompute sees.
    """
    managed = len(ask(engine, managed_show_ids))
    triggered = ANNOUNCES_RELEASES in ask(engine, triggers_of_proc)
    if not managed:
        return False, "no show is managed by this scheduler"
    if release_feed == "cuebot-redis" or (release_feed == "proc-trigger" and triggered):
        return False, f"{plural(managed, 'managed show')}, releases arrive by {release_feed}"
    why = "accounting.release_feed is recompute-only"
    if release_feed == "proc-trigger":
        why = "the trigger that announces deleted procs is not in the database (run `opencue-sched migrate`)"
    shows = plural(managed, "managed show")
    return True, f"{shows}, but {why}: cores released by others stay booked until the next recompute"


# From new to ours: by the worker that would book the show, or by our command.


class ImportedShows:
    """Imports a show before its first booking. Thread-safe; remembers per process which shows are ours by now.

    ``quarantine_seconds``: how long a new show is left alone; CUEBOT_CACHE_SECONDS where there may be Cuebots, else 0.
    ``age_seconds`` is accounting.in_flight_age.
    """

    def __init__(self, engine: Engine, ledger: Ledger, *, quarantine_seconds: float, age_seconds: float) -> None:
        self._engine = engine
        self._ledger = ledger
        self._quarantine = quarantine_seconds
        self._age = age_seconds
        self._ours: dict[str, tuple[str, str]] = {}
        """The epoch and the version of its row for which each show was found to be ours. Any thread reads and writes it
        without a lock: an entry that is old, or missing, only costs another look at the note."""

    def admits(self, show_id: str) -> bool:
        """Whether the show is ours, so that its frames may be booked now; imports it if that is what it takes.

        Raises NotReady and SQLAlchemy's errors: then nothing may be booked.
        """
        return self.seconds_left([show_id]).get(show_id) == 0

    def seconds_left(self, show_ids: Collection[str]) -> dict[str, float]:
        """Seconds until each of these shows is ours, by its id: of quarantine, or 0 when it is ours. Shows that are not
        managed are missing. Imports and raises as admits() does, with one statement where all are ours."""
        versions = ask(self._engine, managed_show_versions, list(show_ids))
        return {show_id: self._seconds_left(show_id, version) for show_id, version in versions.items()}

    def _seconds_left(self, show_id: str, version: str) -> float:
        """Seconds until a managed show is ours, 0 if it is; imports it if that is what it takes, and writes its note.
        ``version`` is that of its row. Raises NotReady and SQLAlchemy's errors."""
        ours = (self._ledger.epoch().text, version)
        if self._ours.get(show_id) == ours:
            return 0
        with answering(self._ledger.client), self._ledger.client.pipeline(transaction=False) as pipe:
            pipe.hget(keys.IMPORTED, show_id)
            pipe.time()
            text, (seconds, micros) = pipe.execute()
        note, now = ImportNote.parse(text), float(seconds) + float(micros) / 1e6
        wanted = self._next(show_id, note, version, now)
        if wanted != note:
            with answering(self._ledger.client):
                self._ledger.client.hset(keys.IMPORTED, show_id, wanted.text)
        if wanted.due:
            return wanted.due - now
        self._ours[show_id] = ours
        return 0

    def import_all(self) -> None:
        """Import every managed show that is not ours yet, with or without work to book. Raises as admits() does.

        The frames of a show that is not imported count as foreign under their limits, and twice once a recompute has
        found them.
        """
        imported = imported_shows(self._ledger.client)
        for show_id, version in ask(self._engine, managed_show_versions).items():
            if imported.get(show_id) == version:
                continue
            # The note decides, not this process's memory: another process may have deleted the note.
            self._ours.pop(show_id, None)
            try:
                self.admits(show_id)
            except (InvalidInput, DataError):  # the show's own rows; any other error would meet every show
                log.exception("show_not_imported", show=show_id)

    def _next(self, show_id: str, note: ImportNote | None, version: str, now: float) -> ImportNote:
        """The note of the show's next state; imports the show on its way there."""
        ours = ImportNote(version)
        quarantined = ImportNote(version, now + self._quarantine) if self._quarantine else ours
        if note is None:
            self._import(show_id)
            return quarantined
        if note.due > now:
            return note
        if note.version != version:
            # Cuebot may have had the show meanwhile. It booked there only if procs are found that the ledger lacks.
            return quarantined if Cause.MISSING in self._import(show_id).causes else ours
        if note.due:
            self._import(show_id)
        return ours

    def _import(self, show_id: str) -> RecomputeReport:
        """Write the caps of a show, and of all limits, and bring the show's procs into the ledger. Raises NotReady and
        SQLAlchemy's errors."""
        reseed_limits(self._engine, self._ledger, [show_id])
        # A recompute under way may have seen the show unmanaged: new numbers keep it from retiring the show's entries.
        renew_entries(self._ledger, show_id)
        report = recompute(self._engine, self._ledger, [show_id], age_seconds=self._age, write_tables=False)
        log.info("show_imported", show=show_id, procs=report.procs, healed=report.healed)
        return report


# Our own command.


@dataclass(frozen=True, slots=True)
class Flip:
    """What a command that hands a show over, or back, has done."""

    changed: bool
    """Whether the show's flag was another one before."""
    store_ready: bool = True
    """Whether Redis was open. Where it was not, the first worker imports a show handed over, and the bootstrap leaves
    out one handed back."""


def hand_over(
    engine: Engine,
    ledger: Ledger,
    show_id: str,
    *,
    wait_seconds: float,
    age_seconds: float,
    sleep: Callable[[float], None] = time.sleep,
) -> Flip:
    """Make a show ours; returns when it may be booked. ``wait_seconds`` is its quarantine."""
    with engine.begin() as connection:
        changed = shows.set_rows(connection, "show", "pk_show", [show_id], {"b_scheduler_managed": True})
    imported = ImportedShows(engine, ledger, quarantine_seconds=wait_seconds, age_seconds=age_seconds)
    try:
        while left := imported.seconds_left([show_id]).get(show_id):
            sleep(left)
        refresh_tables(engine, [show_id])
    except NotReady:
        return Flip(changed, store_ready=False)
    return Flip(changed)


def hand_back(
    engine: Engine,
    ledger: Ledger,
    show_id: str,
    *,
    wait_seconds: float,
    age_seconds: float,
    sleep: Callable[[float], None] = time.sleep,
) -> Flip:
    """Give a show back to Cuebot. After ``wait_seconds`` every commit of ours that had read the flag is over."""
    with engine.begin() as connection:
        # While the row is locked no proc of the show can be released: so the tables are right when the flag changes.
        if not shows.lock_show(connection, show_id):
            return Flip(False)
        refresh_tables(engine, [show_id], as_cuebot=True)
        shows.set_rows(connection, "show", "pk_show", [show_id], {"b_scheduler_managed": False})
    sleep(wait_seconds)
    try:
        _settle_handed_back(engine, ledger, [show_id], age_seconds)
        _take_notes(ledger.client, [show_id])
    except NotReady:
        return Flip(True, store_ready=False)
    return Flip(True)


# From ours to handed back, to Cuebot's: what follows when the flag alone was cleared, by a Cuebot for instance.


def follow_handed_back(engine: Engine, ledger: Ledger, *, age_seconds: float) -> list[str]:
    """Bring tables and ledger up to date for shows that have lost their flag since the last call, whoever cleared it;
    returns the shows that this call has seen to.

    Until then their tables are as old as the last recompute, and Cuebot books by them. What a commit of ours that had
    read the flag adds later, refresh_handed_back() counts. Raises NotReady and SQLAlchemy's errors; the next recompute
    does what is left undone.
    """
    # The notes are read before the flags: of a show that is handed over in between there is no note yet. One whose flag
    # is set again after that is imported once more.
    with answering(ledger.client):
        noted = cast("list[str]", ledger.client.hkeys(keys.IMPORTED))
    gone = _take_notes(ledger.client, sorted(set(noted) - ask(engine, managed_show_ids)))
    if gone:
        log.info("shows_handed_back", shows=gone, retired=_settle_handed_back(engine, ledger, gone, age_seconds))
    return gone


def _take_notes(client: redis.Redis, show_ids: Sequence[str]) -> list[str]:
    """Remember these shows as handed back, and delete their notes; returns those whose notes were still there.

    Every process is notified, and only the one that deletes a show's note does what follows.
    """
    if not show_ids:
        return []
    with answering(client):
        known_at = float(client.time()[0]) + CUEBOT_CACHE_SECONDS
        client.zadd(keys.HANDED_BACK, dict.fromkeys(show_ids, known_at))
        return [show_id for show_id in show_ids if client.hdel(keys.IMPORTED, show_id)]


def refresh_handed_back(engine: Engine, client: redis.Redis) -> int:
    """Bring the tables of shows handed back up to date, once every Cuebot knows; returns the rows written.

    Each call does it again for ten minutes, because it passes over locked rows. Raises RedisError.
    """
    now = float(client.time()[0])
    known = client.zrange(keys.HANDED_BACK, "-inf", str(now), byscore=True)
    if not known:
        return 0
    theirs = set(map(str, known)) - ask(engine, managed_show_ids)
    written = sum(refresh_tables(engine, theirs, as_cuebot=True).values())
    client.zremrangebyscore(keys.HANDED_BACK, "-inf", now - _REFRESHED_SECONDS)
    log.info("tables_of_handed_back_shows", shows=len(theirs), rows=written)
    return written


def _settle_handed_back(engine: Engine, ledger: Ledger, show_ids: Sequence[str], age_seconds: float) -> int:
    """Write the tables as Cuebot counts, and remove the ledger's entries; returns how many. Raises NotReady."""
    refresh_tables(engine, show_ids, as_cuebot=True)
    return recompute(engine, ledger, show_ids, age_seconds=age_seconds, write_tables=False).healed
