"""Care of the queues: depths and ages, and the messages of instances that are gone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
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
from opencue_sched.coordination.presence import BEAT_TYPE, Roll
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
    """The queues at one moment. ``workers`` are the live dispatch instances."""

    by_type: dict[str, QueueFigures]
    workers: int
    in_hand: int

    @property
    def backlog_per_worker(self) -> float:
        """Dispatch messages waiting or in hand, per live worker (all of them, while none is alive)."""
        figures = self.by_type.get(QueueType.DISPATCH.value)
        waiting = 0 if figures is None else figures.depth
        return (waiting + self.in_hand) / max(1, self.workers)


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
    groups: Sequence[str] = (),
    clock: Callable[[], float] = time.time,
) -> QueueSurvey:
    """Depth and oldest age of every queue type, also written to the statistics keys. Two round trips.

    ``groups`` are looked at besides those of the instances on the roll.
    """
    queues = _queues(namespace, roll, groups)
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
    dispatchers = roll.of(QueueType.DISPATCH.value)
    survey = QueueSurvey(by_type, len(dispatchers), sum(actor.in_flight for actor in dispatchers))
    _write(client, namespace, survey, now)
    return survey


def _queues(namespace: str, roll: Roll, groups: Sequence[str]) -> list[QueueName]:
    found = {QueueName(namespace, type_.value) for type_ in QueueType}
    found |= {QueueName(namespace, type_.value, group) for type_ in QueueType for group in groups}
    places = [(actor.type, actor.group, actor.instance) for actor in roll.alive]
    places += [parse_presence_key(key)[1:] for key in roll.gone]
    for type_name, group, instance in places:
        if type_name != BEAT_TYPE:
            found |= {QueueName(namespace, type_name, group), QueueName(namespace, type_name, group, instance)}
    return sorted(found, key=str)


def _write(client: redis.Redis, namespace: str, survey: QueueSurvey, now: float) -> None:
    with client.pipeline(transaction=False) as pipe:
        for type_, figures in survey.by_type.items():
            key = queue_stats(namespace, type_)
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
    except (ValueError, TypeError, KeyError):
        return None
