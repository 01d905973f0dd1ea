"""The fleet at one moment: which processes live, which beat leads, what each works on, and what waits."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import redis
import structlog
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.coordination.names import LeaderKeys, beat_role, worker_group
from opencue_sched.coordination.presence import BEAT_TYPE, Actor, Members, list_members
from opencue_sched.coordination.queues import queue_census
from opencue_sched.insight.explain import cluster_postings
from opencue_sched.insight.stores import reason_of
from opencue_sched.settings import Settings
from opencue_sched.store.fences import LeaderRecord, PersistentFences

log = structlog.get_logger(__name__)


def fleet_view(client: redis.Redis, settings: Settings, fences: PersistentFences | None = None) -> dict[str, Any]:
    """Everything ``opencue-sched fleet`` shows, JSON-able. Seconds throughout. ``fences`` as for leader_view.

    Workers and beats are all of this Redis and namespace; leader, queues, backlog and postings are those of the
    settings' facility scope.
    """
    namespace, facility = settings.coordination.namespace, settings.scheduler.facility
    members = list_members(client, namespace)
    group = worker_group(facility, settings.coordination.group)
    queues = queue_census(client, namespace, members, group=group, facility=facility)
    postings = cluster_postings(client, settings)
    counts = postings.counts()
    return {
        "namespace": namespace,
        "leader": leader_view(client, LeaderKeys(namespace, beat_role(facility)), members, fences),
        "workers": _workers(members, postings.in_hand()),
        "beats": [_process(actor) | {"fence": actor.fence or None} for actor in members.of(BEAT_TYPE)],
        "gone": list(members.gone),
        "queues": {
            type_: {
                "depth": figures.depth,
                "oldest_seconds": round(figures.oldest_seconds, 1),
                "queues": {name: depth for name, depth in figures.queues.items() if depth},
            }
            for type_, figures in queues.by_type.items()
        },
        "backlog_per_worker": {name: round(backlog, 2) for name, backlog in queues.backlog_per_worker.items()},
        "postings": {name: getattr(counts, name) for name in ("ready", "delayed", "claimed", "trash")},
    }


def leader_view(
    client: redis.Redis, keys: LeaderKeys, members: Members, fences: PersistentFences | None = None
) -> dict[str, Any]:
    """The leader of the beats: its instance if that is alive, fence, and seconds since a tick was fired.

    ``two_redis``: beats of two Redis recently wanted to lead, so one stands by. That and the age of the tick are None
    when ``fences`` does not answer.
    """
    with client.pipeline(transaction=False) as pipe:
        pipe.get(keys.lease)
        pipe.pttl(keys.lease)
        lease, left_ms = pipe.execute()
    record = None if fences is None else _record(fences, keys)
    fence = None if lease is None else int(str(lease).rpartition("|")[2])
    # Leaders of other roles count fences of their own: the same number says nothing.
    beats = [actor for actor in members.of(BEAT_TYPE) if actor.fence == fence and keys.role in actor.capabilities]
    return {
        "role": keys.role,
        **{name: getattr(beats[0], name) if beats else None for name in ("instance", "hostname", "pid")},
        "fence": fence,
        "lease_seconds_left": None if lease is None else round(left_ms / 1000, 1),
        "tick_age_seconds": round(max(0.0, record.fired_age_seconds), 1) if record and record.fired else None,
        "two_redis": None if record is None else record.two_redis,
    }


def _record(fences: PersistentFences, keys: LeaderKeys) -> LeaderRecord | None:
    try:
        return fences.leader(keys.name)
    except SQLAlchemyError as error:
        log.warning("leader_record_not_read", error=reason_of(error))
        return None


def _workers(members: Members, in_hand: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """One entry per worker instance, with all its types.

    Its work is what its presence lists, and what the board lists for its name: the board knows the children of a
    prefork pool. To the board an owner is an instance's name, so it is not asked about one that two groups have.
    """
    by_instance: dict[tuple[str, str], list[Actor]] = {}
    for actor in members.alive:
        if actor.type != BEAT_TYPE:
            by_instance.setdefault((actor.group, actor.instance), []).append(actor)
    names = Counter(instance for _, instance in by_instance)
    return [
        _process(actors[0])
        | {name: getattr(actors[0], name) for name in ("state", "in_flight", "capacity")}
        | {
            "types": sorted(actor.type for actor in actors),
            "work": sorted({*actors[0].work, *(in_hand.get(instance, ()) if names[instance] == 1 else ())}),
        }
        for (_, instance), actors in sorted(by_instance.items())
    ]


def _process(actor: Actor) -> dict[str, Any]:
    now = time.time()
    names = ("group", "instance", "node", "hostname", "pid", "version")
    return {name: getattr(actor, name) for name in names} | {
        "up_seconds": round(max(0.0, now - actor.started_at), 1),
        "heartbeat_seconds_ago": round(max(0.0, now - actor.last_heartbeat), 1),
    }
