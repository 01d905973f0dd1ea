"""A worker's process as a member of the fleet: its presence record, the queues of dead members, and its replies to
callers that wait for a pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import redis
import structlog

from opencue_sched.background import PeriodicThread
from opencue_sched.clients.store_errors import describe
from opencue_sched.coordination.keys import QueueType, type_of, worker_group
from opencue_sched.coordination.presence import REFRESH_SECONDS, Presence, WorkerState, list_members
from opencue_sched.coordination.queue_figures import drain_dead_instances
from opencue_sched.coordination.replies import answer_job
from opencue_sched.coordination.routing import Router
from opencue_sched.dispatch.report import LONGEST_ERROR
from opencue_sched.settings import Settings
from opencue_sched.worker import fleet_metrics
from opencue_sched.worker.workload import Workload

log = structlog.get_logger(__name__)


MOST_UNREACHED = 20
"""How many hosts a presence record names at most: every process reads all records each second."""


class Membership:
    """The membership of this process. Its callables are asked whenever the presence record is written, by the thread
    that refreshes the presence."""

    def __init__(
        self,
        client: redis.Redis,
        settings: Settings,
        work: Callable[[], Collection[str]],
        unreached: Callable[[], Sequence[tuple[str, str]]] = tuple,
    ) -> None:
        self._client = client
        self._settings = settings
        self.work = work
        """The keys of the clusters that this process dispatches now."""
        self.unreached = unreached
        """The hosts whose RQDs do not answer this process, each with words for people."""
        self.namespace = settings.coordination.namespace
        self.group = worker_group(settings.scheduler.facility, settings.coordination.group)
        self.workload = Workload()
        self.router = Router(client, self.namespace, self.group, fixed=settings.scheduler.facility is not None)
        self.presence: Presence | None = None
        self._queues: Callable[[], Collection[str]] = tuple
        self.in_flight: Callable[[], int] = lambda: self.workload.in_hand
        """How many messages this process has in hand. A consumer that reserves messages puts its own count here."""
        self.backlog: Callable[[], tuple[float, bool]] = lambda: (0.0, False)
        """How many seconds ago this process compared its backlog with the database, and whether it hears no
        notification. A process puts its own figures here once it listens."""

    def join(self, node: str, *, queues: Callable[[], Collection[str]], capacity: int) -> None:
        """Take this instance's name, for the types of the ``queues`` that this worker consumes (all of its own, unless
        started with ``-Q``). Each heartbeat announces what these are then: Celery may be told to consume others.
        Raises InstanceTaken when a live process has the name."""
        self._queues = queues
        consumed = queues()
        self.presence = Presence(
            self._client,
            self.namespace,
            types=sorted({type_of(queue) for queue in consumed}),
            group=self.group,
            instance=self._settings.instance,
            node=node,
            capacity=capacity,
            capabilities=sorted(consumed),
            state=self.workload.state.value,
            facility=self._settings.scheduler.facility,
        )
        self.presence.announce()

    def is_first(self) -> bool:
        """Whether all other workers are still starting: then this one checks the counters before it books."""
        workers = list_members(self._client, self.namespace).of(QueueType.DISPATCH.value)
        return all(actor.state == WorkerState.STARTING for actor in workers)

    @contextmanager
    def present(self) -> Iterator[None]:
        """Refresh the presence from a thread, while no consumer step does."""
        thread = PeriodicThread(
            "presence", self._refresh, failed="presence_not_refreshed", retry_seconds=REFRESH_SECONDS
        )
        thread.start()
        try:
            yield
        finally:
            thread.stop()

    def heartbeat(self) -> None:
        """Refresh the presence, and move the messages of dead instances to their groups. Raises InstanceTaken when
        another process took the name, and RedisError."""
        self._refresh()
        members = list_members(self._client, self.namespace)
        fleet_metrics.messages_moved.inc(drain_dead_instances(self._client, self.namespace, members))

    def _refresh(self) -> float:
        """Write what this process does and cannot reach into its presence; returns the pause in seconds. Raises
        InstanceTaken and RedisError."""
        if self.presence is not None:
            unreached = tuple(self.unreached())
            backlog_age_seconds, deaf = self.backlog()
            self.presence.refresh(
                in_flight=self.in_flight(),
                state=self.workload.state.value,
                work=sorted(self.work()),
                unreached=unreached[:MOST_UNREACHED],
                more_unreached=len(unreached[MOST_UNREACHED:]),
                backlog_age_seconds=round(backlog_age_seconds, 1),
                deaf=deaf,
                capabilities=sorted(self._queues()),
            )
        return REFRESH_SECONDS

    def answer_failed(self, reply: str, posting: str, error: Exception) -> None:
        """Reply that a pass ended in an error. Raises RedisError; its caller runs into the time-out then."""
        text = f"{type(error).__name__}: {describe(error)}"[:LONGEST_ERROR]
        output = {"posting": posting, "ended": "failed", "error": text}
        answer_job(self._client, self.namespace, reply, output, status="failed")

    def leave(self) -> bool:
        """Wait for the tasks in hand, at most the drain grace, then withdraw the presence. Returns whether all tasks
        have ended."""
        self.workload.stop()
        with self.present():
            idle = self.workload.wait_until_idle(self._settings.coordination.drain_grace)
        if not idle:
            log.warning("left_with_work_in_hand", tasks=self.in_flight(), clusters=sorted(self.work()))
        if self.presence is not None:
            self.presence.withdraw()
        return idle
