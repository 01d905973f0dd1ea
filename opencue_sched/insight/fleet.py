"""The fleet at one moment: which processes live, which beat leads, what each works on, and what waits."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter
from typing import Any

import redis
import structlog
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.coordination.keys import LeaderKeys, beat_keys, worker_group
from opencue_sched.coordination.postings import cluster_postings
from opencue_sched.coordination.presence import BEAT_TYPE, Actor, Members, list_members
from opencue_sched.coordination.queue_figures import queue_census
from opencue_sched.domain.units import duration_text
from opencue_sched.insight.health import reason_of
from opencue_sched.settings import Settings
from opencue_sched.store.fences import LeaderRecord, PersistentFences

log = structlog.get_logger(__name__)


def fleet_view(client: redis.Redis, settings: Settings, fences: PersistentFences | None = None) -> dict[str, Any]:
    """Everything ``opencue-sched fleet`` shows, JSON-able, times in seconds. ``fences`` as for leader_view.

    Workers and beats are all of this Redis and namespace; ``gone`` has the presence keys of those that were seen lately
    and are not alive. Leader, queues, backlog and postings are those of the fleet that the settings belong to: of their
    facility, or of all facilities without one. ``depth`` counts messages; ``backlog_per_worker`` has the dispatch
    messages for each live worker, by group (queue_census). Raises RedisError.
    """
    namespace, facility = settings.coordination.namespace, settings.scheduler.facility
    members = list_members(client, namespace)
    group = worker_group(facility, settings.coordination.group)
    queues = queue_census(client, namespace, members, group=group, facility=facility)
    postings = cluster_postings(client, settings)
    counts = postings.counts()
    return {
        "namespace": namespace,
        "leader": leader_view(client, beat_keys(namespace, facility), members, fences),
        "workers": _workers(members),
        "beats": [_process(actor) | {"fence": actor.fence or None} for actor in members.of(BEAT_TYPE)],
        "gone": list(members.gone),
        "queues": {
            type_: {
                "depth": queue.depth,
                "oldest_seconds": round(queue.oldest_seconds, 1),
                "queues": {name: depth for name, depth in queue.queues.items() if depth},
            }
            for type_, queue in queues.by_type.items()
        },
        "backlog_per_worker": {name: round(backlog, 2) for name, backlog in queues.backlog_per_worker.items()},
        "postings": named(counts, ("ready", "delayed", "claimed", "trash")),
    }


def leader_view(
    client: redis.Redis, keys: LeaderKeys, members: Members, fences: PersistentFences | None = None
) -> dict[str, Any]:
    """The leader of the beats, and the same in ``words``. Raises RedisError.

    ``instance`` is None where no live beat has the lease's ``fence``, and ``fence`` is None where nobody leads.
    ``tick_age_seconds`` is the time since a tick was fired; None where none was, where ``fences`` is not given, or
    where PostgreSQL does not answer. The words tell a tick that is not known from one that was never fired.
    """
    record: LeaderRecord | None = None
    try:
        record = fences.leader(keys.name) if fences else None
    except SQLAlchemyError as error:
        log.warning("leader_record_not_read", error=reason_of(error))
    lease = client.get(keys.lease)
    fence = None if lease is None else int(str(lease).rpartition("|")[2])
    # Leaders of other roles count fences of their own: the same number says nothing.
    beats = [actor for actor in members.of(BEAT_TYPE) if actor.fence == fence and keys.role in actor.capabilities]
    instance = beats[0].instance if beats else None
    age = round(max(0.0, record.fired_age_seconds), 1) if record and record.fired else None
    unfired = "no tick fired yet" if record else "last tick unknown"
    fired = unfired if age is None else f"last tick {duration_text(age)} ago"
    words = f"leader: {instance or 'a beat without presence'}, fence {fence}, {fired}"
    return {
        "role": keys.role,
        "words": words if fence is not None else "leader: none (is a beat alive?)",
        "instance": instance,
        "fence": fence,
        "tick_age_seconds": age,
    }


def _workers(members: Members) -> list[dict[str, Any]]:
    """One entry per worker instance, with all its types.

    An instance writes the same record for each of its types, so what the first says of its work holds for all.
    """
    instance = attrgetter("group", "instance")
    workers = sorted((actor for actor in members.alive if actor.type != BEAT_TYPE), key=instance)
    return [
        _process(actor, "state", "in_flight", "capacity")
        | {"types": [actor.type, *(other.type for other in others)], "work": sorted(actor.work)}
        for _, (actor, *others) in groupby(workers, instance)
    ]


def _process(actor: Actor, *more: str) -> dict[str, Any]:
    """What an instance's process is, with ``more`` of its fields, and the seconds since its start and heartbeat."""
    now = time.time()
    return named(actor, ("group", "instance", "node", "hostname", "pid", "version", *more)) | {
        "up_seconds": round(max(0.0, now - actor.started_at), 1),
        "heartbeat_seconds_ago": round(max(0.0, now - actor.last_heartbeat), 1),
    }


def named(thing: object, names: Iterable[str]) -> dict[str, Any]:
    """The attributes of a row or an object that have these names."""
    return {name: getattr(thing, name) for name in names}
