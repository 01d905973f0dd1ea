"""What a worker does when PostgreSQL notifies it of something (design 4, "Release feeds").

Every worker listens: releasing twice, loading caps twice and waking twice are harmless, and no worker depends on
another. After a lost connection one worker looks at everything for all (missed_news); what is lost otherwise is made up
for by the recompute, the reseed and the sweep.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

import structlog
from redis.exceptions import RedisError
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.accounting.caps import load_caps, reseed_limits
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.accounting.recompute import RecomputeReport, recompute
from opencue_sched.coordination.names import LookKeys
from opencue_sched.dispatch.hosts import HostFeed
from opencue_sched.domain.errors import NotReady
from opencue_sched.operate.flip import follow_handed_back
from opencue_sched.operate.missed_news import MissedNews
from opencue_sched.operate.waker import SweepFor, Waker
from opencue_sched.release.listener import Handlers, NotificationListener
from opencue_sched.release.model import EventCounts
from opencue_sched.settings import Settings
from opencue_sched.store.accounting import managed_show_ids
from opencue_sched.store.capped import shows_under

log = structlog.get_logger(__name__)

Recomputed = Callable[[RecomputeReport], object]


class Events:
    """Listener and waker of one process. ``wake(show ids, host ids)`` sweeps; ``recomputed`` gets each report."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        ledger: Ledger,
        hosts: HostFeed,
        wake: SweepFor,
        counts: EventCounts,
        *,
        recomputed: Recomputed,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._ledger = ledger
        self._hosts = hosts
        self._recomputed = recomputed
        self._waker = Waker(wake)
        self._by_id = settings.accounting.release_feed == "proc-trigger"
        self._missed = MissedNews(
            ledger.client,
            LookKeys(settings.coordination.namespace, settings.scheduler.facility),
            look_at_all=self._look_at_all,
            follow_caps=self._follow_caps,
        )
        self.listener = NotificationListener(settings, self._handlers(), counts=counts)

    def _handlers(self) -> Handlers:
        return Handlers(
            on_release=self._released,
            on_caps=self._caps_changed,
            on_work=self._waker.shows,
            on_handed_back=self._handed_back,
            on_reconnect=self._missed.everything,
        )

    def start(self) -> None:
        self._waker.start()
        self._missed.start()
        self.listener.start()

    def stop(self) -> None:
        self.listener.stop()
        self._missed.stop()
        self._waker.stop()

    def _released(self, procs: Sequence[str], hosts: Sequence[str]) -> None:
        """Our trigger is in the database. With another feed, releases reach the ledger by that."""
        self._hosts.note(hosts)
        self._waker.hosts(hosts)
        if not self._by_id:
            return
        try:
            self._ledger.release(procs)
        except (NotReady, RedisError) as error:
            log.warning("release_left_to_recompute", procs=len(procs), error=str(error))

    def _caps_changed(self, vertices: Collection[str]) -> None:
        """Vertices as our triggers name them: ``sub:{show}:{alloc}``, ``folder:{id}``, ``job:{id}``, ``limit:{id}``."""
        try:
            self._follow_caps(vertices)
        except (NotReady, RedisError, SQLAlchemyError) as error:
            log.warning("caps_left_for_a_moment", vertices=len(vertices), error=str(error))
            self._missed.caps(vertices)

    def _follow_caps(self, vertices: Collection[str]) -> None:
        load_caps(self._engine, self._ledger, [f"acct:{vertex}" for vertex in vertices])
        self._waker.shows(self._shows_under(vertices))

    def _shows_under(self, vertices: Collection[str]) -> frozenset[str]:
        """The shows whose work may go on now that these caps have changed."""
        ids = defaultdict[str, list[str]](list)
        for vertex in vertices:
            kind, _, id_ = vertex.partition(":")
            ids[kind].append(id_)
        subscribed = frozenset(pair.partition(":")[0] for pair in ids["sub"])
        if not (ids["folder"] or ids["job"] or ids["limit"]):
            return subscribed
        with self._engine.connect() as connection:
            return subscribed | shows_under(connection, folders=ids["folder"], jobs=ids["job"], limits=ids["limit"])

    def _handed_back(self, shows: Sequence[str]) -> None:
        """By whomever; our own command leaves little to do."""
        try:
            follow_handed_back(self._engine, self._ledger, age_seconds=self._settings.accounting.in_flight_age)
        except (NotReady, RedisError, SQLAlchemyError) as error:
            log.warning("handed_back_left_to_recompute", shows=list(shows), error=str(error))

    def _look_at_all(self) -> None:
        """What was released and which caps changed while nobody heard: as the next recompute and reseed would."""
        age = self._settings.accounting.in_flight_age
        self._recomputed(recompute(self._engine, self._ledger, age_seconds=age, write_tables=False))
        with self._engine.begin() as connection:
            shows = managed_show_ids(connection)
        reseed_limits(self._engine, self._ledger, shows)
        self._waker.shows(shows)
