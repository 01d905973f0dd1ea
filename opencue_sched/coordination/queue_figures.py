"""Care of the queues: depths and ages, and the messages of instances that are gone."""

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
    QUEUE_PRIORITIES,
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
"""Messages that one call of the script moves from a dead instance's queues, at most."""
FORGET_SECONDS = 600.0
"""How long the queues of a dead instance are still looked at. Longer than the broker's visibility time-out: what a
killed worker had reserved comes back to its queue by then."""
STATS_LIFE_SECONDS = 60
"""Life of the statistics keys."""


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
    """Its live dispatch instances."""
    backlog_per_worker: dict[str, float]
    """The dispatch messages that wait or are in hand for each live worker of a group, by group.

    While none is alive it is the number of all these messages. A worker's share of the queue that all groups share is
    added."""


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
    by_type = {
        type_.value: QueueFigures(sum(depths[type_].values()), oldest[type_], depths[type_]) for type_ in QueueType
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
    share = load.pop(None, 0) / max(1, len(dispatchers))
    workers = Counter(actor.group for actor in dispatchers)
    backlogs = {str(name): load[name] / max(1, workers[name]) + share for name in sorted(map(str, load))}
    return QueueCensus(by_type, len(dispatchers), backlogs)


def _queues(namespace: str, members: Members, group: str, facility: str | None) -> list[QueueName]:
    """The work queues of a fleet. An instance that is gone belonged to the fleet that has its group."""
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
    """The epoch seconds at which a message was sent; None without a message, or for one that does not say."""
    if message is None:
        return None
    try:
        return float(json.loads(message)["headers"]["sent_at"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
