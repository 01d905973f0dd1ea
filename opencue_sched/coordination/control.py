"""Control messages: stop, drain, pause and resume workers, let a cluster rest; to a type, a group or an instance.

The control queues of the naming proposal are the way in for whoever has no Celery: JSON objects such as
``{"command": "pause"}`` pushed on ``{ns}:q:ctl:type:T[:group:G[:inst:I]]``. A worker that finds one at its heartbeat
passes it on, by Celery's remote control, to all it is meant for. What cannot be read is counted, logged and dropped.

A fleet scoped to a facility is spoken to by its group; the queues of a type are those of all other fleets.

They speak to whoever is there. What was said to an instance, a group or a type while nobody was is dropped when one
comes (see Presence), so that nobody is stopped by what was meant for another.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

import redis
import structlog

from opencue_sched.coordination.names import QueueName, job_hash, reply_queue
from opencue_sched.coordination.presence import Actor, Members
from opencue_sched.coordination.transport import note_unreadable
from opencue_sched.errors import InvalidInput
from opencue_sched.lua_scripts import call_script

log = structlog.get_logger(__name__)

TAKEN_AT_ONCE = 20
LIFE_SECONDS = 60
"""Of what we leave on a control queue: workers look every few seconds."""


class Command(StrEnum):
    """What can be said to workers. The values are the names of their remote control commands."""

    STOP = "stop_worker"
    DRAIN = "drain"
    PAUSE = "pause_dispatch"
    RESUME = "resume_dispatch"
    SLEEP = "sleep_cluster"

    @classmethod
    def of(cls, word: str) -> Command:
        """A command by its short word. Raises InvalidInput."""
        if word.upper() not in cls.__members__:
            raise InvalidInput(
                f"{word!r} is no control command; use {', '.join(name.lower() for name in cls.__members__)}"
            )
        return cls[word.upper()]


@dataclass(frozen=True, slots=True)
class ControlMessage:
    """A command; ``cluster`` (its key) and ``seconds`` belong to SLEEP."""

    command: Command
    cluster: str = ""
    seconds: float = 0.0

    def encode(self) -> str:
        fields: dict[str, object] = {"command": self.command.name.lower()}
        if self.command is Command.SLEEP:
            fields |= {"cluster": self.cluster, "seconds": self.seconds}
        return json.dumps(fields)

    @classmethod
    def decode(cls, text: str) -> ControlMessage:
        """Raises InvalidInput saying what is wrong."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"not JSON: {error}") from error
        if not isinstance(data, dict) or not isinstance(data.get("command"), str):
            raise InvalidInput("a control message is an object with a command")
        command = Command.of(data["command"])
        if command is not Command.SLEEP:
            return cls(command)
        return cls(command, *checked_rest(data.get("cluster"), data.get("seconds")))


def checked_rest(cluster: object, seconds: object) -> tuple[str, float]:
    """Which cluster is to rest and how long, in seconds. Raises InvalidInput for what is neither."""
    if not isinstance(cluster, str) or isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise InvalidInput("sleep needs the key of a cluster and a number of seconds")
    if not 0 <= seconds < float("inf"):
        raise InvalidInput(f"sleep needs a finite number of seconds, 0 or more, not {seconds!r}")
    return cluster, float(seconds)


@dataclass(frozen=True, slots=True)
class Addressed:
    """A control message and the queue it came by, which says for whom it is."""

    queue: QueueName
    message: ControlMessage


def push_control_message(client: redis.Redis, queue: QueueName, message: ControlMessage) -> None:
    """Put a control message on a control queue, for LIFE_SECONDS at most."""
    if queue.family != "ctl":
        raise InvalidInput(f"{queue} is no control queue")
    with client.pipeline() as pipe:
        pipe.rpush(str(queue), message.encode())
        pipe.expire(str(queue), LIFE_SECONDS)
        pipe.execute()


def take_control_messages(
    client: redis.Redis, namespace: str, types: Collection[str], group: str, instance: str, *, scoped: bool = False
) -> list[Addressed]:
    """Take what waits on the control queues of an instance: its own, its group's and its types', oldest first.

    One of a fleet ``scoped`` to a facility leaves its types' to the others.
    """
    places: list[tuple[str | None, str | None]] = [(group, instance), (group, None), (None, None)]
    queues = [
        QueueName(namespace, type_, in_group, of_instance, family="ctl")
        for type_ in sorted(types)
        for in_group, of_instance in places[: 2 if scoped else 3]
    ]
    if not queues:
        return []
    with client.pipeline(transaction=False) as pipe:
        for queue in queues:
            pipe.lpop(str(queue), TAKEN_AT_ONCE)
        answers = cast("list[list[str] | None]", pipe.execute())
    found = []
    for queue, texts in zip(queues, answers, strict=True):
        for text in texts or ():
            try:
                found.append(Addressed(queue, ControlMessage.decode(text)))
            except InvalidInput as error:
                note_unreadable("control message", "malformed", queue=str(queue), reason=str(error), message=text)
    return found


def addressees(members: Members, queue: QueueName) -> list[Actor]:
    """The live instances that a control queue speaks to, once each."""
    meant = members.of_fleet(queue.type, None) if queue.group is None else members.of(queue.type, queue.group)
    actors = [actor for actor in meant if queue.instance is None or actor.instance == queue.instance]
    return list({(actor.group, actor.instance): actor for actor in actors}.values())


# Run and wait: a job hash that says what became of a request, and a reply queue that wakes who waits for it.
#
# The reply is pushed and given its life in the same call that ends the job hash, so neither can outlive the other; a
# reader that comes late, or a reply somebody else popped, is covered by the hash.

KEPT_SECONDS = 3600
_BLOCK_SECONDS = 1


class NoReply(Exception):
    """Nobody answered in time; the job hash goes on to exist until its life ends."""


def open_job(client: redis.Redis, namespace: str, what: str, *, waits_seconds: float) -> str:
    """Begin a request; returns its job id. The hash lives an hour, or as long as the request waits and an hour."""
    job = uuid.uuid4().hex
    key = job_hash(namespace, job)
    fields = {"status": "dispatched", "what": what, "created_at": f"{time.time():.3f}"}
    with client.pipeline(transaction=True) as pipe:
        pipe.hset(key, mapping=cast("dict[Any, Any]", fields))
        pipe.expire(key, KEPT_SECONDS + int(waits_seconds))
        pipe.execute()
    return job


def is_waiting(client: redis.Redis, namespace: str, job: str) -> bool:
    """Whether a job was opened and neither answered nor given up."""
    status = client.hget(job_hash(namespace, job), "status")
    return status == "dispatched"


def answer(
    client: redis.Redis, namespace: str, job: str, output: Mapping[str, object], *, status: str = "done"
) -> bool:
    """Answer a job; False when it was answered before."""
    keys = [reply_queue(namespace, job), job_hash(namespace, job)]
    return bool(call_script(client, "reply_push", keys, [json.dumps(dict(output)), KEPT_SECONDS, status]))


def await_reply(
    client: redis.Redis,
    namespace: str,
    job: str,
    *,
    timeout_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """The answer to a job. Raises NoReply; then the job counts as given up."""
    deadline = clock() + timeout_seconds
    queue, key = reply_queue(namespace, job), job_hash(namespace, job)
    while True:
        output = client.hget(key, "output")
        if output is not None:
            client.delete(queue)
            return cast("dict[str, Any]", json.loads(output))
        left = deadline - clock()
        if left <= 0:
            client.hset(key, "status", "given up")
            raise NoReply(f"no answer to job {job} in {timeout_seconds:g} s")
        popped = client.blpop([queue], timeout=min(_BLOCK_SECONDS, max(0.01, left)))
        if popped is not None:
            return cast("dict[str, Any]", json.loads(popped[1]))
