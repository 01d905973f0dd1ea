"""The queues: where a message goes, what waits where, how a request is answered, and the broker they are on.

A cluster's message goes to the instance whose host cache is warm for it, else to its group, else to the type.
In a divided farm the instance is that of the cluster's shard: it alone has these hosts. A farm that is not divided is
one shard, of the first instance of the group by name: one pass takes all its clusters along. A message that it did not
take in time is sent again, and waits for one instance only where none consumes another queue. A message goes to no
queue that no live worker announces, while another is announced.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast
from urllib.parse import urlsplit
from uuid import uuid4

import redis
import structlog
from kombu.transport import TRANSPORT_ALIASES

from opencue_sched.clients.lua_scripts import ScriptCall, call_script, call_scripts
from opencue_sched.clock import boot_clock
from opencue_sched.coordination.names import (
    QUEUE_PRIORITIES,
    QueueName,
    QueueType,
    job_hash,
    parse_presence_key,
    presence_index,
    priority_lists,
    queue_stats,
    reply_queue,
)
from opencue_sched.coordination.presence import BEAT_TYPE, Members, WorkerState, list_members
from opencue_sched.domain.clusters import Cluster
from opencue_sched.domain.redis_url import read_redis_url
from opencue_sched.errors import SchedulerError

REMEMBERED_SECONDS = 1.0


class Router:
    """Routes of one group. ``fixed`` groups (a fleet of one facility) never use the queue shared by all groups.

    Presence is read at most once a second.
    """

    def __init__(self, client: redis.Redis, namespace: str, group: str, *, fixed: bool = False) -> None:
        self._client = client
        self._type_queue = QueueName(namespace, QueueType.DISPATCH.value)
        self._group_queue = QueueName(namespace, QueueType.DISPATCH.value, group)
        self._group = group
        self._fixed = fixed
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._consumed: set[str] = set()
        self._fleet: frozenset[str] = frozenset()
        self._queues: dict[str, QueueName] = {}

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
        """The queue of the group if anybody consumes it, else that of the type."""
        return self._group_queue if self._fixed or str(self._group_queue) in self._consumed else self._type_queue

    def _look(self) -> None:
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


# Care of the queues: depths and ages, and the messages of instances that are gone.

log = structlog.get_logger(__name__)

MOVED_PER_CALL = 5000
# Longer than the broker's visibility time-out: what a killed worker had reserved comes back to its queue by then.
FORGET_SECONDS = 600.0
STATS_LIFE_SECONDS = 60


@dataclass(frozen=True, slots=True)
class QueueFigures:
    """What waits for one queue type, over all its queues and priorities. ``oldest_seconds`` 0 when nothing waits."""

    depth: int
    oldest_seconds: float
    queues: dict[str, int]


@dataclass(frozen=True, slots=True)
class QueueCensus:
    """The queues of one fleet at one moment. ``workers`` are its live dispatch instances.

    ``backlog_per_worker`` is, of each group, its dispatch messages waiting or in hand per live worker of the group (all
    of them, while none is alive), and a worker's share of what waits in the queue shared by all groups.
    """

    by_type: dict[str, QueueFigures]
    workers: int
    backlog_per_worker: dict[str, float]


def drain_dead_instances(client: redis.Redis, namespace: str, members: Members) -> int:
    """Move what waits for instances that are gone to their groups; returns how many messages were moved.

    Any process may do this, several may at once: each step is one script that looks at the presence again.
    """
    calls = []
    for key in members.gone:
        type_, group, instance = parse_presence_key(key)
        forget_after = 0.0 if type_ == BEAT_TYPE else FORGET_SECONDS
        source = priority_lists(QueueName(namespace, type_, group, instance))
        target = priority_lists(QueueName(namespace, type_, group))
        places = [key, presence_index(namespace), *source, *target]
        calls.append(ScriptCall("queue_drain", places, [MOVED_PER_CALL, int(forget_after * 1000)]))
    answers = call_scripts(client, calls)[0] if calls else []
    for key, moved in zip(members.gone, answers, strict=True):
        if moved:
            log.warning("dead_instance_drained", presence=key, messages=moved)
    return sum(map(int, answers))


def queue_census(
    client: redis.Redis, namespace: str, members: Members, *, group: str, facility: str | None = None
) -> QueueCensus:
    """Depth and oldest age of every queue type in one fleet, also written to the statistics keys. Two round trips.

    The fleet of a ``facility`` is its ``group``. That of none is ``group``, all other live groups that are no
    facility's, and the queues that they share.
    """
    queues = _queues(namespace, members, group, facility)
    with client.pipeline(transaction=False) as pipe:
        for queue in queues:
            for name in priority_lists(queue):
                pipe.llen(name)
                pipe.lindex(name, -1)
        answers = iter(pipe.execute())
    now = time.time()
    depths: dict[str, dict[str, int]] = defaultdict(dict)
    oldest: dict[str, float] = defaultdict(float)
    load: Counter[str | None] = Counter({group: 0})
    for queue in queues:
        found = [(int(next(answers)), sent_at(next(answers))) for _ in QUEUE_PRIORITIES]
        depths[queue.type][str(queue)] = depth = sum(depth for depth, _ in found)
        if queue.type == QueueType.DISPATCH:
            load[queue.group] += depth
        oldest[queue.type] = max([oldest[queue.type], *(now - at for _, at in found if at is not None)])
    by_type = {it.value: QueueFigures(sum(depths[it].values()), oldest[it], depths[it]) for it in QueueType}
    scope = (facility or "").lower()
    dispatchers = [actor for actor in members.of(QueueType.DISPATCH.value) if actor.facility == scope]
    with client.pipeline(transaction=False) as pipe:
        for type_, figures in by_type.items():
            key = queue_stats(namespace, type_, facility)
            values = {"depth": figures.depth, "oldest_seconds": round(figures.oldest_seconds, 3), "at": round(now, 3)}
            pipe.hset(key, mapping=cast("dict[Any, Any]", values))
            pipe.expire(key, STATS_LIFE_SECONDS)
        pipe.execute()
    for actor in dispatchers:
        load[actor.group] += actor.in_flight
    share = load.pop(None, 0) / max(1, len(dispatchers))
    workers = Counter(actor.group for actor in dispatchers)
    backlogs = {str(name): load[name] / max(1, workers[name]) + share for name in sorted(map(str, load))}
    return QueueCensus(by_type, len(dispatchers), backlogs)


def _queues(namespace: str, members: Members, group: str, facility: str | None) -> list[QueueName]:
    """The work queues of a fleet. Whose fleet those were that are gone, only their group says."""
    scope = (facility or "").lower()
    others = {actor.group for actor in members.alive if actor.facility != scope}
    places = [(actor.type, actor.group, actor.instance) for actor in members.alive]
    places += map(parse_presence_key, members.gone)
    found = {QueueName(namespace, type_.value, group) for type_ in QueueType}
    if not scope:
        found |= {QueueName(namespace, type_.value) for type_ in QueueType}
    for type_name, of_group, instance in places:
        ours = of_group == group if scope else of_group not in others
        if type_name != BEAT_TYPE and ours:
            found |= {QueueName(namespace, type_name, of_group), QueueName(namespace, type_name, of_group, instance)}
    return sorted(found, key=str)


def sent_at(message: str | None) -> float | None:
    """When a waiting message was sent, seconds since the epoch; None for none, or one that does not say."""
    if message is None:
        return None
    try:
        return float(json.loads(message)["headers"]["sent_at"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


QUEUE_AGE_SECONDS = 5.0


class AgedOrder:
    """The order in which a worker asks its queues (``queue_order_strategy``): as declared - instance, group, type - but
    a queue that has been passed over for QUEUE_AGE_SECONDS is asked first once.

    So the message at the end of any queue waits no longer than that for each message before it, however busy the more
    specific queues are. Kombu's queue cycle: ``update`` sets the queues, ``consume`` lists them, ``rotate`` says which
    gave one.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked: dict[str, float] = {}

    def update(self, it: Iterable[str]) -> None:
        """These are the queues now, in their order."""
        now = self._clock()
        self._asked = {name: self._asked.get(name, now) for name in it}

    def consume(self, n: int) -> list[str]:
        """The first ``n`` queues, in the order to ask them."""
        order, now = list(self._asked)[:n], self._clock()
        longest = min(order, key=self._asked.__getitem__, default="")
        if order and now - self._asked[longest] >= QUEUE_AGE_SECONDS:
            order.remove(longest)
            order.insert(0, longest)
        self._asked.update(dict.fromkeys(order[:1], now))
        return order

    def rotate(self, last_used: str) -> str:
        """``last_used`` gave a message."""
        if last_used in self._asked:
            self._asked[last_used] = self._clock()
        return last_used


# Run and wait: a job hash that says what became of a request, and a reply queue that wakes the client that waits.
#
# The reply is pushed and given its life in the same call that ends the job hash, so neither can outlive the other; a
# reader that comes late, or a reply that another client popped, is covered by the hash.

REPLY_KEPT_SECONDS = 3600
_REPLY_BLOCK_SECONDS = 1


def open_job(client: redis.Redis, namespace: str, what: str, *, waits_seconds: float) -> str:
    """Begin a request; returns its job id. The hash lives an hour, or as long as the request waits and an hour."""
    job = uuid4().hex
    key = job_hash(namespace, job)
    fields = {"status": "dispatched", "what": what, "created_at": f"{time.time():.3f}"}
    with client.pipeline(transaction=True) as pipe:
        pipe.hset(key, mapping=cast("dict[Any, Any]", fields))
        pipe.expire(key, REPLY_KEPT_SECONDS + int(waits_seconds))
        pipe.execute()
    return job


def answer_job(
    client: redis.Redis, namespace: str, job: str, output: Mapping[str, object], *, status: str = "done"
) -> bool:
    """Answer a job; False when it was answered before."""
    keys = [reply_queue(namespace, job), job_hash(namespace, job)]
    return bool(call_script(client, "reply_push", keys, [json.dumps(dict(output)), REPLY_KEPT_SECONDS, status]))


def await_reply(client: redis.Redis, namespace: str, job: str, *, timeout_seconds: float) -> dict[str, Any]:
    """The answer to a job. Raises SchedulerError when nobody answered in time; the job hash lives on."""
    deadline = time.monotonic() + timeout_seconds
    queue, key = reply_queue(namespace, job), job_hash(namespace, job)
    while (output := client.hget(key, "output")) is None:
        left = deadline - time.monotonic()
        if left <= 0:
            late = f"no answer to job {job} in {timeout_seconds:g} s"
            raise SchedulerError(f"{late}; is a worker alive? see: opencue-sched fleet")
        client.blpop([queue], timeout=min(_REPLY_BLOCK_SECONDS, max(0.01, left)))  # only wakes: the hash has it too
    client.delete(queue)
    return cast("dict[str, Any]", json.loads(output))


# The broker as Celery wants it named, from the one Redis URL of the settings.


def guard_transports() -> None:
    """Have kombu use our transports for Redis in this process. The URL keeps its scheme, which Flower looks at."""
    ours = "opencue_sched.coordination.transport:{}".format
    TRANSPORT_ALIASES.update(redis=ours("Transport"), rediss=ours("Transport"), sentinel=ours("SentinelTransport"))


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """``url`` may contain a password: never log it. ``use_ssl`` is Celery's ``broker_use_ssl``, None without TLS."""

    url: str = field(repr=False)
    options: dict[str, object] = field(default_factory=dict, repr=False)
    use_ssl: dict[str, str | bool] | None = None


def broker_settings(url: str) -> BrokerSettings:
    """Celery's broker settings for the URLs of domain/redis_url.py. Raises InvalidInput.

    TLS is given apart from the URL: kombu verifies no certificate for a ``rediss://`` that says nothing of it.
    """
    named = read_redis_url(url)
    if named.scheme == "unix":
        return BrokerSettings(url.replace("unix://", "redis+socket://", 1))
    if named.scheme != "sentinel":
        return BrokerSettings(url.partition("?")[0], use_ssl=named.tls)
    credentials, at, _ = urlsplit(url).netloc.rpartition("@")
    urls = [f"sentinel://{credentials}{at}{host}:{port}/{named.master['db']}" for host, port in named.nodes]
    options: dict[str, object] = {"master_name": named.service, "sentinel_kwargs": named.asking}
    return BrokerSettings(";".join(urls), options, named.tls)
