"""Which queue a cluster's message goes to: the instance whose host cache is warm for it, else its group, else the type.

The instance is found by rendezvous hashing of the cluster's hosts (facility and allocation, or tags) over the live
instances of the group: every sender comes to the same answer, and when an instance comes or goes only its own clusters
move. A saturated instance is passed over, and a message sent again waits for one instance only where none consumes
another queue. A message goes to no queue that no live worker announces, while another is announced.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable
from typing import cast

import redis

from opencue_sched.coordination.duty import DutyState
from opencue_sched.coordination.leader import boot_clock
from opencue_sched.coordination.names import QueueName, QueueType, priority_lists
from opencue_sched.coordination.presence import Actor, call_roll
from opencue_sched.domain.cluster import Cluster

REMEMBERED_SECONDS = 1.0


def warm_key(cluster: Cluster) -> str:
    """What a host cache is warm for: the hosts of an allocation, or those with these tags, in a facility."""
    return "\x1f".join((cluster.facility_id, cluster.alloc_id or "", *(() if cluster.alloc_id else cluster.tags)))


def rendezvous(key: str, instances: list[str]) -> str | None:
    """The instance that everybody picks for ``key``; None without instances."""

    def score(instance: str) -> bytes:
        return hashlib.blake2b(f"{instance}\x1f{key}".encode(), digest_size=8).digest()

    return max(instances, key=score, default=None)


class Router:
    """Routes of one group. ``fixed`` groups (a fleet of one facility) never use the queue shared by all groups.

    Presence and the depth of instance queues are read at most once a second; what was sent meanwhile is counted here.
    """

    def __init__(
        self,
        client: redis.Redis,
        namespace: str,
        group: str,
        *,
        fixed: bool = False,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self._client = client
        self._type_queue = QueueName(namespace, QueueType.DISPATCH.value)
        self._group_queue = QueueName(namespace, QueueType.DISPATCH.value, group)
        self._group = group
        self._fixed = fixed
        self._clock = clock
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._consumed: set[str] = set()
        self._working: frozenset[str] = frozenset()
        self._live: dict[str, Actor] = {}
        self._load: Counter[str] = Counter()

    def queue_of_all(self) -> QueueName:
        """Where to send what any worker may do: to the group; without anybody there that consumes its queue, to all
        groups."""
        with self._lock:
            self._look()
            return self._shared()

    def queue_for(self, cluster: Cluster, *, again: bool = False) -> QueueName:
        """Where to send a message for ``cluster``; ``again`` when one was sent before and nobody took it."""
        with self._lock:
            self._look()
            instance = rendezvous(warm_key(cluster), sorted(self._live))
            shared = self._shared()
            if instance is None:
                return shared
            full = self._load[instance] >= self._live[instance].capacity
            if (again or full) and str(shared) in self._consumed:
                return shared
            self._load[instance] += 1
            return self._instance_queue(instance)

    def instances(self) -> frozenset[str]:
        """The instances of the group that take work, by whatever queue."""
        with self._lock:
            self._look()
            return self._working

    def _shared(self) -> QueueName:
        """The queue of the group if anybody consumes it, else that of the type."""
        return self._group_queue if self._fixed or str(self._group_queue) in self._consumed else self._type_queue

    def _look(self) -> None:
        now = self._clock()
        if now - self._read_at < REMEMBERED_SECONDS:
            return
        roll = call_roll(self._client, self._type_queue.ns)
        working = [actor for actor in roll.of(QueueType.DISPATCH.value) if actor.state == DutyState.WORKING]
        self._consumed = {name for actor in working for name in actor.capabilities}
        mine = [actor for actor in working if actor.group == self._group]
        self._working = frozenset(actor.instance for actor in mine)
        self._live = {
            actor.instance: actor for actor in mine if str(self._instance_queue(actor.instance)) in self._consumed
        }
        waiting = self._waiting(sorted(self._live))
        self._load = Counter({name: actor.in_flight + waiting[name] for name, actor in self._live.items()})
        self._read_at = now

    def _waiting(self, instances: list[str]) -> Counter[str]:
        if not instances:
            return Counter()
        with self._client.pipeline(transaction=False) as pipe:
            for instance in instances:
                for name in priority_lists(self._instance_queue(instance)):
                    pipe.llen(name)
            lengths = cast("list[int]", pipe.execute())
        per_instance = len(lengths) // len(instances)
        return Counter(
            {name: sum(lengths[i * per_instance : (i + 1) * per_instance]) for i, name in enumerate(instances)}
        )

    def _instance_queue(self, instance: str) -> QueueName:
        return QueueName(self._group_queue.ns, self._group_queue.type, self._group, instance)
