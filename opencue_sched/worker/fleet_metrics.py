"""Metrics of the fleet: what every beat shows, what only the leading beat shows, and what workers count of messages.

What must be known when no worker lives comes from the leading beat: workers alive, queues, waiting frames, the age of
the newest host report, and what the farm's hosts, shows and caps are at. A standby does not show these series, and
neither does any other process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import cached_property
from itertools import chain, islice
from typing import TypeVar

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
from opencue_sched.domain.farm import HardwareState
from opencue_sched.insight.farm import FarmView, believed_seconds, farm_view
from opencue_sched.settings import Settings
from opencue_sched.store.engine import make_engine
from opencue_sched.store.insight import newest_report_age, oldest_hold_age
from opencue_sched.store.schema import SchemaFacts, check_schema
from opencue_sched.worker.metrics import single_process_registry

CENSUS_SECONDS = 15.0
_SHOWN_SECONDS = 4 * CENSUS_SECONDS
"""A census that fails is repeated before its figures go; figures of long ago are worse than none."""
MOST_SERIES = 50
"""Of the names that a label may have. A farm may have thousands of shows, folders and limits; a Prometheus is to keep
the series of a few hundred."""
OTHER = "other"
"""Stands for the names beyond these; its values are their sums."""
_OTHERS = (OTHER, OTHER)


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
of_use = RecentFigures()
LEADING = (of_queues, of_farm, of_use)
BEAT = single_process_registry(*LEADING)

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

OF_USE: list[Gauge] = []


def _gauge_of_use(name: str, help_text: str, *labels: str) -> Gauge:
    OF_USE.append(Gauge(name, help_text, labels, registry=of_use.registry))
    return OF_USE[-1]


farm_hosts = _gauge_of_use(
    "scheduler_farm_hosts",
    "Hosts by state (as the database has it; SILENT: UP there, but nothing was heard of them lately) and lock.",
    *("facility", "state", "lock"),
)
farm_cores = _gauge_of_use(
    "scheduler_farm_cores",
    "Cores of an allocation's hosts: booked, idle, locked (of locked hosts, and not booked) or down; all is their sum.",
    *("facility", "allocation", "use"),
)
show_frames = _gauge_of_use(
    "scheduler_show_frames",
    "Frames of a show's pending jobs, in all facilities: running, waiting or dead.",
    *("show_name", "state"),
)
show_cores = _gauge_of_use("scheduler_show_cores", "Cores that a show uses, in all facilities.", "show_name")
draining_hosts = _gauge_of_use(
    "scheduler_draining_hosts", "Hosts that drain for a show's wide frames.", "facility", "show_name"
)
_SUBSCRIPTION = ("facility", "allocation", "show_name")
subscription_cores = _gauge_of_use(
    "scheduler_subscription_cores", "Cores that a show uses of an allocation.", *_SUBSCRIPTION
)
subscription_size = _gauge_of_use("scheduler_subscription_size_cores", "A subscription's size.", *_SUBSCRIPTION)
subscription_burst = _gauge_of_use("scheduler_subscription_burst_cores", "A subscription's burst.", *_SUBSCRIPTION)
subscription_share = _gauge_of_use(
    "scheduler_subscription_share", "A show's part of the cores in use in an allocation, 0 to 1.", *_SUBSCRIPTION
)
subscription_due = _gauge_of_use(
    "scheduler_subscription_due",
    "The part due to a show by its size among those of the shows with frames that run or wait, 0 to 1.",
    *_SUBSCRIPTION,
)
_FOLDER = ("show_name", "folder")
folder_cores = _gauge_of_use("scheduler_folder_cores", "Cores used in a folder with a cap of cores.", *_FOLDER)
folder_max_cores = _gauge_of_use("scheduler_folder_max_cores", "A folder's cap of cores.", *_FOLDER)
folder_gpus = _gauge_of_use("scheduler_folder_gpus", "GPUs used in a folder with a cap of GPUs.", *_FOLDER)
folder_max_gpus = _gauge_of_use("scheduler_folder_max_gpus", "A folder's cap of GPUs.", *_FOLDER)
limit_frames = _gauge_of_use("scheduler_limit_frames", "Frames that run under a limit (a licence).", "limit")
limit_max_frames = _gauge_of_use("scheduler_limit_max_frames", "Frames that may run under a limit.", "limit")

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
    for figures in LEADING:
        figures.shown = lambda: gate.lease is not None


Name = TypeVar("Name", bound=Hashable)
Sample = tuple[Gauge, tuple[str, ...], float]


def series_of_use(view: FarmView) -> dict[Gauge, dict[tuple[str, ...], float]]:
    """What the gauges of hosts, shows and caps show, by the values of their labels.

    Of each kind the 50 that are busiest or fullest have series of their own, and "other" the sum of the rest.
    Facilities are few and all have theirs.
    """
    found: dict[Gauge, dict[tuple[str, ...], float]] = {gauge: {} for gauge in OF_USE}
    kinds = (_use_of_hosts, _use_of_shows, _use_of_subscriptions, _use_of_caps)
    for gauge, labels, value in chain.from_iterable(of_kind(view) for of_kind in kinds):
        found[gauge][labels] = found[gauge].get(labels, 0.0) + value
    return found


def _busiest(names: Iterable[Name], other: Name) -> Callable[[Name], Name]:
    """Gives each of the first 50 names as it is, and ``other`` for those beyond."""
    own = frozenset(islice(dict.fromkeys(names), MOST_SERIES))
    return lambda name: name if name in own else other


def _use_of_hosts(view: FarmView) -> Iterable[Sample]:
    for group in view.hosts:
        state = "SILENT" if group.silent and group.state == HardwareState.UP else group.state
        yield farm_hosts, (group.facility, state, group.lock_state), group.hosts
    named = _largest_allocations(view)
    for it in view.allocations:
        for use in ("booked", "idle", "locked", "down"):
            yield farm_cores, (it.facility, named(it.name), use), getattr(it, use)


def _use_of_shows(view: FarmView) -> Iterable[Sample]:
    named = _busiest((it.name for it in view.shows), OTHER)
    for it in view.shows:
        yield show_cores, (named(it.name),), it.cores
        for state in ("running", "waiting", "dead"):
            yield show_frames, (named(it.name), state), getattr(it, state)
    for hold in view.holds:
        yield draining_hosts, (hold.facility, named(hold.show)), 1
    yield draining_hosts, _OTHERS, view.holds_total - len(view.holds)


def _use_of_subscriptions(view: FarmView) -> Iterable[Sample]:
    found = [(show.name, it) for show in view.shows for it in show.subscriptions]
    found.sort(key=lambda it: (-it[1].used, -it[1].size))
    named, allocations = _busiest(((show, it.allocation) for show, it in found), _OTHERS), _largest_allocations(view)
    for show, it in found:
        allocation = allocations(it.allocation)
        labels = (it.facility, allocation, named((show, it.allocation))[0])
        yield subscription_cores, labels, it.used
        yield subscription_size, labels, it.size
        yield subscription_burst, labels, it.burst
        for gauge, part in ((subscription_share, it.share), (subscription_due, it.due)):
            if part is not None and allocation == it.allocation:  # parts of different wholes have no sum
                yield gauge, labels, part


def _use_of_caps(view: FarmView) -> Iterable[Sample]:
    named = _busiest(((it.show, it.name) for it in view.folders), _OTHERS)
    for it in view.folders:
        names = named((it.show, it.name))
        if it.max_cores is not None:
            yield folder_cores, names, it.cores
            yield folder_max_cores, names, it.max_cores
        if it.max_gpus is not None:
            yield folder_gpus, names, it.gpus
            yield folder_max_gpus, names, it.max_gpus
    limits = _busiest((it.name for it in view.limits), OTHER)
    for limit in view.limits:
        yield limit_frames, (limits(limit.name),), limit.running
        yield limit_max_frames, (limits(limit.name),), limit.most


def _largest_allocations(view: FarmView) -> Callable[[str], str]:
    return _busiest((it.name for it in sorted(view.allocations, key=lambda it: -it.cores)), OTHER)


def _replace_series(gauge: Gauge, series: Mapping[tuple[str, ...], float]) -> None:
    """Show these series of a gauge and no others. What stays is there at each moment, also to a scrape meanwhile."""
    for labels, value in series.items():
        gauge.labels(*labels).set(value)
    shown = {tuple(sample.labels.values()) for metric in gauge.collect() for sample in metric.samples}
    for labels in shown - series.keys():
        gauge.remove(*labels)


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
            self.look_at_use()
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
        _replace_series(backlog_per_worker, {(group,): it for group, it in census.backlog_per_worker.items()})
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
        waiting = self._verdicts.waiting(believed_seconds=believed_seconds(self._settings), forget=True)
        for verdict in Verdict:
            waiting_frames.labels(verdict.value).set(waiting.by_verdict.get(verdict.value, 0))
        waiting_frames_distinct.set(waiting.distinct)
        with self._engine.connect() as connection:
            facilities = scoped_facilities(connection, self._settings)
            age = newest_report_age(connection, facilities)
            oldest_hold.set(oldest_hold_age(connection, facilities))
        host_report_age.set(math.nan if age is None else age)
        of_farm.updated()

    def look_at_use(self) -> None:
        """Set the gauges of hosts, shows and caps. Raises SQLAlchemyError and RedisError."""
        view = farm_view(self._engine, self._client, self._settings, most_jobs=0, most_shows=None)
        for gauge, series in series_of_use(view).items():
            _replace_series(gauge, series)
        of_use.updated()

    def close(self) -> None:
        """End the thread, and give the connections back."""
        self.thread.stop(timeout=1.0)
        self._client.close()
        self._engine.dispose()
