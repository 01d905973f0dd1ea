"""Metrics of the fleet: what every beat shows, what only the leading beat shows, and what workers count of messages.

What must be known when no worker lives comes from the leading beat: workers alive, queues, waiting frames, the age of
the newest host report, and what the farm's hosts, shows and caps are at. A standby does not show these series, and
neither does any other process.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import Counter, Gauge
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import Connection, Row

from opencue_sched.accounting.epoch import guarded_redis
from opencue_sched.background import PeriodicThread
from opencue_sched.clients.postgres import ask, make_engine, reading
from opencue_sched.clock import boot_clock
from opencue_sched.coordination.keys import worker_group
from opencue_sched.coordination.leader import LeaderGate
from opencue_sched.coordination.postings import FAILURE_KINDS, cluster_postings
from opencue_sched.coordination.presence import list_members
from opencue_sched.coordination.queue_figures import queue_census
from opencue_sched.dispatch.verdicts import VerdictLog
from opencue_sched.dispatch.waiting_frames import count_waiting_frames
from opencue_sched.domain.units import CENTICORES_PER_CORE
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.insight.farm_view import ShowUse, believed_seconds, show_uses
from opencue_sched.settings import Settings
from opencue_sched.store.failed_runs import breaking_hosts
from opencue_sched.store.folders import list_folders
from opencue_sched.store.insight import holds, host_groups
from opencue_sched.store.job_events import undelivered
from opencue_sched.store.limits import fetch_limits
from opencue_sched.store.schema import SchemaFacts, check_schema
from opencue_sched.worker.metrics import single_process_registry

CENSUS_SECONDS = 15.0
"""The time between two looks of the leading beat at the fleet."""
_SHOWN_SECONDS = 4 * CENSUS_SECONDS
"""How long the figures of a census are shown. A census that fails is repeated before they go; figures of long ago are
worse than none."""
MOST_SERIES = 50
"""How many names, or pairs of names, a gauge has series of. A farm may have thousands of shows, folders and limits; a
Prometheus is to keep the series of a few hundred."""
OTHER = "other"
"""The name that stands for those beyond MOST_SERIES; its values are their sums."""
_NAMES = frozenset({"host", "allocation", "show_name", "folder", "limit"})
"""Labels that people make values for, without a bound. Facilities are few."""

Sample = tuple[str, tuple[str, ...], float]
"""Name of a gauge, the values of its labels, and its value."""


class RecentFigures(Collector):
    """Gauges (name, labels, text) as a census found them: for a minute after it, and only while ``shown`` says so."""

    def __init__(self, *gauges: tuple[str, str, str]) -> None:
        self.gauges = gauges
        self.shown: Callable[[], bool] = lambda: True
        # Written by the census' thread and read by those that answer /metrics. No lock: a reader between the two writes
        # shows the new families, or nothing where the old time is over.
        self._families: Sequence[Metric] = ()
        self._until = -math.inf

    def update(self, samples: Iterable[Sample]) -> None:
        """Show these samples from now on, and no others. Values of the same labels are added up.

        Of each gauge the first 50 names (or pairs of names) have series of their own, and "other" the sum of the rest.
        """
        sums: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
        labels_of = {name: labels.split() for name, labels, _ in self.gauges}
        named: defaultdict[str, set[tuple[str, ...]]] = defaultdict(set)
        for name, values, number in samples:
            labels = list(zip(labels_of[name], values, strict=True))
            names = tuple(value for label, value in labels if label in _NAMES)
            if len(named[name]) < MOST_SERIES:
                named[name].add(names)
            if names not in named[name]:
                values = tuple(OTHER if label in _NAMES else value for label, value in labels)
            sums[name, values] += number
        families = {
            name: GaugeMetricFamily(f"scheduler_{name}", text, labels=labels_of[name]) for name, _, text in self.gauges
        }
        for (name, values), number in sums.items():
            families[name].add_metric(values, number)
        self._families, self._until = list(families.values()), boot_clock() + _SHOWN_SECONDS

    def collect(self) -> Sequence[Metric]:
        """prometheus_client's hook: the figures, unless they are too old or another beat shows them."""
        return self._families if boot_clock() < self._until and self.shown() else ()


_SUBSCRIPTION, _FOLDER = "facility allocation show_name", "show_name folder"
OF_USE = RecentFigures(
    ("farm_hosts", "facility state lock", "Hosts by state and lock. SILENT: up, but nothing was heard of them lately."),
    ("farm_cores", "facility allocation use", "Cores of hosts: booked, idle, locked and not booked, or down."),
    (
        "breaking_hosts",
        "host",
        "Jobs of which frames failed on a host within an hour, and elsewhere did not; 3 or more.",
    ),
    ("show_frames", "show_name state", "Frames of a show's pending jobs, in all facilities: running, waiting or dead."),
    ("show_cores", "show_name", "Cores that a show uses, in all facilities."),
    ("draining_hosts", "facility show_name", "Hosts that drain for a show's wide frames."),
    ("subscription_cores", _SUBSCRIPTION, "Cores that a show uses of an allocation."),
    ("subscription_size_cores", _SUBSCRIPTION, "A subscription's size."),
    ("subscription_burst_cores", _SUBSCRIPTION, "A subscription's burst."),
    ("subscription_share", _SUBSCRIPTION, "A show's part of the cores in use in an allocation, 0 to 1."),
    ("subscription_due", _SUBSCRIPTION, "The part due to a show by its size, among shows with work, 0 to 1."),
    ("folder_cores", _FOLDER, "Cores used in a folder with a cap of cores."),
    ("folder_max_cores", _FOLDER, "A folder's cap of cores."),
    ("folder_gpus", _FOLDER, "GPUs used in a folder with a cap of GPUs."),
    ("folder_max_gpus", _FOLDER, "A folder's cap of GPUs."),
    ("limit_frames", "limit", "Use of a limit (a licence): frames, or machines of one of type HOST."),
    ("limit_max_frames", "limit", "Frames, or machines, that may run under a limit."),
    ("limit_machines", "limit", "Machines on which a limit's frames run, or that its licence server reported."),
    ("limit_settled", "limit", "Licences, or machines of a limit of type HOST, that its licence server reported."),
    ("limit_pending", "limit", "Use of a limit that its last report need not show yet; all where it has none."),
    ("limit_report_age_seconds", "limit", "Seconds since a limit's licence server was asked for its last report."),
    ("limit_open", "limit", "1 while a limit keeps nothing from starting, its last report being too old; else 0."),
)
"""Figures of hosts, shows and caps."""
OF_WAITING = RecentFigures(
    ("waiting_frames", "verdict", "Frames of the whole fleet that wait and may be booked, by their layer's verdict."),
    ("waiting_frames_distinct", "", "The sum of scheduler_waiting_frames."),
    ("host_report_age_seconds", "", "Seconds since the newest report of any host; not a number without a host."),
    ("oldest_hold_seconds", "", "Seconds that the longest drain for a wide frame has lasted, or 0."),
    (
        "job_events_oldest_seconds",
        "",
        "Seconds since the oldest event of a job that was refused, or that nobody has sent for a minute, or 0.",
    ),
)
OF_QUEUES = RecentFigures(
    ("queue_depth", "type", "Messages waiting in this fleet's queues of a type."),
    ("queue_oldest_seconds", "type", "Age of the oldest waiting message of a type."),
    ("backlog_per_worker", "group", "Dispatch messages waiting for a group or in hand, per live worker of it."),
    ("workers_alive", "", "Live workers of this beat's fleet that dispatch."),
    ("clusters_cooled_down", "reason", "Clusters left alone for a while, by what failed in their last pass."),
    ("postings_trashed", "", "Clusters taken off the board, until they are brought back."),
)
LEADING = (OF_USE, OF_QUEUES, OF_WAITING)
BEAT = single_process_registry(*LEADING)

leader_fence = Gauge("scheduler_leader_fence", "Fence of this beat's leadership; 0 while it stands by.", registry=BEAT)
tick_age = Gauge(
    "scheduler_tick_age_seconds", "Seconds since any beat fired a tick, as this beat knows.", registry=BEAT
)
ticks_ahead = Gauge(
    "scheduler_ticks_ahead_seconds", "How long a task waits: a future tick is recorded as fired.", registry=BEAT
)

messages_dropped = Counter(
    "scheduler_messages_dropped_total",
    "Messages that changed nothing: stale copies, clusters held or asleep, messages of a former leader.",
    ["reason"],
)
messages_moved = Counter("scheduler_messages_moved_total", "Messages moved from a dead instance's queue to its group.")


def watch_gate(gate: LeaderGate) -> None:
    """Show the leader gate of this beat whenever /metrics is read, and the figures of the fleet while it leads."""
    leader_fence.set_function(lambda: float(gate.fence or 0))
    tick_age.set_function(lambda: gate.tick_age)
    for figures in LEADING:
        figures.shown = lambda: gate.fence is not None


def _samples(
    groups: Sequence[Row[Any]],
    draining: Sequence[Row[Any]],
    breaking: Sequence[Row[Any]],
    shows: Sequence[ShowUse],
    caps: Iterable[Sample],
) -> Iterator[Sample]:
    """The samples of OF_USE, the busiest and fullest first."""
    for group in groups:
        if group.state is not None:
            yield "farm_hosts", (group.facility, group.state, group.lock_state), group.hosts
    allocations = [group for group in groups if group.name is not None]
    for allocation in sorted(allocations, key=lambda allocation: -allocation.cores):
        for use in ("booked", "idle", "locked", "down"):
            yield "farm_cores", (allocation.facility, allocation.name, use), getattr(allocation, use)
    for row in breaking:
        yield "breaking_hosts", (row.host,), row.jobs
    for show in shows:
        yield "show_cores", (show["name"],), show["cores"]
        for state in ("running", "waiting", "dead"):
            yield "show_frames", (show["name"], state), show[state]
    for host in draining:
        yield "draining_hosts", (host.facility, host.show), 1
    yield "draining_hosts", (OTHER, OTHER), 0  # a series also while none drains
    subscriptions = [
        (sub, (sub["facility"], sub["allocation"], show["name"])) for show in shows for sub in show["subscriptions"]
    ]
    subscriptions.sort(key=lambda labelled: (-labelled[0]["used"], -labelled[0]["size"]))
    for number, (sub, labels) in enumerate(subscriptions):
        yield "subscription_cores", labels, sub["used"]
        yield "subscription_size_cores", labels, sub["size"]
        yield "subscription_burst_cores", labels, sub["burst"]
        for fraction in ("share", "due"):
            if sub[fraction] is not None and number < MOST_SERIES:  # fractions of different wholes have no sum
                yield f"subscription_{fraction}", labels, sub[fraction]
    yield from caps


def _caps(connection: Connection, settle_window_seconds: float, facts: SchemaFacts) -> Iterator[Sample]:
    """What is used under caps, and the caps, the fullest first."""
    caps: list[tuple[str, tuple[str, ...], float, float]] = []
    for folder in list_folders(connection, capped=True):
        if folder.show_active or folder.running:
            path = folder.show, folder.name
            caps.append(("folder_cores", path, folder.used_cores, folder.max_centicores / CENTICORES_PER_CORE))
            caps.append(("folder_gpus", path, folder.used_gpus, folder.max_gpus))
    caps = [cap for cap in caps if cap[-1] > 0]  # a folder's cap of 0 or less is none
    limits = fetch_limits(connection, settle_window_seconds, has_holders=facts.has_limit_holders).values()
    for limit in limits:
        caps.append(("limit_frames", (limit.name,), limit.running, limit.max_value))

    def fullness(cap: tuple[str, tuple[str, ...], float, float]) -> float:
        _, _, used, most = cap
        return used / max(1, most)

    for name, labels, used, most in sorted(caps, key=fullness, reverse=True):
        yield name, labels, used
        yield name.replace("_", "_max_"), labels, most
    fullest_first = sorted(limits, key=lambda limit: limit.running / max(1, limit.max_value), reverse=True)
    for number, limit in enumerate(fullest_first):
        for figure in ("machines", "settled", "pending"):
            yield f"limit_{figure}", (limit.name,), getattr(limit, figure)
        yield "limit_open", (limit.name,), limit.report_is_too_old
        if limit.report_age is not None and number < MOST_SERIES:  # ages have no sum
            yield "limit_report_age_seconds", (limit.name,), limit.report_age


class FleetCensus:
    """Looks at the fleet every 15 s while ``leads()``, from a thread and with connections of its own.

    The thread that fires the ticks also renews the lease, so it must not wait for the statements of a census.
    """

    def __init__(self, settings: Settings, leads: Callable[[], bool]) -> None:
        self._settings = settings
        self._leads = leads
        self._namespace = settings.coordination.namespace
        self._group = worker_group(settings.scheduler.facility, settings.coordination.group)
        self._client = guarded_redis(settings.redis_dsn, settings)
        self._engine = make_engine(settings, application_name="opencue-sched-beat", pool_size=1)
        self._facts: SchemaFacts | None = None
        self._facts_until = -math.inf
        self._verdicts = VerdictLog(self._client, self._namespace)
        self._postings = cluster_postings(self._client, settings)
        self.events_are_written = True
        """Whether events of jobs may be written or wait: False where no worker ever had a receiver, and beside a
        Cuebot. Written by the census' thread, read by that of the beat."""
        self.thread = PeriodicThread(
            "fleet-census", self._census, failed="fleet_not_counted", retry_seconds=CENSUS_SECONDS
        )

    def _census(self) -> float:
        """Count queues and farm if this beat leads; returns the pause in seconds. Raises SchedulerError,
        SQLAlchemyError and RedisError."""
        if self._leads():
            self.look_at_queues()
            self.look_at_farm()
        return CENSUS_SECONDS

    def look_at_queues(self) -> None:
        """Show workers, queues and clusters that no pass looks at, as Redis has them. Raises RedisError."""
        members = list_members(self._client, self._namespace)
        facility = self._settings.scheduler.facility
        census = queue_census(self._client, self._namespace, members, group=self._group, facility=facility)
        skipped = self._postings.skipped()
        failed = [cluster.kind for cluster in skipped if cluster.until is not None]
        samples: list[Sample] = [
            ("workers_alive", (), census.workers),
            ("postings_trashed", (), len(skipped) - len(failed)),
        ]
        samples += [("clusters_cooled_down", (kind,), failed.count(kind)) for kind in FAILURE_KINDS]
        samples += [("backlog_per_worker", (group,), backlog) for group, backlog in census.backlog_per_worker.items()]
        for type_, figures in census.by_type.items():
            samples.append(("queue_depth", (type_,), figures.depth))
            samples.append(("queue_oldest_seconds", (type_,), figures.oldest_seconds))
        OF_QUEUES.update(samples)

    def look_at_farm(self) -> None:
        """Show waiting frames, hosts, shows and caps. Raises SchedulerError, SQLAlchemyError and RedisError."""
        settings, verdicts = self._settings, self._verdicts
        if self._facts is None or time.monotonic() >= self._facts_until:  # Cuebot may have been upgraded since
            self._facts = ask(self._engine, check_schema)
            self._facts_until = time.monotonic() + settings.queue.cluster_reload_interval
        facts = self._facts
        cooled = {cluster.key for cluster in self._postings.skipped() if cluster.until is not None}
        facility, staleness = settings.scheduler.facility, settings.host_cache.host_staleness_threshold
        with reading(self._engine) as connection:
            waiting = count_waiting_frames(
                connection, settings, verdicts, facts, cooled_down=cooled, believed_seconds=believed_seconds(settings)
            )
            groups = host_groups(connection, facility, staleness=staleness)
            draining = holds(connection, facility)
            breaking = breaking_hosts(connection, settings.queue.uncounted_exit_statuses)
            shows = show_uses(connection, facility)
            caps = list(_caps(connection, settings.accounting.limit_settle_window_seconds, facts))
            # A Cuebot has mails: there are no events.
            events = None if facts.origin == "cuebot" else undelivered(connection)
        self.events_are_written = events is not None and events.received
        report_age = min((group.report_age for group in groups if group.report_age is not None), default=math.nan)
        samples: list[Sample] = [
            ("host_report_age_seconds", (), report_age),
            ("waiting_frames_distinct", (), waiting.total()),
            ("oldest_hold_seconds", (), draining[0].oldest_age if draining else 0.0),
        ]
        samples += [("waiting_frames", (verdict.value,), waiting[verdict.value]) for verdict in Verdict]
        samples += [("job_events_oldest_seconds", (), events.oldest_seconds or 0.0)] if events is not None else []
        OF_WAITING.update(samples)
        OF_USE.update(_samples(groups, draining, breaking, shows, caps))

    def close(self) -> None:
        """End the thread, and give the connections back."""
        self.thread.stop(timeout=1.0)
        self._client.close()
        self._engine.dispose()
