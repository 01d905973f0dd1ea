"""How much waits in the queues and for how long; and what becomes of messages for instances that are gone."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any, cast

import redis
import structlog

from opencue_sched.clients.lua_scripts import ScriptCall, call_scripts
from opencue_sched.coordination.keys import (
    QueueName,
    QueueType,
    parse_presence_key,
    presence_index,
    priority_lists,
    queue_stats,
)
from opencue_sched.coordination.presence import BEAT_TYPE, Members

log = structlog.get_logger(__name__)

MOVED_PER_CALL = 5000
"""How many messages one call of lua/queue_drain.lua moves from a dead instance's queues at most: Redis serves nobody
else while a script runs."""
FORGET_SECONDS = 600.0
"""How long the queues of a dead instance are still looked at. Longer than the broker's visibility time-out: messages
that a killed worker had reserved come back to its queue by then."""
STATS_LIFE_SECONDS = 60
"""Life of the statistics keys (keys.queue_stats), so that no old figures stay where no census is taken any more."""


@dataclass(frozen=True, slots=True)
class QueueFigures:
    """What waits for one queue type, over all its queues and priorities."""

    depth: int
    oldest_seconds: float
    """Age of the oldest message; 0 when none waits."""
    queues: dict[str, int]
    """The depth of each queue, by its name. Nobody changes it after the census."""


@dataclass(frozen=True, slots=True)
class QueueCensus:
    """The queues of one fleet at one moment. Nobody changes its mappings after the census."""

    by_type: dict[str, QueueFigures]
    workers: int
    """How many live instances of the fleet dispatch."""
    backlog_per_worker: dict[str, float]
    """Dispatch messages per live worker, by group: those that wait for the group, those that its workers have in hand,
    and one worker's share of the queue that all groups share. A group without a live worker counts as one worker."""


def drain_dead_instances(client: redis.Redis, namespace: str, members: Members) -> int:
    """Move messages from the queues of instances that are gone to those of their groups; returns how many were moved.

    Any process may do this, several may at once: each step is one script that looks at the presence again. Raises
    RedisError.
    """
    calls = []
    for key in members.gone:
        type_, group, instance = parse_presence_key(key)
        # A beat consumes no queue, so no message can come back to it.
        forget_after = 0.0 if type_ == BEAT_TYPE else FORGET_SECONDS
        source = priority_lists(QueueName(namespace, type_, group, instance))
        target = priority_lists(QueueName(namespace, type_, group))
        keys = [key, presence_index(namespace), *source, *target]
        calls.append(ScriptCall("queue_drain", keys, [MOVED_PER_CALL, int(forget_after * 1000)]))
    answers, _ = call_scripts(client, calls) if calls else ([], [])
    for key, moved in zip(members.gone, answers, strict=True):
        if moved:
            log.warning("dead_instance_drained", presence=key, messages=moved)
    return sum(map(int, answers))


def queue_census(
    client: redis.Redis, namespace: str, members: Members, *, group: str, facility: str | None = None
) -> QueueCensus:
    """Depth and oldest age of every queue type in one fleet, also written to the statistics keys. Two round trips.
    Raises RedisError.

    The fleet of a ``facility`` has one group, ``group``. The fleet without a facility has ``group`` and all other live
    groups that belong to no facility; the queues that all these groups share count to it as well.
    """
    lists = [(queue, name) for queue in _queues(namespace, members, group, facility) for name in priority_lists(queue)]
    with client.pipeline(transaction=False) as pipe:
        for _, name in lists:
            pipe.llen(name)
            pipe.lindex(name, -1)  # the oldest: messages come in at the other end
        answers = pipe.execute()
    now = time.time()
    depths: defaultdict[str, Counter[str]] = defaultdict(Counter)
    oldest: defaultdict[str, float] = defaultdict(float)
    shared = 0  # dispatch messages that wait in the queue of all groups
    load: Counter[str] = Counter()  # dispatch messages by group: those that wait for it, and below those in hand
    for (queue, _), length, message in zip(lists, answers[::2], answers[1::2], strict=True):
        depths[queue.type][str(queue)] += length
        sent = sent_at(message)
        if sent is not None:
            oldest[queue.type] = max(oldest[queue.type], now - sent)
        if queue.type == QueueType.DISPATCH:
            if queue.group is None:
                shared += length
            else:
                load[queue.group] += length
    by_type = {
        type_.value: QueueFigures(depths[type_].total(), oldest[type_], dict(depths[type_])) for type_ in QueueType
    }
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
    share = shared / max(1, len(dispatchers))
    workers = Counter(actor.group for actor in dispatchers)
    backlogs = {name: load[name] / max(1, workers[name]) + share for name in sorted(load)}
    return QueueCensus(by_type, len(dispatchers), backlogs)


def _queues(namespace: str, members: Members, group: str, facility: str | None) -> list[QueueName]:
    """The work queues of a fleet: of its type, its groups, and its instances, gone ones too.

    The presence key of an instance that is gone names no facility, so the instance counts to the fleet that has its
    group.
    """
    scope = (facility or "").lower()
    found = {QueueName(namespace, type_.value, group) for type_ in QueueType}
    if not scope:
        found |= {QueueName(namespace, type_.value) for type_ in QueueType}
    groups_of_other_fleets = {actor.group for actor in members.alive if actor.facility != scope}
    instances = [(actor.type, actor.group, actor.instance) for actor in members.alive]
    instances += map(parse_presence_key, members.gone)
    for type_name, its_group, instance in instances:
        if type_name == BEAT_TYPE:  # consumes no queue
            continue
        in_this_fleet = its_group == group if scope else its_group not in groups_of_other_fleets
        if in_this_fleet:
            found |= {QueueName(namespace, type_name, its_group), QueueName(namespace, type_name, its_group, instance)}
    return sorted(found, key=str)


def sent_at(message: str | None) -> float | None:
    """The epoch seconds at which a message was sent; None without a message, or where it does not say when."""
    if message is None:
        return None
    try:
        return float(json.loads(message)["headers"]["sent_at"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
