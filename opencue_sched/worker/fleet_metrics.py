"""Metrics of the fleet: what every beat shows, what only the leading beat shows, and what workers count of messages.

What must be known when no worker lives comes from the leading beat: workers alive, queues, waiting frames, the age of
the newest host report. A standby does not show these series, and neither does any other process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cached_property

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from opencue_sched.accounting.connection import make_redis
from opencue_sched.coordination.leader import LeaderGate
from opencue_sched.coordination.names import BoardKeys, cluster_board, worker_group
from opencue_sched.coordination.periodic import PeriodicThread, boot_clock
from opencue_sched.coordination.postings import FAILURE_KINDS, ClusterPostings
from opencue_sched.coordination.presence import list_members
from opencue_sched.coordination.queues import queue_census
from opencue_sched.coordination.transport import count_unreadable_with
from opencue_sched.dispatch.clusters import scoped_facilities
from opencue_sched.dispatch.report import VerdictLog, count_frames_not_looked_at
from opencue_sched.domain.cluster import Verdict
from opencue_sched.insight.farm import believed_seconds
from opencue_sched.settings import Settings
from opencue_sched.store.engine import make_engine
from opencue_sched.store.insight import newest_report_age, oldest_hold_age
from opencue_sched.store.schema import SchemaFacts, check_schema
from opencue_sched.worker.metrics import single_process_registry

CENSUS_SECONDS = 15.0
_SHOWN_SECONDS = 4 * CENSUS_SECONDS
"""A census that fails is repeated before its figures go; figures of long ago are worse than none."""


class RecentFigures(Collector):
    """Gauges that are shown for a while after each update, and only while ``shown`` says so."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.shown: Callable[[], bool] = lambda: True
        self._until = -math.inf

    def updated(self) -> None:
        """Show the gauges, which were just set, for the next minute."""
        self._until = boot_clock() + _SHOWN_SECONDS

    def collect(self) -> Iterable[Metric]:
        return self.registry.collect() if boot_clock() < self._until and self.shown() else ()


of_queues = RecentFigures()
of_farm = RecentFigures()
BEAT = single_process_registry(of_queues, of_farm)

leader_fence = Gauge("scheduler_leader_fence", "Fence of this beat's leadership; 0 while it stands by.", registry=BEAT)
tick_age = Gauge(
    "scheduler_tick_age_seconds",
    "Seconds since any beat fired a tick, as this beat knows. Grows when this beat hangs, or when none leads.",
    registry=BEAT,
)
ticks_ahead = Gauge(
    "scheduler_ticks_ahead_seconds",
    "How long some periodic task has to wait because a tick of the future is recorded as fired; 0: none has to.",
    registry=BEAT,
)
queue_depth = Gauge(
    "scheduler_queue_depth",
    "Messages waiting in all queues of a type, of this beat's fleet.",
    ["type"],
    registry=of_queues.registry,
)
queue_oldest = Gauge(
    "scheduler_queue_oldest_seconds",
    "Age of the oldest waiting message of a type.",
    ["type"],
    registry=of_queues.registry,
)
backlog_per_worker = Gauge(
    "scheduler_backlog_per_worker",
    "Dispatch messages waiting for a group or in its workers' hands, per live worker of it.",
    ["group"],
    registry=of_queues.registry,
)
workers_alive = Gauge(
    "scheduler_workers_alive", "Live workers of this beat's fleet that dispatch.", registry=of_queues.registry
)
clusters_cooled_down = Gauge(
    "scheduler_clusters_cooled_down",
    "Clusters whose last pass failed, by what failed: they are left alone for a while, and then tried again.",
    ["reason"],
    registry=of_queues.registry,
)
postings_trashed = Gauge(
    "scheduler_postings_trashed",
    "Clusters that somebody took off the board: they are not dispatched before they are brought back.",
    registry=of_queues.registry,
)
waiting_frames = Gauge(
    "scheduler_waiting_frames",
    "Frames of the whole fleet that the last passes left waiting, or had no turn for, once for each cluster that "
    "reaches them: where several do, the sum is above the number of frames.",
    ["verdict"],
    registry=of_farm.registry,
)
waiting_frames_distinct = Gauge(
    "scheduler_waiting_frames_distinct",
    "Frames of the whole fleet that wait and may be booked, each once, counted every 15 seconds.",
    registry=of_farm.registry,
)
host_report_age = Gauge(
    "scheduler_host_report_age_seconds",
    "Seconds since the newest report of any host, to a report service or a Cuebot; not a number without a host.",
    registry=of_farm.registry,
)
oldest_hold = Gauge(
    "scheduler_oldest_hold_seconds",
    "How long the host has drained that has drained longest for a wide frame; 0 while none does.",
    registry=of_farm.registry,
)

messages_dropped = Counter(
    "scheduler_messages_dropped_total",
    "Messages that changed nothing: stale copies, clusters held or asleep, messages of a former leader.",
    ["reason"],
)
messages_unreadable = Counter(
    "scheduler_messages_unreadable_total", "Messages that could not be read, and were dropped."
)
count_unreadable_with(messages_unreadable.inc)
messages_moved = Counter("scheduler_messages_moved_total", "Messages moved from a dead instance's queue to its group.")


def watch_gate(gate: LeaderGate) -> None:
    """Show the leader gate of this beat whenever /metrics is read, and the figures of the fleet while it leads."""

    def fence() -> float:
        lease = gate.lease
        return 0.0 if lease is None else float(lease.fence)

    leader_fence.set_function(fence)
    tick_age.set_function(lambda: gate.tick_age)
    for figures in (of_queues, of_farm):
        figures.shown = lambda: gate.lease is not None


class FleetCensus:
    """Looks at the fleet every 15 s while ``leads()``, from a thread and with connections of its own.

    The thread that fires the ticks also renews the lease, so it must not wait for the statements of a census.
    """

    def __init__(self, settings: Settings, leads: Callable[[], bool]) -> None:
        self._settings = settings
        self._leads = leads
        self._namespace = settings.coordination.namespace
        self._group = worker_group(settings.scheduler.facility, settings.coordination.group)
        self._client = make_redis(settings.redis_dsn, settings)
        self._engine = make_engine(settings, application_name="opencue-sched-beat", pool_size=1)
        self._verdicts = VerdictLog(self._client, self._namespace)
        board = BoardKeys(self._namespace, cluster_board(settings.scheduler.facility))
        self._postings = ClusterPostings(self._client, board)
        self._groups: set[str] = set()
        self.thread = PeriodicThread(
            "fleet-census", self._census, failed="fleet_not_counted", retry_seconds=CENSUS_SECONDS
        )

    @cached_property
    def _facts(self) -> SchemaFacts:
        with self._engine.connect() as connection:
            return check_schema(connection)

    def _census(self) -> float:
        if self._leads():
            self.look_at_queues()
            self.look_at_farm()
        return CENSUS_SECONDS

    def look_at_queues(self) -> None:
        """Set the gauges of what Redis knows. Raises RedisError."""
        members = list_members(self._client, self._namespace)
        facility = self._settings.scheduler.facility
        census = queue_census(self._client, self._namespace, members, group=self._group, facility=facility)
        for type_, figures in census.by_type.items():
            queue_depth.labels(type_).set(figures.depth)
            queue_oldest.labels(type_).set(figures.oldest_seconds)
        workers_alive.set(census.workers)
        for group, backlog in census.backlog_per_worker.items():
            backlog_per_worker.labels(group).set(backlog)
        for group in self._groups - census.backlog_per_worker.keys():
            backlog_per_worker.remove(group)
        self._groups = set(census.backlog_per_worker)
        skipped = self._postings.skipped()
        failed = [it.kind for it in skipped if it.until is not None]
        for kind in FAILURE_KINDS:
            clusters_cooled_down.labels(kind).set(failed.count(kind))
        postings_trashed.set(len(skipped) - len(failed))
        of_queues.updated()

    def look_at_farm(self) -> None:
        """Set the gauges of waiting frames, host reports and holds. Raises SchedulerError, SQLAlchemyError and
        RedisError."""
        cooled_down = {it.key for it in self._postings.skipped() if it.until is not None}
        count_frames_not_looked_at(self._engine, self._settings, self._verdicts, self._facts, cooled_down=cooled_down)
        waiting = self._verdicts.waiting(believed_seconds=believed_seconds(self._settings))
        for verdict in Verdict:
            waiting_frames.labels(verdict.value).set(waiting.by_verdict.get(verdict.value, 0))
        waiting_frames_distinct.set(waiting.distinct)
        with self._engine.connect() as connection:
            facilities = scoped_facilities(connection, self._settings)
            age = newest_report_age(connection, facilities)
            oldest_hold.set(oldest_hold_age(connection, facilities))
        host_report_age.set(math.nan if age is None else age)
        of_farm.updated()

    def close(self) -> None:
        """End the thread, and give the connections back."""
        self.thread.stop(timeout=1.0)
        self._client.close()
        self._engine.dispose()
