"""Celery's configuration, derived from the settings of opencue_sched (environment ``OPENCUE_SCHED_*``).

Delivery: messages are hints, the board decides. So acknowledgements are early for sweeps and passes (a lost message is
sent again within three seconds by the sweep) and late for accounting and maintenance (done again if the worker dies;
each is idempotent). Nothing has an expiry by the clock: the sender's and the receiver's may differ. A dispatch message
is stale when a claim has answered its ticket; a periodic one takes the place of the one before it that still waits in
its queue, and is dropped when a later tick was fired.

Redis hands a reserved message out again when its worker has not acknowledged it for the visibility time-out. That is
two minutes here, more than any task takes; whoever looks does so every 5 s. A shorter one would run a slow recompute
twice at once. With one message prefetched per thread, a killed worker takes few with it, and the board does not wait
for them.

Queues: a worker asks its instance's queue, then its group's, then the type's; but see coordination/routing.py.
Fleets scoped to a facility are groups of their own and leave the shared type queues alone. What beats send goes to the
queue of all groups: any worker may do it, and a beat need not know which groups have one.
"""

from __future__ import annotations

from kombu import Exchange, Queue

from opencue_sched.coordination import keys
from opencue_sched.coordination.keys import (
    PRIORITY_SEPARATOR,
    QUEUE_PRIORITIES,
    QueueType,
    common_queue,
    consumed_queues,
    worker_group,
)
from opencue_sched.coordination.transport import broker_settings, guard_transports
from opencue_sched.settings import get_settings

_settings = get_settings()
_ns = _settings.coordination.namespace
_facility = _settings.scheduler.facility
_exchange = keys.work_exchange(_ns)
_group = worker_group(_facility, _settings.coordination.group)
_broker = broker_settings(_settings.redis_dsn)
guard_transports()

broker_url = _broker.url
broker_use_ssl = _broker.use_ssl or False
broker_connection_retry_on_startup = True
# However long Redis is away; or it answers and refuses: as a replica, being full, or with a disk it cannot write to.
# Celery's own defaults end a worker after three quarters of an hour of the one, and at once for the other.
broker_connection_max_retries = None
broker_channel_error_retry = True
broker_transport_options = {
    **_broker.options,
    "queue_order_strategy": "opencue_sched.coordination.transport:AgedOrder",
    "priority_steps": list(QUEUE_PRIORITIES),
    "sep": PRIORITY_SEPARATOR,
    "visibility_timeout": 120,
    "unacked_restore_interval": 5,
    "unacked_restore_throttle": 1,  # 5 would be every 25 s: kombu multiplies the two
    "unacked_mutex_expire": 30,  # one killed while it restores must not keep the others from it for kombu's 5 minutes
    "socket_timeout": 30.0,
    "socket_connect_timeout": 5.0,  # as of our own client (clients/redis_client.py)
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
worker_consumer = "opencue_sched.worker.consumer:TolerantConsumer"
_buffers = _settings.queue.stream.model_dump(exclude_unset=True)  # Celery has defaults of its own
worker_concurrency = _buffers.get("cluster_buffer_size", _settings.queue.worker_threads)
worker_prefetch_multiplier = _buffers.get("job_buffer_size", 1)
# While somebody listens: worker/task_events.py.
worker_send_task_events = True
worker_hijack_root_logger = False
worker_cancel_long_running_tasks_on_connection_loss = False
worker_enable_remote_control = True
control_exchange = keys.control_exchange(_ns, _facility)
task_acks_late = False
task_default_priority = 1
beat_scheduler = "opencue_sched.beat:LeaderScheduler"
beat_max_loop_interval = 1


def _queue(name: str) -> Queue:
    return Queue(name, Exchange(_exchange, type="direct"), routing_key=name)


def _common_queue(kind: QueueType) -> str:
    return str(common_queue(_ns, kind.value, _facility))


def _consumed(kind: QueueType) -> tuple[str, ...]:
    queues = consumed_queues(_ns, kind.value, _group, _settings.instance)
    return queues[:2] if _facility else queues


task_queues = [_queue(name) for kind in QueueType for name in _consumed(kind)]
task_queues += [_queue(name) for name in _settings.coordination.legacy_queues]
task_default_queue = _common_queue(QueueType.MAINTENANCE)
task_default_exchange = _exchange
task_default_routing_key = task_default_queue
task_create_missing_queues = True
task_routes = {
    f"opencue_sched.{kind.value}.*": {"queue": _common_queue(kind), "routing_key": _common_queue(kind)}
    for kind in QueueType
}


def _every(task: str, seconds: float) -> dict[str, object]:
    return {"task": task, "schedule": seconds}


# One run makes good any number that were missed while nobody led. None needs every single run.
beat_schedule = {
    "sweep-clusters": _every("opencue_sched.sweep.sweep_clusters", _settings.queue.active_scan_interval),
    "recompute": _every("opencue_sched.accounting.recompute", _settings.accounting.recompute_interval_seconds),
    "reseed-limits": _every(
        "opencue_sched.accounting.reseed_limits", _settings.accounting.limit_reseed_interval_seconds
    ),
    "reap": _every("opencue_sched.maintenance.reap", 30.0),
    "recover-depends": _every("opencue_sched.maintenance.recover_depends", 60.0),
    "move-finished-jobs": _every("opencue_sched.maintenance.move_finished_jobs", 600.0),
    "send-events": _every("opencue_sched.maintenance.send_events", 5.0),
    # Blocked seconds are counted in steps of this: of a short block time it must be a part.
    "keep-promises": _every(
        "opencue_sched.maintenance.keep_promises",
        min(15.0, max(1.0, _settings.queue.reservation_block_time / 3)),
    ),
}
