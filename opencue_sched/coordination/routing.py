"""The queues: where a message goes.

A cluster's message goes to the instance whose host cache is warm for it, else to its group, else to the type.
In a divided farm the instance is that of the cluster's shard: it alone has these hosts. A farm that is not divided is
one shard, of the first instance of the group by name: one pass takes all its clusters along. A message that it did not
take in time is sent again, and waits for one instance only where none consumes another queue. A message goes to no
queue that no live worker announces, while another is announced.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import redis

from opencue_sched.clock import boot_clock
from opencue_sched.coordination.keys import QueueName, QueueType
from opencue_sched.coordination.presence import WorkerState, list_members
from opencue_sched.domain.clusters import Cluster

REMEMBERED_SECONDS = 1.0
"""How long presence is believed before it is read again. A message for an instance that went meanwhile is sent again
after about as long (board.RESEND_SECONDS)."""


class Router:
    """Says to which queue a message of one group goes.

    ``fixed`` groups (a fleet of one facility) never use the queue shared by all groups. Presence is read at most once
    in REMEMBERED_SECONDS.
    """

    def __init__(self, client: redis.Redis, namespace: str, group: str, *, fixed: bool = False) -> None:
        self._client = client
        self._type_queue = QueueName(namespace, QueueType.DISPATCH.value)
        self._group_queue = QueueName(namespace, QueueType.DISPATCH.value, group)
        self._group = group
        self._fixed = fixed
        # What was read of presence: every thread that sends asks, so all of it is read and written under the lock.
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._consumed: set[str] = set()
        """Names of the queues that a working instance consumes."""
        self._fleet: frozenset[str] = frozenset()
        self._queues: dict[str, QueueName] = {}
        """Instances of the fleet that consume a queue of their own, with that queue."""

    def queue_of_all(self) -> QueueName:
        """The queue for work that any worker may do: the group's where a worker consumes that, else all groups'."""
        with self._lock:
            self._look()
            return self._shared()

    def queue_for(self, cluster: Cluster, *, again: bool = False) -> QueueName:
        """The queue for a message about ``cluster``; ``again`` when one was sent before and nobody took it."""
        with self._lock:
            self._look()
            shared = self._shared()
            ours = (instance for instance, queue in self._queues.items() if queue.group == self._group)
            own = self._queues.get(cluster.shard or min(ours, default=""))
            return shared if own is None or (again and str(shared) in self._consumed) else own

    def instances(self) -> frozenset[str]:
        """The instances that take work from this fleet's board, by whatever queue: those of all groups, but where the
        group is fixed."""
        with self._lock:
            self._look()
            return self._fleet

    def _shared(self) -> QueueName:
        """The queue of the group if a worker consumes that queue, else the queue of the type."""
        return self._group_queue if self._fixed or str(self._group_queue) in self._consumed else self._type_queue

    def _look(self) -> None:
        """Read which instances work and which queues they consume, unless that was read less than REMEMBERED_SECONDS
        ago. Under ``_lock``. Raises RedisError."""
        now = boot_clock()
        if now - self._read_at < REMEMBERED_SECONDS:
            return
        members = list_members(self._client, self._type_queue.ns)
        working = [actor for actor in members.of(QueueType.DISPATCH.value) if actor.state == WorkerState.WORKING]
        self._consumed = {name for actor in working for name in actor.capabilities}
        mine = [actor for actor in working if actor.group == self._group]
        fleet = mine if self._fixed else [actor for actor in working if not actor.facility]
        self._fleet = frozenset(actor.instance for actor in fleet)
        own = {actor.instance: replace(self._type_queue, group=actor.group, instance=actor.instance) for actor in fleet}
        self._queues = {instance: queue for instance, queue in own.items() if str(queue) in self._consumed}
        self._read_at = now
