"""Care of the queues: depths and ages, and the messages of instances that are gone."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import redis
import structlog

from opencue_sched.coordination.names import (
    QueueName,
    QueueType,
    parse_presence_key,
    presence_index,
    priority_lists,
    queue_stats,
)
from opencue_sched.coordination.presence import BEAT_TYPE, Actor, Roll
from opencue_sched.lua_scripts import ScriptCall, call_scripts

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
class QueueSurvey:
    """The queues of one fleet at one moment. ``workers`` are its live dispatch instances.

    ``backlog_per_worker`` is, of each group, its dispatch messages waiting or in hand per live worker of the group (all
    of them, while none is alive), and a worker's share of what waits in the queue shared by all groups.
    """

    by_type: dict[str, QueueFigures]
    workers: int
    backlog_per_worker: dict[str, float]


def drain_dead_instances(client: redis.Redis, namespace: str, roll: Roll) -> int:
    """Move what waits for instances that are gone to their groups; returns how many messages were moved.

    What was said to them on their control queues is dropped.

    Any process may do this, several may at once: each step is one script that looks at the presence again.
    """
    calls, keys = [], []
    for key in roll.gone:
        _, type_, group, instance = parse_presence_key(key)
        forget_after = 0.0 if type_ == BEAT_TYPE else FORGET_SECONDS
        source = priority_lists(QueueName(namespace, type_, group, instance))
        target = priority_lists(QueueName(namespace, type_, group))
        control = str(QueueName(namespace, type_, group, instance, family="ctl"))
        calls.append(
            ScriptCall(
                "queue_drain",
                [key, presence_index(namespace), *source, *target, control],
                [MOVED_PER_CALL, int(forget_after * 1000)],
            )
        )
        keys.append(key)
    if not calls:
        return 0
    answers, _ = call_scripts(client, calls)
    if dropped := sum(int(answer[2]) for answer in answers):
        log.warning("control_messages_of_dead_instances_dropped", messages=dropped)
    moved_of = {key: int(answer[0]) for key, answer in zip(keys, answers, strict=True) if answer[0] > 0}
    for key, moved in moved_of.items():
        log.warning("dead_instance_drained", presence=key, messages=moved)
    return sum(moved_of.values())


def survey_queues(
    client: redis.Redis,
    namespace: str,
    roll: Roll,
    *,
    group: str,
    facility: str | None = None,
    clock: Callable[[], float] = time.time,
) -> QueueSurvey:
    """Depth and oldest age of every queue type in one fleet, also written to the statistics keys. Two round trips.

    The fleet of a ``facility`` is its ``group``. That of none is ``group``, all others on the roll that are no
    facility's, and the queues that they share.
    """
    queues = _queues(namespace, roll, group, facility)
    with client.pipeline(transaction=False) as pipe:
        for queue in queues:
            for name in priority_lists(queue):
                pipe.llen(name)
                pipe.lindex(name, -1)
        answers = pipe.execute()
    per_queue = len(priority_lists(queues[0])) * 2
    now = clock()
    by_type: dict[str, QueueFigures] = {}
    for type_ in QueueType:
        depths: dict[str, int] = {}
        oldest = 0.0
        for i, queue in enumerate(queues):
            if queue.type == type_.value:
                part = answers[i * per_queue : (i + 1) * per_queue]
                depths[str(queue)] = sum(int(length) for length in part[::2])
                oldest = max([oldest, *(now - at for at in map(sent_at, part[1::2]) if at is not None)])
        by_type[type_.value] = QueueFigures(sum(depths.values()), max(0.0, oldest), depths)
    dispatchers = roll.of_fleet(QueueType.DISPATCH.value, facility)
    waiting = by_type[QueueType.DISPATCH.value].queues
    survey = QueueSurvey(by_type, len(dispatchers), _backlogs(waiting, dispatchers, group))
    _write(client, namespace, facility, survey, now)
    return survey


def _backlogs(waiting: Mapping[str, int], dispatchers: Sequence[Actor], group: str) -> dict[str, float]:
    """Of each group: see QueueSurvey. ``waiting`` is the depth of each dispatch queue."""
    workers = Counter(actor.group for actor in dispatchers)
    load = Counter({group: 0, **dict.fromkeys(workers, 0)})
    shared = 0
    for name, depth in waiting.items():
        of_group = QueueName.parse(name).group
        if of_group is None:
            shared += depth
        else:
            load[of_group] += depth
    for actor in dispatchers:
        load[actor.group] += actor.in_flight
    share = shared / max(1, len(dispatchers))
    return {name: load[name] / max(1, workers[name]) + share for name in sorted(load)}


def _queues(namespace: str, roll: Roll, group: str, facility: str | None) -> list[QueueName]:
    """The work queues of a fleet. Whose fleet those were that are gone, only their group says."""
    scope = (facility or "").lower()
    others = {actor.group for actor in roll.alive if actor.facility != scope}
    places = [(actor.type, actor.group, actor.instance) for actor in roll.alive]
    places += [parse_presence_key(key)[1:] for key in roll.gone]
    found = {QueueName(namespace, type_.value, group) for type_ in QueueType}
    if not scope:
        found |= {QueueName(namespace, type_.value) for type_ in QueueType}
    for type_name, of_group, instance in places:
        ours = of_group == group if scope else of_group not in others
        if type_name != BEAT_TYPE and ours:
            found |= {QueueName(namespace, type_name, of_group), QueueName(namespace, type_name, of_group, instance)}
    return sorted(found, key=str)


def _write(client: redis.Redis, namespace: str, facility: str | None, survey: QueueSurvey, now: float) -> None:
    with client.pipeline(transaction=False) as pipe:
        for type_, figures in survey.by_type.items():
            key = queue_stats(namespace, type_, facility)
            values = {"depth": figures.depth, "oldest_seconds": round(figures.oldest_seconds, 3), "at": round(now, 3)}
            pipe.hset(key, mapping=cast("dict[Any, Any]", values))
            pipe.expire(key, STATS_LIFE_SECONDS)
        pipe.execute()


def sent_at(message: str | None) -> float | None:
    """When a waiting message was sent, seconds since the epoch; None for none, or one that does not say."""
    if message is None:
        return None
    try:
        return float(json.loads(message)["headers"]["sent_at"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
