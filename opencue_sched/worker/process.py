"""Makes everything that one process has open: engine, Redis, ledger, caches, channels.

What a notification leads to is in handlers.py, what a task alone does in ``tasks/``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import asdict
from functools import cached_property

import structlog
from celery import Celery
from prometheus_client import REGISTRY
from sqlalchemy import event

from opencue_sched.accounting.bootstrap import ensure_bootstrapped
from opencue_sched.accounting.caps import make_ledger
from opencue_sched.accounting.epoch import guarded_redis, look_at_store
from opencue_sched.accounting.show_handover import (
    CUEBOT_CACHE_SECONDS,
    ImportedShows,
    check_release_feed,
)
from opencue_sched.background import PeriodicThread
from opencue_sched.clients.lua_scripts import Fence
from opencue_sched.clients.postgres import STATEMENT_SECONDS, ask, make_engine
from opencue_sched.clock import boot_clock
from opencue_sched.coordination.change_log import BacklogChanges, HostChanges
from opencue_sched.coordination.keys import beat_keys, cluster_board
from opencue_sched.coordination.permits import FramePermits
from opencue_sched.coordination.postings import (
    CLAIM_SECONDS,
    ClaimRenewer,
    ClusterPostings,
    DueThread,
    with_messages,
)
from opencue_sched.coordination.presence import REFRESH_SECONDS, WorkerState
from opencue_sched.dispatch.backlog_feed import BacklogFeed
from opencue_sched.dispatch.cluster_pass import PassRunner
from opencue_sched.dispatch.clusters import FarmDivision, scoped_facilities
from opencue_sched.dispatch.dispatcher import Dispatcher
from opencue_sched.dispatch.host_feed import HostFeed
from opencue_sched.dispatch.sweep import Sweeper, SweepReport
from opencue_sched.dispatch.verdicts import VerdictLog, VerdictNotes
from opencue_sched.domain.clusters import Cluster
from opencue_sched.domain.shards import buckets
from opencue_sched.errors import SchedulerError
from opencue_sched.insight.health import check_stores
from opencue_sched.reports.announcements import AnnouncementSender
from opencue_sched.reports.event_receivers import receiver_of
from opencue_sched.rqd.channels import RqdChannels
from opencue_sched.settings import Settings
from opencue_sched.store.hosts import full_names
from opencue_sched.store.job_events import EVENTS_CHANNEL, note_receiver
from opencue_sched.store.lost_runs import UpkeepScope
from opencue_sched.store.pending import WaitingTag
from opencue_sched.store.privileges import WRITES_OF_WORKERS
from opencue_sched.store.schema import SchemaFacts, check_schema
from opencue_sched.worker import metrics
from opencue_sched.worker.event_wakes import EventWakes
from opencue_sched.worker.events import (
    BACKLOG_CHANNEL,
    CAPS_CHANNEL,
    HANDED_BACK_CHANNEL,
    RELEASE_CHANNEL,
    WORK_CHANNEL,
    NotificationListener,
    Waker,
)
from opencue_sched.worker.handlers import Handlers
from opencue_sched.worker.membership import Membership
from opencue_sched.worker.messenger import Messenger

log = structlog.get_logger(__name__)

COMMIT_MARGIN_SECONDS = 2.0
"""How much longer than the commit deadline the host cache counts what a plan took from a host."""


class Process:
    """The collaborators of one process. Thread-safe: several tasks of a threads pool share it.

    A worker makes the cached properties before it starts threads (`listen`); nothing guards their making.
    """

    def __init__(self, settings: Settings, app: Celery) -> None:
        namespace, facility = settings.coordination.namespace, settings.scheduler.facility
        self.settings = settings
        self.app = app
        self.engine = make_engine(settings, application_name=f"opencue-sched {settings.instance}"[:63])
        event.listen(self.engine, "before_cursor_execute", lambda *_: metrics.sql_statements.inc())
        self.client = guarded_redis(settings.redis_dsn, settings)
        self.ledger = make_ledger(self.engine, self.client, owner=settings.instance, accounting=settings.accounting)
        self.changes = HostChanges(self.client, namespace)
        self.announcements = AnnouncementSender(self.ledger, self.changes, metrics.record_event)
        self.channels = RqdChannels(settings.rqd, full_name=full_names(self.engine))
        self.postings = ClusterPostings(
            self.client, cluster_board(namespace, facility), division=lambda: self.division()
        )
        self.renewer = ClaimRenewer(
            self.postings,
            ttl_seconds=CLAIM_SECONDS,
            # The server cancels a statement after this time: a step that takes longer waits for no answer of it.
            patience_seconds=STATEMENT_SECONDS,
        )
        self.membership = Membership(
            self.client,
            settings,
            lambda: {claim.cluster.key for claim in self.renewer.held()},
            self.channels.unreached,
        )
        self.division = FarmDivision(self.engine, settings, self.membership.router.instances)
        self.messenger = Messenger(app, self.membership.router, legacy_queues=settings.coordination.legacy_queues)
        self.event_wakes = EventWakes(self.client, settings, self.messenger)
        self.due = DueThread(self.postings, send=self.messenger.send)
        self.sweeper = Sweeper(
            self.engine,
            settings,
            self.postings,
            division=self.division,
            on_reading=self._read_facts,
            waiting=self._waiting_tags,
        )
        self.leader_keys = beat_keys(namespace, facility)
        self._counters = PeriodicThread(
            "counters",
            self.keep_counters,
            failed="counters_not_filled",
            retry_seconds=0.25,
            longest_retry_seconds=REFRESH_SECONDS,
        )
        self._reconnects = 0
        """How often the listener came back. Written by the listener's thread alone."""
        self._reconnects_made_up_for = 0
        """The number of the last reconnect after which what was missed was read again. The counters' thread alone reads
        and writes it."""
        self._unpublished_at: float | None = None
        """The time at which a recompute of this process found releases that nobody had published (boot clock). Written
        by the thread of that task and by the counters' thread, without a lock: each writes what it has just seen, so
        either may be the last."""
        self.waker = Waker(self.wake)
        self.handlers = Handlers(
            self.engine, settings, self.ledger, self.waker, hosts=lambda: self.hosts, backlog=lambda: self.backlog
        )
        self.listener = self._make_listener()
        self._closing = ExitStack()
        # Given back in the reverse order: a thread ends before what it uses is closed.
        for give_back in (
            self.engine.dispose,
            self.client.close,
            self.announcements.close,
            self.channels.close,
            self.renewer.stop,
            self.due.stop,
            self._counters.stop,
            self.waker.stop,
            self.listener.stop,
        ):
            self._closing.callback(give_back)

    def _make_listener(self) -> NotificationListener:
        """The listener that calls this process's handlers. It is started by `listen`."""
        return NotificationListener(
            self.engine,
            {
                RELEASE_CHANNEL: self.handlers.released,
                CAPS_CHANNEL: self.handlers.caps_changed,
                WORK_CHANNEL: self.handlers.work_waits,
                BACKLOG_CHANNEL: self.handlers.backlog_changed,
                HANDED_BACK_CHANNEL: self.handlers.handed_back,
                EVENTS_CHANNEL: self.wake_events,
            },
            on_reconnect=self._reconnected,
            on_deaf=self.handlers.deaf,
        )

    @cached_property
    def facts(self) -> SchemaFacts:
        """What the database schema has, as it was read with the clusters last. Raises WrongSchema."""
        return ask(self.engine, check_schema)

    def _read_facts(self) -> None:
        """Read what the schema has again: its Cuebot may have been upgraded. Raises WrongSchema."""
        known, found = self.facts, ask(self.engine, check_schema)
        if found != known:
            self.facts = found
            log.info("schema_changed", **asdict(found))

    @cached_property
    def hosts(self) -> HostFeed:
        """The hosts in memory, and the thread that reads them again."""
        made = HostFeed(
            self.engine,
            self.changes,
            self.settings.host_cache,
            instance=self.settings.instance,
            # A host must not be handed out again while what was planned on it may still be committed.
            taken_seconds=self.settings.accounting.commit_deadline + COMMIT_MARGIN_SECONDS,
            division=self.division,
            found=lambda hosts: self.waker.note(hosts),
        )
        self._closing.callback(made.rereading.stop)
        made.rereading.start()
        return made

    @cached_property
    def backlog(self) -> BacklogFeed:
        """The waiting layers in memory, and the thread that compares them with the database."""
        made = BacklogFeed(
            self.engine,
            self.settings,
            lambda: self.facts,
            BacklogChanges(self.client, self.settings.coordination.namespace),
            own=lambda: buckets(self.settings.instance, tuple(sorted(self.membership.router.instances()))),
            found=lambda shows: self.waker.note(shows=shows),
            divided=lambda: bool(self.division()),
        )
        self._closing.callback(made.resyncing.stop)
        made.resyncing.start()
        return made

    @cached_property
    def verdicts(self) -> VerdictNotes:
        """The verdicts of this process's passes, and the thread that writes them."""
        log = VerdictLog(self.client, self.settings.coordination.namespace)
        made = VerdictNotes(log, self.backlog.backlog.known)
        self._closing.callback(made.writing.stop)
        made.writing.start()
        return made

    @cached_property
    def imported(self) -> ImportedShows:
        """The shows that are imported, which imports a show before its first booking."""
        return ImportedShows(
            self.engine,
            self.ledger,
            quarantine_seconds=CUEBOT_CACHE_SECONDS if self.facts.origin == "cuebot" else 0.0,
            age_seconds=self.settings.accounting.in_flight_age,
        )

    @cached_property
    def dispatcher(self) -> Dispatcher:
        """Makes the passes of this process."""
        runner = PassRunner(
            engine=self.engine,
            settings=self.settings,
            ledger=self.ledger,
            hosts=self.hosts,
            backlog=self.backlog,
            permits=FramePermits(self.client, self.settings.coordination.namespace),
            channels=self.channels,
            facts=lambda: self.facts,
            verdicts=self.verdicts,
            imported=self.imported,
            at_caps=self.sweeper.at_caps,
            freed=self.waker.note,
            follows=self._pass_follows,
        )
        return Dispatcher(
            self.settings,
            self.postings,
            self.renewer,
            runner,
            self.settings.instance,
            self.messenger.send,
            self.due.look_in,
            self.waker.hold,
        )

    @property
    def scope(self) -> UpkeepScope:
        """The rows that upkeep may touch: of the fleet's facility; beside a Cuebot, of managed shows alone."""
        return UpkeepScope(self.settings.scheduler.facility, beside_cuebot=self.facts.origin == "cuebot")

    def _waiting_tags(self) -> frozenset[WaitingTag]:
        """The facilities, shows and tags that have waiting work, with what was named until now."""
        self.backlog.follow()
        return self.backlog.backlog.waiting_tags()

    def _pass_follows(self, clusters: Collection[Cluster]) -> None:
        """Drop the sweep for hosts that came free before a pass over all clusters that could use them."""
        if self.sweeper.are_all(clusters):
            self.waker.took_in_hosts()

    def stopping(self) -> bool:
        """Whether this process takes no more work and is about to end."""
        return self.membership.workload.state is WorkerState.DRAINING

    def wake(self, shows: Collection[str], hosts: Collection[str]) -> float:
        """Sweep for shows that have work and hosts that came free; seconds after which to sweep for these hosts again,
        0 for no need."""
        return self.sweep(wake_shows=shows, wake_hosts=hosts).ask_again

    def listen(self) -> None:
        """Hear notifications from now on, and read again what was missed of them."""
        _ = self.hosts, self.verdicts, self.dispatcher  # made before several threads ask for them
        self.watch_backlog()
        self._counters.start()
        self.waker.start()
        self.listener.start()

    def watch_backlog(self) -> None:
        """Show in metrics and presence what becomes of the backlog."""
        backlog = self.backlog
        metrics.watch_backlog(backlog, self.dispatcher.runner.lost)
        self.membership.backlog = lambda: (backlog.age_seconds(), backlog.deaf)

    def wake_events(self) -> None:
        """Have events of jobs, which were just written, sent at once, where there is a receiver."""
        if self._has_receiver():
            self.event_wakes.wake()

    def _has_receiver(self) -> bool:
        """Whether this process sends events of jobs: it has a receiver, and no Cuebot is there, which sends mails."""
        return receiver_of(self.settings.events) is not None and not self.scope.beside_cuebot

    def _note_receiver(self) -> None:
        """Have events of jobs written, and beat look for them, where this process has a receiver."""
        if self._has_receiver():
            with self.engine.begin() as connection:
                note_receiver(connection, self.settings.scheduler.facility)

    def _reconnected(self) -> None:
        """Have what the listener missed read by the counters' thread, once the listener hears again: it goes on
        hearing, and that thread tries again until it works."""
        self._reconnects += 1
        self._counters.wake()

    def _read_what_was_missed(self, sleep: Callable[[float], None]) -> None:
        """Read again all that notifications tell of. Each process does so for what it keeps in memory. Releases and
        caps are the whole fleet's, so one process at a time reads them, and others wait until that has done it."""
        reconnects = self._reconnects
        if reconnects == self._reconnects_made_up_for:
            return
        # Work and hosts first: a host that came free needs no recount where no cap is reached.
        self.hosts.missed()
        self.backlog.missed()
        # The database may be one of before, restored from a backup, that knows of no receiver.
        self._note_receiver()
        self.sweeper.reload()
        self.handlers.wake_all()
        self.bootstrap(fleet_start=True, sleep=sleep)
        self.handlers.handed_back(())
        # Again: now the ledger has the headroom that the releases made.
        self.handlers.wake_all()
        self._reconnects_made_up_for = reconnects
        log.info("missed_notifications_made_up_for")

    def sweep(
        self,
        *,
        wake_shows: Collection[str] = (),
        wake_hosts: Collection[str] = (),
        may_nap: bool = False,
        fence: int | None = None,
    ) -> SweepReport:
        """Post clusters with work and send their messages. Raises FencedOff when a leader after that of ``fence`` was
        elected."""
        fenced = self.fence(fence)
        report = self.sweeper.sweep(wake_shows=wake_shows, wake_hosts=wake_hosts, may_nap=may_nap, fence=fenced)
        for enqueued in with_messages(enqueued for _, enqueued in report.send):
            self.messenger.send(enqueued)
        metrics.record_sweep(report)
        return report

    def fence(self, number: int | None) -> Fence | None:
        """What the scripts compare with the leader's record; None for a message that no leader sent."""
        return None if number is None else Fence(self.leader_keys.fence, number)

    # Start and stop

    def start(self, node: str, capacity: int, sleep: Callable[[float], None]) -> None:
        """Check and do all that must be done before the first message. Raises SchedulerError, which says what to do,
        and whatever ``sleep`` raises to end the waiting."""
        queue = self.settings.queue
        metrics.serve_metrics(queue.metrics_host, queue.metrics_port, REGISTRY)
        check_stores(self.engine, self.client, self.settings, WRITES_OF_WORKERS)
        log.info("schema_found", **asdict(self.facts))
        ask(self.engine, scoped_facilities, self.settings)
        self.membership.join(node, queues=lambda: self.app.amqp.queues.consume_from, capacity=capacity)
        self.check_feed()
        with self.membership.present():
            self.bootstrap(fleet_start=self.membership.is_first(), sleep=sleep)
        self._note_receiver()
        self.listen()
        self.due.start()
        log.info("worker_started", worker=node, instance=self.settings.instance)

    def bootstrap(self, *, fleet_start: bool = False, sleep: Callable[[float], None] = time.sleep) -> None:
        """Fill the counters unless they are filled; blocks until this or another process has done it."""
        accounting = self.settings.accounting
        ensure_bootstrapped(
            self.engine,
            self.ledger,
            fleet_start=fleet_start,
            dual=accounting.release_feed == "cuebot-redis",
            wait_age=accounting.in_flight_age,
            sleep=sleep,
        )
        metrics.store_ready.set(1)

    def refill_counters(self) -> None:
        """Have the counters filled beside the work: a pass found them closed."""
        metrics.store_ready.set(0)
        self._counters.start()
        self._counters.wake()

    def keep_counters(self) -> float:
        """Show whether the counters are open and the age of the last recompute; fill them if they are not, so that the
        first work after a quiet time does not wait for that; then make up for missed notifications, and follow again
        layers whose limits have changed. Returns when to look again."""

        def sleep(seconds: float) -> None:
            if self._counters.pause(seconds):
                raise SchedulerError("the process is ending")

        is_open, age = look_at_store(self.client)
        metrics.record_store(is_open, age)
        found_at = self._unpublished_at
        if found_at is not None and age is not None and boot_clock() - found_at > age + 1:
            # Another process has made a recompute since, and shows what that found.
            self._unpublished_at = None
            metrics.publish_misconfigured.set(0)
        if not is_open:
            self.bootstrap(sleep=sleep)
        self._read_what_was_missed(sleep)
        self.handlers.follow_again()
        return REFRESH_SECONDS

    def check_feed(self, unpublished_cores: int = 0) -> None:
        """Tell log and metrics whether releases reach the ledger. The worker goes on with a feed that cannot deliver.

        ``unpublished_cores``: what a recompute of this process has found (RecomputeReport).
        """
        misconfigured, message = check_release_feed(self.engine, self.settings.accounting.release_feed)
        self._unpublished_at = boot_clock() if unpublished_cores else None
        if unpublished_cores:
            misconfigured = True
            message = (
                f"procs of {unpublished_cores} cores ended since the last recompute, and no Cuebot took them off the "
                "counters: does every Cuebot publish (accounting.redis.enabled=true, the same Redis)?"
            )
        metrics.publish_misconfigured.set(int(misconfigured))
        (log.warning if misconfigured else log.info)("release_feed", message=message)

    def stop(self) -> bool:
        """Let the tasks in hand end, within the grace, and give everything back. Returns whether all tasks have ended;
        if not, nothing more is waited for, and nothing given back."""
        idle = self.membership.leave()
        if idle:
            self.close()
        return idle

    def close(self) -> None:
        """Stop all threads and close all connections. Claims that were not ended expire by themselves."""
        self._closing.close()
