"""The backlog of a process and what tells it of changes together: list, watch, resync.

*List*: all layers that wait, once. *Watch*: what PostgreSQL's triggers name, and what other workers found, is read with
the next pass, in one statement for all of it. *Resync* finds what nobody named: each worker compares the versions of
the layers of the jobs in its own buckets, in the background, and tells the others what differed.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import structlog
from redis.exceptions import RedisError
from sqlalchemy import Engine, Row

from opencue_sched.background import PeriodicThread
from opencue_sched.clients.postgres import ask
from opencue_sched.coordination.change_log import BacklogChanges
from opencue_sched.dispatch.clusters import scoped_facilities
from opencue_sched.dispatch.other_hosts import OtherHosts
from opencue_sched.domain.jobs import Frame
from opencue_sched.domain.plans import Waiting
from opencue_sched.domain.shards import ALL_BUCKETS, bucket_of
from opencue_sched.placement.backlog import PORTION_SECONDS, Backlog
from opencue_sched.settings import Settings
from opencue_sched.store.backlog import fetch_layers, fetch_portions, fetch_versions
from opencue_sched.store.pending import fetch_limit_caps, fetch_shares
from opencue_sched.store.schema import SchemaFacts

log = structlog.get_logger(__name__)

SHOWS_READ_SECONDS = 1.0
"""The time between two reads of the shows while anything waits, unless one was named: their flags, subscriptions, and
the clock of the database."""
RESYNC_SECONDS = 10.0
"""The time between two rounds of the resync; more, where LAYERS_PER_SECOND does not let a round be done in it."""
DEAF_RESYNC_SECONDS = 5.0
"""The time between two rounds while notifications of changes are not heard, or do not name the backlog."""
WHOLE_ROUND_SECONDS = 60.0
"""The least time between two rounds in which a process compares all layers, not only those of its own buckets: a worker
of the release before compares none, or others, and what another one found may not have been heard."""
WHOLE_ROUND_LAYERS_PER_SECOND = 500
"""The most layers that all processes of a fleet together compare a second in such rounds, which are the rarer the more
layers and processes there are. Not where this process hears of no changes: there nothing else finds some of them."""
LAYERS_PER_SECOND = 2_000
"""The most layers that are compared in a second, on average: a twentieth of a core of PostgreSQL."""
_HEAR_SECONDS = 1.0
"""The time between two looks at what the others found."""
_READ_AT_ONCE = 1_000
"""Layers, and jobs, that one statement names."""


class BacklogFeed:
    """Backlog, reads and notices together. Thread-safe; what was named is read by one thread at a time.

    ``own`` says of which buckets of jobs (by their ids) this process compares the layers; ``facts`` what the database
    has.
    ``found`` is called with the shows (ids) that have work, or may book, of which nobody was told: their clusters may
    rest.
    ``divided``: whether hosts are divided among workers now.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        facts: Callable[[], SchemaFacts],
        changes: BacklogChanges,
        *,
        own: Callable[[], frozenset[int]] = lambda: ALL_BUCKETS,
        found: Callable[[Collection[str]], object] = bool,
        divided: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._facts = facts
        self._changes = changes
        self._own = own
        self._found = found
        self._divided = divided
        self._others = OtherHosts(engine, settings, clock=clock)
        self._clock = clock
        # A permit lives until the commit's deadline. What was booked under one may be in what others read before that
        # commit: they are done with it by then, unless the commit takes more than half of the time that it has.
        most = settings.accounting.commit_deadline / 2
        self.backlog = Backlog(clock, portion_seconds=min(PORTION_SECONDS, most))
        self._reading = threading.Lock()
        """Held by the thread that reads what was named."""
        # What was named since the last read: the listener's thread adds to it and passes take it, under ``_lock``.
        self._lock = threading.Lock()
        self._layers: set[str] = set()
        self._jobs: set[str] = set()
        self._shows: set[str] = set()
        # What a read found, set by the thread that holds ``_reading``. Others read these without a lock: a mapping is
        # replaced as a whole and never changed. ``_shares_at`` is also set back by any thread that wants a new read.
        self._listed = False
        self._of_show: Mapping[str, list[Row[Any]]] = {}
        """The subscriptions of each show."""
        self._limits: Mapping[str, Row[Any]] = {}
        self._shares_at = -math.inf
        self._database_ahead = 0.0
        """The database's clock (epoch seconds) less ``clock``."""
        # Touched by the resync's thread alone, except the two times, which any thread may set back.
        self._cursor: str | None = None
        self._untold: set[str] = set()
        """Layers that differed and that the others could not be told of."""
        self._round_at = -math.inf
        self._whole_at = clock()
        """The time of the last round over all layers, or of the start."""
        self._resynced_at = clock()
        self.deaf = False
        """Whether no notice is heard; set by the listener's thread."""
        self.resyncing = PeriodicThread(
            "backlog-resync", self.resync, failed="backlog_not_compared", retry_seconds=1.0, longest_retry_seconds=10.0
        )

    # Watch

    def note(self, layers: Collection[str] = (), *, jobs: Collection[str] = (), shows: Collection[str] = ()) -> None:
        """Note that layers, jobs or shows changed: the next pass reads them."""
        with self._lock:
            self._layers.update(layers)
            self._jobs.update(jobs)
            self._shows.update(shows)

    def caps_changed(self, jobs: Collection[str] = ()) -> None:
        """Note that bursts, limits, or caps and priorities of jobs changed: the next pass reads them."""
        self._shares_at = -math.inf
        self.note(jobs=jobs)

    def missed(self) -> None:
        """Note that changes were not heard for a while: everything is compared at once, and planned meanwhile."""
        self._whole_at = self._round_at = self._shares_at = -math.inf
        self.resyncing.wake()

    def follow(self) -> None:
        """Read what was named since the last call, and the shows once a second while anything waits. Errors of
        PostgreSQL go to the caller, and what was named is read with the next call."""
        with self._reading:
            if not self._listed:
                self._read_all()
            with self._lock:
                layers, jobs, shows = self._layers, self._jobs, self._shows
                self._layers, self._jobs, self._shows = set(), set(), set()
            try:
                # What shows may do matters to no sweep and no pass while nothing waits.
                waits = bool(layers or jobs or len(self.backlog))
                if shows or (waits and self._clock() - self._shares_at >= SHOWS_READ_SECONDS):
                    self._read_shows()
                self._read(layers | self.backlog.stale(), jobs, shows)
            except BaseException:
                self.note(layers, jobs=jobs, shows=shows)
                raise

    def read_portions(self, wanted: Iterable[Waiting]) -> None:
        """Read the first frames of these layers."""
        named = {waiting.layer.id: waiting for waiting in wanted}
        sizes = self.backlog.portion_sizes(named.values())
        read_at = self.backlog.instant()
        uncounted = self._settings.queue.uncounted_exit_statuses
        portions = ask(self._engine, fetch_portions, self._facts(), sizes, uncounted=uncounted)
        divided = self._divided()
        for portion in portions:
            frames = self._with_others(named[portion.layer_id], portion.frames) if divided else portion.frames
            self.backlog.apply_portion(
                portion.layer_id, portion.waiting_frames, frames, portion.back_in, read_at=read_at
            )
        self.note(sizes.keys() - {portion.layer_id for portion in portions})

    def _with_others(self, waiting: Waiting, frames: Sequence[Frame]) -> tuple[Frame, ...]:
        """The frames of a layer, those that failed with the word whether more hosts could take them (OtherHosts.note):
        where a farm is divided, this process does not know all hosts."""
        shares = self.shares([waiting.job.show_id])
        return self._others.note(waiting, frames, {share.alloc_id for share in shares if share.burst_centicores > 0})

    # What is known of shows

    def now(self) -> float:
        """The database's clock, in epoch seconds, carried on by this process's own."""
        return self._clock() + self._database_ahead

    def shares(self, show_ids: Collection[str]) -> list[Row[Any]]:
        """The subscriptions of these shows, as of the last read."""
        return [share for show_id in show_ids for share in self._of_show.get(show_id, ())]

    def may_book(self, show_id: str) -> bool:
        """Whether the show's flags let its frames be booked, and it has a subscription with a burst."""
        return any(share.may_book and share.burst_centicores > 0 for share in self._of_show.get(show_id, ()))

    def show_name(self, show_id: str) -> str:
        """The show's name; empty for one that is not known."""
        return next((share.show_name for share in self._of_show.get(show_id, ())), "")

    def limits(self) -> Mapping[str, Row[Any]]:
        """The limits by id, with their names, as of the last read."""
        return self._limits

    def age_seconds(self) -> float:
        """How long ago the last whole round of the resync ended.

        It is 0 before anything was read: the backlog is read when it is used first.
        """
        return self._clock() - self._resynced_at if self._listed else 0.0

    # Resync

    def resync(self) -> float:
        """Compare the layers of this process's buckets, if it is time to; in how many seconds to call it again."""
        self._hear()
        if not self._listed:
            return _HEAR_SECONDS
        now = self._clock()
        if now < self._round_at:
            return min(_HEAR_SECONDS, self._round_at - now)
        own, is_told = self._own(), self._facts().backlog_is_named and not self.deaf
        processes = len(ALL_BUCKETS) / max(1, len(own))
        seconds = len(self.backlog) * processes / WHOLE_ROUND_LAYERS_PER_SECOND if is_told else 0.0
        whole = now - self._whole_at >= max(WHOLE_ROUND_SECONDS, seconds)
        seconds = RESYNC_SECONDS if is_told else DEAF_RESYNC_SECONDS
        # Set before the round, because what is missed during it asks for another.
        self._round_at = now + max(seconds, len(self.backlog) / LAYERS_PER_SECOND)
        if whole:
            self._whole_at = now
        try:
            self._compare(own, ALL_BUCKETS if whole else own)
        except BaseException:
            self._round_at = -math.inf
            self._whole_at = -math.inf if whole else self._whole_at
            raise
        return _HEAR_SECONDS

    def _compare(self, own: frozenset[int], compared: frozenset[int]) -> None:
        """Compare the layers of the jobs in the buckets ``compared``, read those that differ, and tell the others of
        those in the buckets ``own``."""
        read_at = self.backlog.instant()
        rows = ask(
            self._engine,
            lambda connection: fetch_versions(
                connection,
                facilities=scoped_facilities(connection, self._settings),
                buckets=compared,
            ),
        )
        known = self.backlog.versions(compared)
        found = {row.layer_id for row in rows}
        differ = {row.layer_id for row in rows if known.get(row.layer_id) != row.version} | (known.keys() - found)
        self.backlog.apply_counts(
            {row.layer_id: row.waiting_frames for row in rows if row.layer_id not in differ}, read_at=read_at
        )
        mine = self.backlog.versions(own).keys() | {row.layer_id for row in rows if bucket_of(row.job_id) in own}
        if differ:
            with self._reading:
                self._read(differ, (), ())
            self._found(self.backlog.shows_of(differ))
        self._tell(differ & mine)
        self._resynced_at = self._clock()

    def _tell(self, layers: Iterable[str]) -> None:
        """Tell the other workers that these layers are not as they were. What cannot be told is told with the next
        round."""
        self._untold.update(layers)
        if not self._untold:
            return
        try:
            self._changes.publish(self._untold, by=self._settings.instance)
        except RedisError as error:
            log.warning("backlog_changes_not_published", layers=len(self._untold), error=str(error))
        else:
            self._untold.clear()

    def _hear(self) -> None:
        """Note what other workers found to differ. Where the log cannot say it, all layers are compared."""
        first = self._cursor is None
        try:
            self._cursor, ids = self._changes.since(self._cursor, but_of=self._settings.instance)
        except RedisError as error:
            log.warning("backlog_changes_not_read", error=str(error))
            return
        if ids:
            self.note(ids)
            if self._listed:
                self.follow()
                self._found(self.backlog.shows_of(ids))
        elif ids is None and not first:
            self._round_at = self._whole_at = -math.inf

    # Inside

    def _read_all(self) -> None:
        """Read all that waits, for the first time. Under ``_reading``. Errors of PostgreSQL go to the caller."""
        read_at = self.backlog.instant()
        self._read_shows()
        rows = ask(
            self._engine,
            lambda connection: fetch_layers(
                connection, self._facts(), facilities=scoped_facilities(connection, self._settings)
            ),
        )
        listed = ((row.job, row.layer, row.version) for row in rows.layers)
        self.backlog.apply(listed, bad=rows.bad, read_at=read_at)
        self._listed = True
        self._resynced_at, self._round_at = self._clock(), self._clock() + RESYNC_SECONDS
        log.info("backlog_listed", layers=len(self.backlog))

    def _read_shows(self) -> None:
        """Read what the shows may do, and the limits. Wakes shows that may book since now. Under ``_reading``; errors
        of PostgreSQL go to the caller."""
        read_at = self._clock()

        def read(connection: Any) -> tuple[Sequence[Row[Any]], Mapping[str, Row[Any]]]:
            return fetch_shares(connection), fetch_limit_caps(connection)

        shares, self._limits = ask(self._engine, read)
        of_show: defaultdict[str, list[Row[Any]]] = defaultdict(list)
        for share in shares:
            of_show[share.show_id].append(share)
            self._database_ahead = share.now - self._clock()
        closed = {show_id for show_id in of_show if not self.may_book(show_id)}
        self._of_show = dict(of_show)
        self._shares_at = read_at
        opened = set(filter(self.may_book, closed))
        # The postings of a show sleep while it may not book, for longer than nobody should be told that it may.
        if opened and self._listed:
            self._found(opened)

    def _read(self, layers: Collection[str], jobs: Collection[str], shows: Collection[str]) -> None:
        """Read these layers, and all that wait of these jobs and shows; what is not found waits no more."""
        if not (layers or jobs or shows):
            return
        read_at = self.backlog.instant()
        asked = set(layers) | self.backlog.of_jobs(jobs) | self.backlog.of_shows(shows)
        rows = ask(
            self._engine,
            lambda connection: fetch_layers(
                connection,
                self._facts(),
                facilities=scoped_facilities(connection, self._settings),
                layer_ids=layers,
                job_ids=jobs,
                show_ids=shows,
            ),
        )
        found = [(row.job, row.layer, row.version) for row in rows.layers]
        there = {layer.id for _, layer, _ in found} | {bad.layer_id for bad in rows.bad}
        self.backlog.apply(found, bad=rows.bad, gone=asked - there, read_at=read_at)
