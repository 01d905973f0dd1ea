"""Metrics of the fleet itself: who leads, how old the last tick is, what waits in the queues."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from opencue_sched.coordination.leader import LeaderGate
from opencue_sched.coordination.queue_care import QueueSurvey
from opencue_sched.coordination.transport import count_unreadable_with

leader_fence = Gauge(
    "scheduler_leader_fence", "Fence of this beat's leadership; 0 while it stands by.", multiprocess_mode="max"
)
tick_age = Gauge(
    "scheduler_tick_age_seconds",
    "Seconds since any beat fired a tick, as this beat knows. Grows when this beat hangs, or when none leads.",
    multiprocess_mode="max",
)
clocks_apart = Gauge(
    "scheduler_store_clocks_apart_seconds",
    "How far the clock of Redis is ahead of PostgreSQL's, as the leading beat finds; negative: behind.",
    multiprocess_mode="max",
)
ticks_ahead = Gauge(
    "scheduler_ticks_ahead_seconds",
    "How long some periodic task has to wait because a tick of the future is recorded as fired; 0: none has to.",
    multiprocess_mode="max",
)
queue_depth = Gauge(
    "scheduler_queue_depth",
    "Messages waiting in all queues of a type, of this worker's fleet.",
    ["type"],
    multiprocess_mode="max",
)
queue_oldest = Gauge(
    "scheduler_queue_oldest_seconds", "Age of the oldest waiting message of a type.", ["type"], multiprocess_mode="max"
)
backlog_per_worker = Gauge(
    "scheduler_backlog_per_worker",
    "Dispatch messages waiting for this worker's group or in its hands, per live worker of it.",
    ["group"],
    multiprocess_mode="max",
)
workers_alive = Gauge(
    "scheduler_workers_alive", "Live workers of this one's fleet that dispatch.", multiprocess_mode="max"
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
    """Show the leader gate of this beat whenever /metrics is read."""

    def fence() -> float:
        lease = gate.lease
        return 0.0 if lease is None else float(lease.fence)

    leader_fence.set_function(fence)
    tick_age.set_function(lambda: gate.tick_age)


def record_survey(survey: QueueSurvey, group: str) -> None:
    """Show what waits for the fleet, and for this worker's group."""
    for type_, figures in survey.by_type.items():
        queue_depth.labels(type_).set(figures.depth)
        queue_oldest.labels(type_).set(figures.oldest_seconds)
    workers_alive.set(survey.workers)
    backlog_per_worker.labels(group).set(survey.backlog_per_worker[group])
