"""The Prometheus metrics that a process shows of itself. Those that OpenCue's scheduler has keep its names
(``scheduler_*``, docs/metrics.md).

Packages return reports; the tasks hand them to the ``record_*`` functions here. Any thread may call these: a series has
a lock of its own.
"""

from __future__ import annotations

import errno
import math
from functools import partial
from typing import cast
from wsgiref.simple_server import WSGIServer
from wsgiref.types import WSGIApplication

import structlog
from prometheus_client import (
    GC_COLLECTOR,
    PLATFORM_COLLECTOR,
    PROCESS_COLLECTOR,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    start_http_server,
)
from prometheus_client.registry import Collector

from opencue_sched.accounting.recompute import RecomputeReport
from opencue_sched.dispatch.backlog_feed import BacklogFeed
from opencue_sched.dispatch.cooldown import Cooldowns
from opencue_sched.dispatch.report import PassReport
from opencue_sched.dispatch.sweep import SweepReport
from opencue_sched.domain.clusters import ClusterKind
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.errors import SchedulerError, WrongConfiguration
from opencue_sched.placement.backlog import SET_ASIDE
from opencue_sched.worker.probes import with_probes

log = structlog.get_logger(__name__)

PORTS_TRIED = 100
"""How many ports are tried, from the one in the settings on: each process of a machine takes one."""
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
"""The upper bounds of the buckets of histograms of durations, in seconds."""

jobs_queried = Counter("scheduler_jobs_queried_total", "Jobs that cluster passes looked at.")
jobs_processed = Counter("scheduler_jobs_processed_total", "Jobs that went through a whole pass.", ["show_name"])
frames_dispatched = Counter("scheduler_frames_dispatched_total", "Frames booked and launched.", ["show_name"])
no_candidate_iterations = Counter("scheduler_no_candidate_iterations_total", "Layers that found no host in a pass.")
candidates_per_layer = Histogram(
    "scheduler_candidates_per_layer",
    "Hosts that a pass tried for one layer; layers for which it tried none are left out.",
    buckets=(1, 5, 10, 20, 50, 100),
)
hosts_attempted = Counter("scheduler_hosts_attempted_total", "Hosts taken from the cache to place frames on.")
wasted_attempts = Counter("scheduler_wasted_attempts_total", "Hosts taken from the cache that took no frame.")
time_to_book = Histogram(
    "scheduler_time_to_book_seconds",
    "From a frame becoming eligible (again, after a retry) to its booking.",
    buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300),
)
sql_statements = Counter("scheduler_sql_statements_total", "Statements that this worker sent to PostgreSQL.")
limit_exceeded = Counter("scheduler_accounting_limit_exceeded_total", "Bookings refused by the counters.", ["table"])
bookings_lost = Counter("scheduler_bookings_lost_total", "Bookings dropped between plan and launch.", ["reason"])
job_query_duration = Histogram(
    "scheduler_job_query_duration_seconds", "Reading what changed of hosts and waiting work.", buckets=_SECONDS
)
plan_duration = Histogram("scheduler_plan_duration_seconds", "Planning one pass.", buckets=_SECONDS)
book_duration = Histogram("scheduler_book_duration_seconds", "Booking one plan in Redis.", buckets=_SECONDS)
commit_duration = Histogram("scheduler_commit_duration_seconds", "Committing one plan.", buckets=_SECONDS)
launch_duration = Histogram("scheduler_launch_duration_seconds", "Launching one plan.", buckets=_SECONDS)
cluster_round_trip = Histogram(
    "scheduler_cluster_round_trip_seconds", "One pass over a cluster.", ["cluster_type"], buckets=_SECONDS
)
frames_per_pass = Histogram(
    "scheduler_frames_dispatched_per_pass",
    "Frames booked by a pass.",
    ["cluster_type"],
    buckets=(0, 1, 5, 10, 25, 50, 100, 250, 500, 1000),
)
pass_terminated = Counter("scheduler_pass_terminated_reason_total", "Why passes ended.", ["reason"])
clusters_total = Gauge("scheduler_clusters_total", "Clusters known.", ["cluster_type"])
clusters_active = Gauge("scheduler_clusters_active", "Clusters with waiting work.")
clusters_sleeping = Gauge("scheduler_clusters_sleeping", "Clusters with work whose posting sleeps.")
active_scan_duration = Histogram(
    "scheduler_active_scan_duration_seconds",
    "One awake scan: asking the database for which clusters work waits.",
    buckets=_SECONDS,
)
backlog_layers = Gauge("scheduler_backlog_layers", "Waiting layers that this worker knows.")
backlog_stale_layers = Gauge(
    "scheduler_backlog_stale_layers", "Waiting layers that are read again before they are planned."
)
backlog_resync_age = Gauge(
    "scheduler_backlog_resync_age_seconds",
    "Seconds since this worker compared the waiting layers that it knows with the database.",
)
backlog_set_aside = Gauge(
    "scheduler_backlog_set_aside", "Waiting layers that a time or a fault keeps from being planned.", ["reason"]
)
host_cache_size = Gauge("scheduler_host_cache_size", "Hosts in the cache.")
host_cache_hits = Counter("scheduler_host_cache_hits_total", "Searches of the host cache that found a host.")
host_cache_misses = Counter("scheduler_host_cache_misses_total", "Searches of the host cache that found none.")
recompute_duration = Histogram(
    "scheduler_recompute_cycle_duration_seconds", "One recompute.", buckets=(*_SECONDS, 60, 120)
)
recompute_age = Gauge(
    "scheduler_recompute_age_seconds",
    "Seconds since the last recompute of all shows; not a number while none is known.",
)
drift_found = Counter(
    "scheduler_drift_found_total", "Counters that a recompute corrected, because another program wrote there.", ["kind"]
)
entries_healed = Counter(
    "scheduler_ledger_entries_healed_total", "Ledger entries that a recompute found unlike their procs.", ["cause"]
)
ledger_in_flight = Gauge("scheduler_ledger_in_flight", "Bookings not confirmed yet.")
ledger_oldest_in_flight = Gauge("scheduler_ledger_oldest_in_flight_seconds", "Age of the oldest unconfirmed booking.")
store_ready = Gauge(
    "scheduler_store_ready",
    "1 when the counters may be booked against, as this worker saw them last; not a number before it has.",
)
for unknown_yet in (recompute_age, store_ready):
    unknown_yet.set(math.nan)
publish_misconfigured = Gauge(
    "cuebot_redis_publish_misconfigured",
    "1 when managed shows exist but the configured release feed cannot deliver their releases.",
)
"""Set by the process of a worker, which checks the feed (worker.process)."""
job_events = Counter(
    "scheduler_job_events_total", "Events of jobs: sent to the receiver, failed (tried again), or dropped.", ["outcome"]
)
release_events = Counter("scheduler_release_events_total", "Reports, completions, kills and notifications.", ["event"])


def single_process_registry(*series: Collector) -> CollectorRegistry:
    """A registry of a role that is always one process: its /metrics shows ``series`` and the process itself.

    A beat and a report service have one each, so that they export nothing that only workers feed. A worker shows
    prometheus_client's own registry, in which every series of this module is.
    """
    made = CollectorRegistry()
    for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR, *series):
        made.register(collector)
    return made


REPORT_SERVICE = single_process_registry(release_events)
"""The registry that a report service shows."""


def record_pass(report: PassReport) -> None:
    """Count what a pass did in one cluster."""
    kind = report.cluster.kind.value
    jobs_queried.inc(report.jobs)
    if report.jobs_processed:
        jobs_processed.labels(report.show_name).inc(report.jobs_processed)
    if report.frames_launched:
        frames_dispatched.labels(report.show_name).inc(report.frames_launched)
    if report.plan is not None:
        for attempts in report.plan.attempts.values():
            candidates_per_layer.observe(attempts)
        hosts_attempted.inc(report.plan.attempts.total())
        wasted_attempts.inc(report.plan.wasted_attempts)
        # Each search that finds a host is one attempt: a plan tries every host that it finds.
        host_cache_hits.inc(report.plan.attempts.total())
        host_cache_misses.inc(report.plan.cache_misses)
    for table, count in report.refusals.items():
        limit_exceeded.labels(table).inc(count)
    for reason, count in report.losses.items():
        bookings_lost.labels(reason).inc(count)
    for seconds in report.seconds_to_book:
        time_to_book.observe(seconds)
    without_host = (Verdict.NO_HOST, Verdict.NO_FIT, Verdict.CAPACITY)
    no_candidate_iterations.inc(sum(judged.verdict in without_host for judged in report.verdicts))
    for histogram, step in (
        (job_query_duration, "gather"),
        (plan_duration, "plan"),
        (book_duration, "book"),
        (commit_duration, "commit"),
        (launch_duration, "launch"),
        (cluster_round_trip.labels(kind), "total"),
    ):
        if step in report.seconds:
            histogram.observe(report.seconds[step])
    frames_per_pass.labels(kind).observe(report.frames_booked)
    pass_terminated.labels(report.ended.value).inc()


SET_ASIDE_REASONS = (*SET_ASIDE, "lost")
"""The reasons that scheduler_backlog_set_aside has. "lost": all frames of the layer were lost in commits, again and
again."""


def watch_backlog(feed: BacklogFeed, lost: Cooldowns[str]) -> None:
    """Show this backlog, and the layers in cooldown for their ``lost`` frames, whenever /metrics is read, on the thread
    that serves /metrics. Each process has one backlog; another call shows the other one instead."""
    backlog_layers.set_function(lambda: len(feed.backlog))
    backlog_stale_layers.set_function(lambda: len(feed.backlog.stale()))
    backlog_resync_age.set_function(feed.age_seconds)
    for reason in SET_ASIDE:
        count = partial(_set_aside, feed, reason)
        backlog_set_aside.labels(reason).set_function(count)
    backlog_set_aside.labels("lost").set_function(lambda: len(lost.active()))


def _set_aside(feed: BacklogFeed, reason: str) -> float:
    """How many layers are set aside for this reason now."""
    return feed.backlog.set_aside(feed.now())[reason]


def record_sweep(report: SweepReport) -> None:
    """Show what a sweep found, unless it had no need to look."""
    if not report.looked:
        return
    for kind in ClusterKind:
        clusters_total.labels(kind.value).set(report.clusters.get(kind, 0))
    clusters_active.set(report.active)
    clusters_sleeping.set(report.sleeping)
    if report.scan_seconds is not None:
        active_scan_duration.observe(report.scan_seconds)


def record_recompute(report: RecomputeReport) -> None:
    """Show what a recompute found and put right."""
    recompute_duration.observe(report.seconds)
    for cause, count in report.causes.items():
        entries_healed.labels(cause).inc(count)
    for kind, count in report.drifted.items():
        drift_found.labels(kind).inc(count)
    ledger_in_flight.set(report.in_flight)
    ledger_oldest_in_flight.set(report.oldest_in_flight_seconds)


def record_store(is_open: bool, recompute_age_seconds: float | None) -> None:
    """Show whether the counters may be booked against, and how old the last recompute is; None: none is known."""
    store_ready.set(int(is_open))
    recompute_age.set(math.nan if recompute_age_seconds is None else recompute_age_seconds)


def record_event(event: str, amount: int = 1) -> None:
    """Count ``amount`` events of one kind. ``event`` is the name that the package reports gives it."""
    release_events.labels(event).inc(amount)


def record_job_events(outcome: str, amount: int = 1) -> None:
    """Count ``amount`` events of jobs. ``outcome`` is ``sent``, ``failed`` or ``dropped``."""
    job_events.labels(outcome).inc(amount)


def serve_metrics(host: str, first_port: int, registry: CollectorRegistry) -> tuple[WSGIServer, int] | None:
    """Serve ``registry`` as /metrics, and the probes /livez and /readyz, on the first free port from ``first_port`` on.

    Returns the server and its port, or None when ``first_port`` is 0, which turns metrics off. The server runs on a
    daemon thread until the process ends. Raises WrongConfiguration where this host and port cannot be listened on, and
    SchedulerError when none of PORTS_TRIED ports is free.
    """
    if first_port == 0:
        return None
    for port in range(first_port, first_port + PORTS_TRIED):
        try:
            server, _ = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            cure = "set OPENCUE_SCHED_QUEUE__METRICS_HOST, or OPENCUE_SCHED_QUEUE__METRICS_PORT"
            raise WrongConfiguration(f"cannot serve metrics on {host}:{port}: {error.strerror}; {cure}") from error
        # Until here a probe was answered with metrics, and status 200.
        server.set_app(with_probes(cast(WSGIApplication, server.get_app())))
        log.info("metrics_served", address=f"http://{host}:{port}/metrics", wanted_port=first_port)
        return server, port
    raise SchedulerError(
        f"no free port for metrics from {first_port} to {first_port + PORTS_TRIED - 1} on {host}; "
        "set OPENCUE_SCHED_QUEUE__METRICS_PORT (0 turns metrics off)"
    )
