"""Every Redis key and queue name under the namespace, built and read in one place.

Grammar (docs/references.md, "Queue naming", with our types)::

    work  = {ns}:q:work:type:T[:group:G[:inst:I]][:prio:P]
    reply = {ns}:q:reply:JOB        job = {ns}:job:JOB
    meta  = {ns}:meta:actor:inst:T:G:I        {ns}:meta:queue:stats:T[:FACILITY]
    T, G, I, JOB = [a-z0-9][a-z0-9_.-]{0,62}, which the settings check    P = 0 | 1 | 2
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class QueueType(StrEnum):
    """What a queue carries. Each has routes of its own in celeryconfig.py."""

    SWEEP = "sweep"
    DISPATCH = "dispatch"
    ACCOUNTING = "accounting"
    MAINTENANCE = "maintenance"


@dataclass(frozen=True, slots=True)
class QueueName:
    """A work queue, as specific as its fields; an instance needs a group. Its lists by priority: priority_lists()."""

    ns: str
    type: str
    group: str | None = None
    instance: str | None = None

    def __str__(self) -> str:
        text = f"{self.ns}:q:work:type:{self.type}"
        if self.group is not None:
            text += f":group:{self.group}"
        return text if self.instance is None else f"{text}:inst:{self.instance}"


def type_of(queue: str) -> str:
    """The type of a work queue. One of an older naming gets dispatch messages, see Messenger."""
    return queue.partition(":q:work:type:")[2].partition(":")[0] or QueueType.DISPATCH.value


QUEUE_PRIORITIES = (0, 1, 2)
"""The priorities of messages; 0 is served first."""
PRIORITY_SEPARATOR = ":prio:"
"""Stands between a queue's name and a priority above 0, in the name of the list that has the messages."""


def priority_lists(queue: QueueName | str) -> tuple[str, ...]:
    """The Redis lists that hold a work queue's messages, most urgent first; priority 0 has no suffix (kombu's way)."""
    name = str(queue)
    return tuple(f"{name}{PRIORITY_SEPARATOR}{prio}" if prio else name for prio in QUEUE_PRIORITIES)


def consumed_queues(ns: str, type_: str, group: str, instance: str) -> tuple[str, str, str]:
    """The queues one worker takes from, most specific first: instance, group, type."""
    return (
        str(QueueName(ns, type_, group, instance)),
        str(QueueName(ns, type_, group)),
        str(QueueName(ns, type_)),
    )


def common_queue(ns: str, type_: str, facility: str | None) -> QueueName:
    """The queue that every worker of a facility scope takes from, whatever its group: for what any of them may do."""
    return QueueName(ns, type_, worker_group(facility, "") if facility else None)


def work_exchange(ns: str) -> str:
    """The exchange that Celery knows work queues to be bound to."""
    return f"{ns}.work"


def control_exchange(ns: str, facility: str | None) -> str:
    """The exchange by which the workers of one facility scope hear remote control, and those of others do not."""
    return _in_scope(f"{ns}.control", facility)


def _in_scope(name: str, facility: str | None) -> str:
    """The name that the fleet of ``facility`` has for what the fleet without a facility calls ``name``."""
    return f"{name}.{facility.lower()}" if facility else name


def reply_queue(ns: str, job: str) -> str:
    """The list on which the caller that waits for a job gets its answer."""
    return f"{ns}:q:reply:{job}"


def job_hash(ns: str, job: str) -> str:
    """The hash of a job that a caller waits for, with its status and answer."""
    return f"{ns}:job:{job}"


def presence_key(ns: str, type_: str, group: str, instance: str) -> str:
    """The key of the presence of an instance in one queue type."""
    return f"{ns}:meta:actor:inst:{type_}:{group}:{instance}"


def parse_presence_key(key: str) -> tuple[str, str, str]:
    """Type, group and instance of a presence key."""
    type_, group, instance = key.split(":")[-3:]
    return type_, group, instance


def presence_index(ns: str) -> str:
    """Sorted set of the presence keys of every instance seen lately (score: last refresh, ms)."""
    return f"{ns}:meta:actors"


def queue_stats(ns: str, type_: str, facility: str | None = None) -> str:
    """Hash of the figures of one queue type, of the fleet of ``facility``; None: of the fleet without a facility."""
    key = f"{ns}:meta:queue:stats:{type_}"
    return f"{key}:{facility.lower()}" if facility else key


def waiting_ticks(ns: str) -> str:
    """Hash of the message of the latest tick put on each list for each series of periodic ticks."""
    return f"{ns}:q:ticks"


def reap_lease(ns: str, facility: str | None) -> str:
    """The lease of the process that reaps for one facility scope: a fleet reaps nothing of another's facility."""
    return _in_scope(f"{ns}:turn:reap", facility)


def move_lease(ns: str, facility: str | None) -> str:
    """The lease of the process that moves finished jobs of one facility scope to the history."""
    return _in_scope(f"{ns}:turn:move", facility)


def events_lease(ns: str, facility: str | None) -> str:
    """The lease of the process that sends the events of jobs of one facility scope."""
    return _in_scope(f"{ns}:turn:events", facility)


def events_woken(ns: str, facility: str | None) -> str:
    """The key that exists while a message is on its way that asks to send the events of jobs of one facility scope."""
    return f"{events_lease(ns, facility)}:woken"


def everything_under(ns: str) -> str:
    """Pattern of all keys and queues of a namespace."""
    return f"{ns}:*"


def worker_group(facility: str | None, group: str) -> str:
    """The group of a worker: a fleet scoped to a facility is a group of that name."""
    return facility.lower() if facility else group


@dataclass(frozen=True, slots=True)
class LeaderKeys:
    """Keys of one elected role, e.g. ``beat`` or ``beat.<facility>``."""

    ns: str
    role: str

    @property
    def name(self) -> str:
        """The role's name in PostgreSQL, which fleets of several namespaces may share."""
        return f"{self.ns}:{self.role}"

    @property
    def lease(self) -> str:
        """The key of the leader's lease."""
        return f"{self.ns}:leader:{self.role}:lease"

    @property
    def fence(self) -> str:
        """The key of the highest fence."""
        return f"{self.ns}:leader:{self.role}:fence"


def beat_keys(ns: str, facility: str | None) -> LeaderKeys:
    """The elected role of the beats of one facility scope: fleets of different facilities have leaders of their own."""
    return LeaderKeys(ns, _in_scope("beat", facility))


BOARD_PARTS = ("ready", "delayed", "claimed", "names", "seq", "events", "trash", "listed", "awaited")


@dataclass(frozen=True, slots=True)
class BoardKeys:
    """Keys of one jobboard."""

    ns: str
    """The namespace, with which every key begins."""
    board: str
    """The name of the board."""
    clustered: bool = False
    """Whether the keys share a hash tag, so that the board works on Redis Cluster."""

    @property
    def prefix(self) -> str:
        """How all keys of the board begin."""
        return f"{{{self.ns}:board:{self.board}}}:" if self.clustered else f"{self.ns}:board:{self.board}:"

    def job(self, uuid: str) -> str:
        """The key of the hash of a job."""
        return f"{self.prefix}job:{uuid}"

    def of(self, part: str) -> str:
        """The key of one of BOARD_PARTS."""
        return f"{self.prefix}{part}"

    def call(self, token: str) -> str:
        """What the call of this token answered, or took; remembered for a minute."""
        return self.of(f"call:{token}")

    @property
    def entities(self) -> str:
        """Set of the keys of the records of what is registered with the board."""
        return self.of("entities")

    def entity(self, kind: str, name: str) -> str:
        """The record of something registered with the board, such as a conductor."""
        return self.of(f"entity:{kind}:{name}")

    def parts(self) -> list[str]:
        """KEYS of every board script, in their order."""
        return [self.of(part) for part in BOARD_PARTS]


def cluster_board(ns: str, facility: str | None) -> BoardKeys:
    """The board of cluster postings of one facility scope."""
    return BoardKeys(ns, _in_scope("clusters", facility))


def frame_permit(ns: str, frame_id: str, version: int | None) -> str:
    """The owner of a frame for as long as it plans and commits it. A frame that is retried has another version."""
    return f"{ns}:permit:{frame_id}:{'' if version is None else version}"


def host_changes(ns: str) -> str:
    """Stream of the ids of hosts whose rows changed."""
    return f"{ns}:hosts:changed"


def backlog_changes(ns: str) -> str:
    """Stream of the ids of waiting layers that a worker's resync found changed."""
    return f"{ns}:backlog:changed"


def verdicts(ns: str, job_id: str) -> str:
    """Hash of the last verdicts on the layers of a job. Job ids are OpenCue's, used as they are."""
    return f"{ns}:verdicts:{job_id}"


def shortages(ns: str, show_id: str) -> str:
    """Hash of what keeps many layers of a show waiting at once (domain.verdicts.Shortage), by cluster. Show ids are
    OpenCue's, used as they are."""
    return f"{ns}:shortages:{show_id}"


def failed_commits(ns: str, cluster_key: str) -> str:
    """Hash of since when, how often and why the commits of a cluster have failed; gone after a commit that succeeds."""
    return f"{ns}:failed-commits:{cluster_key}"


def waiting_frames(ns: str) -> str:
    """Hash of how many frames wait by which verdict, with a field for each facility scope."""
    return f"{ns}:waiting"
