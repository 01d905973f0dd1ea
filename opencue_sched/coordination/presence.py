"""Presence: which instances are alive, which queues each consumes and what each does (docs/references.md).

An instance is a worker or a beat under its name; an actor is an instance in one of its roles. There is one JSON record
for each actor, gone 15 s after its last refresh. A name belongs to one incarnation of one process: a second process
that wants it is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import redis
import structlog
from pydantic import FiniteFloat, TypeAdapter
from redis.exceptions import RedisError

from opencue_sched import __version__
from opencue_sched.clients.lua_scripts import call_script
from opencue_sched.coordination.keys import presence_index, presence_key
from opencue_sched.errors import SchedulerError

log = structlog.get_logger(__name__)

TTL_SECONDS = 15.0
"""Life of a record after its last refresh: an instance that died counts as gone after so long."""
REFRESH_SECONDS = 4.0
"""Time between two refreshes of a record. Two in a row may fail: after three the record expires before the fourth."""
_POLL_SECONDS = 0.25
"""Time between two looks whether a name that was taken is free."""
BEAT_TYPE = "beat"
"""The type of a beat's record, in the place of a queue type."""


class InstanceTaken(SchedulerError):
    """Another live process has this instance name, or took it while this one did not answer."""

    def __init__(self, holder: Actor) -> None:
        super().__init__(
            f"instance {holder.instance!r} of group {holder.group!r} is already running: process {holder.pid} on "
            f"{holder.hostname}; give this one another name (OPENCUE_SCHED_INSTANCE) or stop that one"
        )


@dataclass(frozen=True, slots=True)
class Actor:
    """One instance in its role of one queue type (or ``beat``). Times are seconds since the epoch."""

    type: str
    group: str
    """The group of workers or beats that the instance belongs to."""
    instance: str
    """The name of the instance, which is the same in all its records."""
    node: str = ""
    """Celery's name of the worker."""
    pid: int = 0
    hostname: str = ""
    machine: str = ""
    """Names the process table that ``pid`` belongs to: host, boot and pid namespace."""
    started_at: FiniteFloat = 0.0
    last_heartbeat: FiniteFloat = 0.0
    version: str = ""
    capabilities: tuple[str, ...] = ()
    """The names of the queues that a worker consumes."""
    in_flight: int = 0
    """How many tasks the instance has in hand."""
    capacity: int = 0
    """How many tasks the instance can have in hand at once."""
    state: str = "working"
    """The text of a WorkerState; says nothing of a beat."""
    work: tuple[str, ...] = ()
    """The keys of the clusters that the instance dispatches now."""
    unreached: tuple[tuple[str, str], ...] = ()
    """Hosts whose RQDs do not answer the instance, each with words for people."""
    more_unreached: int = 0
    """How many hosts do not answer the instance beside those in ``unreached``."""
    backlog_age_seconds: FiniteFloat = 0.0
    """How long ago the instance compared its backlog with the database."""
    deaf: bool = False
    """Whether the instance hears no notification of PostgreSQL."""
    fence: int = 0
    """The fence of a leading beat; 0 for any other."""
    facility: str = ""
    """The scope of a fleet of one facility, in lower case; empty for all others."""
    token: str = field(default="", repr=False)
    """Tells this incarnation of the name from others."""

    @classmethod
    def parse(cls, text: str) -> Actor | None:
        """The actor of a record; None for a record that cannot be read. Fields of a newer version are ignored."""
        try:
            return _RECORD.validate_json(text, strict=True)
        except ValueError:
            log.warning("presence_unreadable", record=text[:200])
            return None


_RECORD = TypeAdapter(Actor)


class Presence:
    """The presence of this process under one instance name, with a record for each of ``types``. ``fields`` are further
    fields of these records (Actor).

    Not thread-safe: no two threads may refresh or withdraw at once.
    """

    def __init__(
        self,
        client: redis.Redis,
        namespace: str,
        *,
        types: Sequence[str],
        group: str,
        instance: str,
        facility: str | None = None,
        **fields: Any,
    ) -> None:
        self._client = client
        self._types = tuple(types)
        self._index = presence_index(namespace)
        self._keys = [presence_key(namespace, type_, group, instance) for type_ in types]
        self.actor = Actor(
            type=self._types[0],
            group=group,
            instance=instance,
            pid=os.getpid(),
            hostname=socket.gethostname(),
            machine=_machine(),
            started_at=time.time(),
            version=__version__,
            facility=(facility or "").lower(),
            token=uuid.uuid4().hex,
            **fields,
        )
        self._announced = False

    def announce(self, *, patience_seconds: float = TTL_SECONDS + 1) -> None:
        """Take the name. Raises InstanceTaken when another process is alive under it.

        The record of a process that was killed outlives it: it is replaced at once if that process was on this machine
        and is gone, and waited for otherwise.
        """
        deadline = time.monotonic() + patience_seconds
        while (holder := self._keep()) is not None:
            if _is_gone(holder) and self._keep(replaceable=holder.token) is None:
                log.info("presence_of_dead_process_replaced", instance=holder.instance, pid=holder.pid)
                break
            if time.monotonic() >= deadline:
                raise InstanceTaken(holder)
            time.sleep(_POLL_SECONDS)
        self._announced = True

    def refresh(self, **changed: Any) -> None:
        """Say that this process is alive, and which fields of its record have ``changed`` since the last time.

        Raises InstanceTaken if the name went to another one. Does nothing before announce() or after withdraw().
        """
        if not self._announced:
            return
        self.actor = replace(self.actor, **changed)
        holder = self._keep()
        if holder is not None:
            raise InstanceTaken(holder)

    def withdraw(self) -> None:
        """Take the presence away; the name is free at once. Where Redis does not answer the record ends by itself."""
        self._announced = False
        try:
            call_script(self._client, "presence_drop", self._keys, [self.actor.token])
        except RedisError as error:
            log.warning("presence_left_to_expire", error=str(error))

    def _keep(self, *, replaceable: str = "") -> Actor | None:
        """Write the records. Returns None, or the holder where another incarnation has one of the names: then nothing
        is written. ``replaceable``: the token of an incarnation whose records may be overwritten."""
        record = replace(self.actor, last_heartbeat=time.time())
        arguments: list[str | int] = [record.token, int(TTL_SECONDS * 1000), replaceable]
        arguments += [json.dumps(asdict(replace(record, type=type_))) for type_ in self._types]
        answer = call_script(self._client, "presence_keep", [self._index, *self._keys], arguments)
        # {1}, or {0, key, record of the holder}.
        if answer[0] == 1:
            return None
        # The name is taken also by a record that cannot be read: of such a holder nothing else is known.
        return Actor.parse(str(answer[2])) or Actor(record.type, record.group, record.instance)


@dataclass(frozen=True, slots=True)
class Members:
    """The instances of a fleet at one moment."""

    alive: tuple[Actor, ...]
    gone: tuple[str, ...]
    """The presence keys of instances that are gone, until their queues are looked at no more
    (queue_figures.FORGET_SECONDS)."""

    def of(self, type_: str) -> list[Actor]:
        """The records of live instances of one type."""
        return [actor for actor in self.alive if actor.type == type_]


def list_members(client: redis.Redis, namespace: str) -> Members:
    """The instances of a fleet, in the order of type, group and instance. Two commands, however many keys Redis has."""
    keys = cast("list[str]", client.zrange(presence_index(namespace), 0, -1))
    records = cast("list[str | None]", client.mget(keys)) if keys else []
    actors = [actor for record in records if record is not None and (actor := Actor.parse(record))]
    actors.sort(key=lambda actor: (actor.type, actor.group, actor.instance))
    gone = [key for key, record in zip(keys, records, strict=True) if record is None]
    return Members(tuple(actors), tuple(gone))


def _machine() -> str:
    """A name for the process table that our pid belongs to: host, boot and pid namespace."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return "/".join(parts)


def _is_gone(holder: Actor) -> bool:
    """Whether the process behind a record is certainly gone: one of this machine, with no such process left."""
    if holder.machine != _machine():
        return False
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # one of another user
        return False
    return holder.pid == os.getpid()  # the holder is another incarnation, so an earlier process had our pid


class WorkerState(StrEnum):
    """What a worker takes."""

    STARTING = "starting"
    """No messages yet: the worker checks its stores and fills the counters."""
    WORKING = "working"
    """Messages of all its queues."""
    PAUSED = "paused"
    """No dispatch messages, until it is told to resume."""
    DRAINING = "draining"
    """No messages at all, until it is told to resume, or ends."""
