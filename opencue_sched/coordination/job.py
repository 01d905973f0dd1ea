"""A job on a board, as a handle: what was read when it was found, and what is read anew each time it is asked."""

from __future__ import annotations

import json
import threading
import time
import uuid as uuids
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum, StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import redis
import structlog

from opencue_sched.coordination.board import Listing
from opencue_sched.coordination.names import BoardKeys
from opencue_sched.coordination.periodic import PeriodicThread
from opencue_sched.errors import SchedulerError

if TYPE_CHECKING:
    from opencue_sched.coordination.jobboard import JobBoard

log = structlog.get_logger(__name__)

# What can go wrong with a job on a board. Names and meanings are TaskFlow's; ClaimLost and BoardClosed are ours.


class BoardError(SchedulerError):
    """Base of the errors of a board."""


class JobFailure(BoardError):
    """A job cannot be posted, read or changed; also when the store does not answer."""


class UnclaimableJob(JobFailure):
    """Somebody has the job. ``owner`` says who."""

    def __init__(self, message: str, *, owner: str = "") -> None:
        super().__init__(message)
        self.owner = owner


class ClaimLost(JobFailure):
    """The claim this handle had ran out and the job was claimed again, by whomever: nothing was written."""


class BoardClosed(JobFailure):
    """The board is not connected (any more)."""


class NotFound(BoardError):
    """There is no such job, or nobody has claimed it. Not a JobFailure."""


PAYLOAD_VERSION = 1
DOES_NOT_EXPIRE = -1.0
NO_CLAIM = -2.0


class JobPriority(Enum):
    """How urgent a job is."""

    VERY_HIGH = "VERY_HIGH"
    HIGH = "HIGH"
    NORMAL = "NORMAL"
    LOW = "LOW"
    VERY_LOW = "VERY_LOW"

    @classmethod
    def convert(cls, value: JobPriority | str) -> JobPriority:
        """A priority from its name in any case. Raises ValueError naming the choices."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls[value.upper()]
        raise ValueError(f"{value!r} is no job priority; use one of {', '.join(cls.__members__)}")

    @property
    def rank(self) -> int:
        """0 for the most urgent to 4."""
        return list(type(self)).index(self)

    @property
    def queue_priority(self) -> int:
        """The message priority that goes with it: 0, 1 or 2."""
        return (0, 0, 1, 2, 2)[self.rank]

    @classmethod
    def of_rank(cls, rank: int) -> JobPriority:
        return list(cls)[rank]


class JobState(StrEnum):
    """Derived from where the job is. A job not yet due is UNCLAIMED."""

    UNCLAIMED = "UNCLAIMED"
    CLAIMED = "CLAIMED"
    COMPLETE = "COMPLETE"
    TRASHED = "TRASHED"


STATES = {
    "ready": JobState.UNCLAIMED,
    "delayed": JobState.UNCLAIMED,
    "claimed": JobState.CLAIMED,
    "trash": JobState.TRASHED,
}


@dataclass(frozen=True)
class LogBook:
    """What a job is about, when its details are not enough. ``meta["store"]`` holds parameters of its flow."""

    name: str
    uuid: str = field(default_factory=lambda: str(uuids.uuid4()))
    meta: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Backend(Protocol):
    """What a TaskFlow persistence backend has: connections that load logbooks and are closed."""

    def get_connection(self) -> Any: ...


class UnreadableJob(JobFailure, ValueError):
    """A posting whose payload nobody can read."""


@dataclass(frozen=True, slots=True)
class Payload:
    """What was posted: versioned JSON."""

    details: dict[str, Any]
    book: LogBook | None

    def encode(self) -> str:
        """Raises TypeError or ValueError for what JSON cannot hold."""
        book = None
        if self.book is not None:
            book = {"name": self.book.name, "uuid": self.book.uuid, "meta": dict(self.book.meta)}
        return json.dumps({"v": PAYLOAD_VERSION, "details": self.details, "book": book}, allow_nan=False)

    @classmethod
    def decode(cls, text: str) -> Payload:
        """Raises UnreadableJob."""
        try:
            data = json.loads(text)
            if data["v"] != PAYLOAD_VERSION:
                raise UnreadableJob(f"payload version {data['v']!r}; this process reads version {PAYLOAD_VERSION}")
            details, book = data["details"], data.get("book")
            if not isinstance(details, dict):
                raise UnreadableJob("details are no object")
            return cls(details, None if book is None else LogBook(book["name"], book["uuid"], book.get("meta") or {}))
        except UnreadableJob:
            raise
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise UnreadableJob(f"{type(error).__name__}: {error}") from error


class Job:
    """One job. ``state``, ``last_modified`` and ``expires_in`` are read anew; the rest never changes.

    The handle remembers under which fence and token it saw or made the claim, so that it can never act on another one.
    """

    def __init__(self, board: JobBoard, listing: Listing) -> None:
        fields = listing.fields
        self.board = board
        self.uuid = listing.uuid
        try:
            payload = Payload.decode(fields["details"])
            self.name = fields["name"]
            self.sequence = int(fields["seq"])
            self.priority = JobPriority.of_rank(int(fields["prio"]))
            self.created_on = _moment(fields["created"])
        except KeyError as error:
            raise UnreadableJob(f"it has lost its {error}") from error
        self.details = payload.details
        self._book = payload.book
        self.fence = listing.fence
        self.token = listing.token
        self.owner_seen = fields.get("owner", "")

    @property
    def book(self) -> Any:
        """The logbook: from the board's persistence if it has one, else as it was when posted; None without one."""
        persistence = self.board.persistence
        if self._book is None or persistence is None:
            return self._book
        if isinstance(persistence, Backend):
            with closing(persistence.get_connection()) as connection:
                return connection.get_logbook(self._book.uuid)
        return persistence(self._book.uuid)

    @property
    def book_uuid(self) -> str | None:
        return None if self._book is None else self._book.uuid

    @property
    def book_name(self) -> str | None:
        return None if self._book is None else self._book.name

    @property
    def store(self) -> dict[str, Any]:
        """Parameters of the flow: the book's, overridden by those in the job's details."""
        from_book = {} if self._book is None else dict(self._book.meta.get("store", {}))
        return {**from_book, **self.details.get("store", {})}

    @property
    def state(self) -> JobState:
        """Where the job is now. Raises JobFailure when the store does not answer or the board is closed."""
        return self.board.state_of(self)

    @property
    def last_modified(self) -> datetime | None:
        """When it was last claimed, ended or written to, by the clock of Redis; None before its first claim."""
        text = self._field("modified")
        return _moment(text) if text else None

    @property
    def result(self) -> Any:
        """What a claimant recorded last, None for nothing."""
        text = self._field("result")
        return json.loads(text) if text else None

    @property
    def error(self) -> str:
        """Why it failed last or was trashed."""
        return self._field("error")

    def _field(self, name: str) -> str:
        """A field of the job as it is now; '' for one that is not there."""
        listing = self.board.listing(self.uuid)
        return "" if listing is None else listing.fields.get(name, "")

    def expires_in(self) -> float:
        """Seconds until the claim ends; DOES_NOT_EXPIRE (-1) if it never does, NO_CLAIM (-2) without one."""
        listing = self.board.listing(self.uuid)
        if listing is None or listing.left_ms is None or listing.left_ms == NO_CLAIM:
            return NO_CLAIM
        return DOES_NOT_EXPIRE if listing.left_ms == DOES_NOT_EXPIRE else max(0.0, listing.left_ms / 1000)

    def extend_expiry(self, expiry: float) -> bool:
        """Let the claim of this handle live ``expiry`` seconds from now; False when nobody has a claim.

        Raises ClaimLost when the job was claimed again since, ValueError for ``expiry`` <= 0.
        """
        return self.board.extend_expiry(self, expiry)

    def wait(
        self,
        timeout: float | None = None,
        delay: float = 0.01,
        delay_multiplier: float = 2.0,
        max_delay: float = 60.0,
        sleep_func: Callable[[float], None] = time.sleep,
    ) -> bool:
        """Wait until the job is complete (or trashed); False when that took longer than ``timeout`` seconds.

        The board's events end the wait within milliseconds; the delays are kept for callers that pass them, and
        ``max_delay`` bounds the time between two looks.
        """
        del delay, delay_multiplier, sleep_func
        return self.board.wait_for(self, timeout, longest=max_delay)

    def __eq__(self, other: object) -> bool:
        """Handles of one job are equal, whatever each has seen of it."""
        return self.uuid == other.uuid if isinstance(other, Job) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.uuid)

    def __repr__(self) -> str:
        return f"<Job {self.name} {self.uuid} {self.priority.value} #{self.sequence}>"


def _moment(milliseconds: str) -> datetime:
    return datetime.fromtimestamp(int(milliseconds) / 1000, UTC)


# What works with a board: records that end by themselves unless they are registered again.


class Entity(Protocol):
    """TaskFlow's entity: anything with these three."""

    @property
    def kind(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class RegisteredEntity:
    """An entity as a board remembers it."""

    kind: str
    name: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Entities:
    """The entities of one board."""

    def __init__(self, client: redis.Redis, keys: BoardKeys) -> None:
        self._client = client
        self._keys = keys

    def register(self, entity: Entity, *, ttl_seconds: float) -> None:
        """Remember ``entity`` for ``ttl_seconds``. Raises TypeError for metadata that JSON cannot hold."""
        key = self._keys.entity(entity.kind, entity.name)
        record = json.dumps({"kind": entity.kind, "name": entity.name, "metadata": dict(entity.metadata)})
        with self._client.pipeline(transaction=True) as pipe:
            pipe.set(key, record, px=max(1, round(ttl_seconds * 1000)))
            pipe.sadd(self._keys.of("entities"), key)
            pipe.execute()

    def all(self) -> list[Entity]:
        """Those that have not run out, by kind and name."""
        keys = sorted(cast("set[str]", self._client.smembers(self._keys.of("entities"))))
        records = cast("list[str | None]", self._client.mget(keys)) if keys else []
        gone = [key for key, record in zip(keys, records, strict=True) if record is None]
        if gone:
            self._client.srem(self._keys.of("entities"), *gone)
        return [RegisteredEntity(**json.loads(record)) for record in records if record is not None]


# What happens on a board, from its Stream: POSTED, CLAIMED, READY, EXPIRED, REMOVED and TRASHED, each written in the
# same call that made it true.

POSTED = "POSTED"
CLAIMED = "CLAIMED"
READY = "READY"
EXPIRED = "EXPIRED"
REMOVED = "REMOVED"
TRASHED = "TRASHED"
RESYNC = "RESYNC"
ANY = "*"
_BLOCK_SECONDS = 1.0
_RETRY_SECONDS = 1.0
_START = "0-0"


@dataclass(frozen=True, slots=True)
class BoardEvent:
    """``kind`` RESYNC: events were lost (trimmed, or Redis was emptied); look at the board again."""

    kind: str
    job: str = ""
    name: str = ""


class EventReader:
    """Reads a board's events from now on."""

    def __init__(self, client: redis.Redis, stream: str) -> None:
        self._client = client
        self._stream = stream
        self._position = self._newest()

    def read(self, seconds: float) -> list[BoardEvent]:
        """The events since the last call, waiting up to ``seconds`` for one. Raises RedisError."""
        block = max(1, round(min(seconds, self._longest_block()) * 1000))
        newest = self._newest()
        emptied = _before(newest, self._position)
        trimmed = self._position != _START and _before(self._position, self._oldest())
        if emptied or trimmed:
            self._position = newest
            return [BoardEvent(RESYNC)]
        answer = cast("list[Any]", self._client.xread({self._stream: self._position}, block=block, count=1000))
        if not answer:
            return []
        entries = answer[0][1]
        self._position = entries[-1][0]
        return [BoardEvent(fields["kind"], fields["job"], fields["name"]) for _, fields in entries]

    def _longest_block(self) -> float:
        time_out = self._client.get_connection_kwargs().get("socket_timeout")
        return _BLOCK_SECONDS if time_out is None else min(_BLOCK_SECONDS, time_out / 2)

    def _newest(self) -> str:
        entries = cast("list[Any]", self._client.xrevrange(self._stream, count=1))
        return str(entries[0][0]) if entries else _START

    def _oldest(self) -> str:
        entries = cast("list[Any]", self._client.xrange(self._stream, count=1))
        return str(entries[0][0]) if entries else _START


def _before(first: str, second: str) -> bool:
    def parts(text: str) -> tuple[int, int]:
        milliseconds, _, number = text.partition("-")
        return int(milliseconds), int(number or 0)

    return parts(first) < parts(second)


Callback = Callable[[str, dict[str, Any]], None]


class Notifier:
    """Calls back, from a thread of its own, for events of the kinds registered. Callbacks must be quick.

    After a loss callbacks of every kind get RESYNC once. The thread runs from the first registration on.
    """

    def __init__(self, open_reader: Callable[[], EventReader]) -> None:
        self._open = open_reader
        self._lock = threading.Lock()
        self._callbacks: dict[str, list[Callback]] = defaultdict(list)
        self._thread: PeriodicThread | None = None

    def register(self, kind: str, callback: Callback) -> None:
        """Call ``callback(kind, {"job": uuid, "name": name})`` for each event of ``kind`` from now on (ANY: each)."""
        with self._lock:
            self._callbacks[kind].append(callback)
            if self._thread is None:
                self._thread = PeriodicThread(
                    "board-events",
                    partial(self._pass_on, self._open()),
                    failed="board_events_unreadable",
                    retry_seconds=_RETRY_SECONDS,
                )
                self._thread.start()

    def deregister(self, kind: str, callback: Callback) -> None:
        """Stop calling ``callback`` for ``kind``."""
        with self._lock:
            if callback in self._callbacks[kind]:
                self._callbacks[kind].remove(callback)

    def stop(self) -> None:
        """End the thread."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()

    def _pass_on(self, reader: EventReader) -> float:
        for event in reader.read(_BLOCK_SECONDS / 2):
            self._call(event)
        return 0.0

    def _call(self, event: BoardEvent) -> None:
        with self._lock:
            if event.kind == RESYNC:
                called = [callback for callbacks in self._callbacks.values() for callback in callbacks]
            else:
                called = [*self._callbacks[event.kind], *self._callbacks[ANY]]
        for callback in called:
            try:
                callback(event.kind, {"job": event.job, "name": event.name})
            except Exception:
                log.exception("board_callback_failed", kind=event.kind, job=event.job)
