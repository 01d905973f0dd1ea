"""Celery's configuration, derived from the settings of opencue_sched (environment ``OPENCUE_SCHED_*``).

Delivery: messages are hints, the board decides. So acknowledgements are early for sweeps and passes (a lost message is
sent again within seconds by the sweep) and late for accounting and maintenance (done again if the worker dies; each is
idempotent).
"""

from __future__ import annotations

from kombu import Exchange, Queue

from opencue_sched.coordination.names import QueueName, QueueType, consumed_queues
from opencue_sched.settings import get_settings

_settings = get_settings()
_ns = _settings.coordination.namespace
_group = _settings.scheduler.facility or _settings.coordination.group
_timeout = _settings.accounting.redis_timeout

broker_url = _settings.redis_dsn
broker_connection_retry_on_startup = True
broker_transport_options = {
    "queue_order_strategy": "priority",
    "priority_steps": [0, 1, 2],
    "sep": ":prio:",
    "visibility_timeout": 120,
    "unacked_restore_interval": 5,
    "unacked_restore_throttle": 5,
    "socket_timeout": max(30.0, _timeout),
    "socket_connect_timeout": _timeout,
    "socket_keepalive": True,
    "health_check_interval": 15,
    "global_keyprefix": "",
}
accept_content = ["json"]
task_serializer = "json"
result_serializer = "json"
event_serializer = "json"
task_ignore_result = True
timezone = "UTC"
enable_utc = True
imports = ("tasks.sweep", "tasks.dispatch", "tasks.accounting", "tasks.maintenance")

worker_pool = "threads"
worker_concurrency = _settings.queue.worker_threads
worker_prefetch_multiplier = 1
worker_send_task_events = True
worker_hijack_root_logger = False
worker_cancel_long_running_tasks_on_connection_loss = False
worker_enable_remote_control = True
task_acks_late = False
task_default_priority = 1
beat_scheduler = "opencue_sched.beat:LeaderScheduler"
beat_max_loop_interval = 1


def _queue(name: str) -> Queue:
    return Queue(name, Exchange(f"{_ns}.work", type="direct"), routing_key=name)


def _type_queue(kind: QueueType) -> str:
    return str(QueueName(_ns, kind.value, _group))


task_queues = [
    _queue(name) for kind in QueueType for name in consumed_queues(_ns, kind.value, _group, _settings.instance)
]
task_default_queue = _type_queue(QueueType.MAINTENANCE)
task_default_exchange = f"{_ns}.work"
task_default_routing_key = task_default_queue
task_create_missing_queues = True
task_routes = {
    f"opencue_sched.{kind.value}.*": {"queue": _type_queue(kind), "routing_key": _type_queue(kind)}
    for kind in QueueType
}


def _every(task: str, seconds: float, catch_up: str = "latest") -> dict[str, object]:
    return {
        "task": task,
        "schedule": seconds,
        "options": {"expires": max(2.0, seconds), "headers": {"catch_up": catch_up}},
    }


beat_schedule = {
    "sweep-clusters": _every("opencue_sched.sweep.sweep_clusters", _settings.queue.active_scan_interval, "skip"),
    "recompute": _every("opencue_sched.accounting.recompute", _settings.accounting.recompute_interval_seconds),
    "reseed-limits": _every(
        "opencue_sched.accounting.reseed_limits", _settings.accounting.limit_reseed_interval_seconds
    ),
    "recalculate-subs": _every("opencue_sched.maintenance.recalculate_subs", 7200.0),
    "reap": _every("opencue_sched.maintenance.reap", 30.0),
    "recover-depends": _every("opencue_sched.maintenance.recover_depends", 60.0),
}
