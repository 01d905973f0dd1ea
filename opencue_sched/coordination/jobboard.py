"""The jobboard: post, claim, finish, abandon and watch jobs (TaskFlow's jobboards, on Redis).

A claim has an owner, a fence (a number that grows with each claim of the job) and a token (a random text that no other
claim has). Every write of an owner names all three, and the same Lua call that writes checks them first. Where this
board differs from TaskFlow's own Redis board, and why, is in docs/references.md ("Jobboards").
"""

from __future__ import annotations

import json
import math
import time
import uuid as uuids
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from importlib.metadata import entry_points
from operator import attrgetter
from typing import Any, Literal
from urllib.parse import parse_qsl, urlsplit

import redis
import structlog
from pydantic import BaseModel, ConfigDict
from redis.exceptions import RedisError

from opencue_sched.clients.lua_scripts import call_script
from opencue_sched.clients.redis_client import master_of, why_unfit
from opencue_sched.clients.store_errors import describe, is_lasting
from opencue_sched.coordination.board import NEVER, BoardScripts, End, JobPriority, Listing, field_map, life_ms
from opencue_sched.coordination.board_events import EventReader, Notifier
from opencue_sched.coordination.keys import BoardKeys
from opencue_sched.domain.redis_url import SENTINEL_PORT, UNDECODABLE
from opencue_sched.errors import SchedulerError

log = structlog.get_logger(__name__)

# What can go wrong with a job on a board. JobFailure, UnclaimableJob and NotFound are TaskFlow's, by name and meaning.


class JobFailure(SchedulerError):
    """A job cannot be posted, read or changed; also when the store does not answer."""


class UnclaimableJob(JobFailure):
    """Another owner has the job, or it is not due."""


class ClaimLost(JobFailure):
    """The claim of this handle expired, and the job was claimed again: nothing was written."""


class BoardClosed(JobFailure):
    """The board is not connected (any more)."""


class UnreadableJob(JobFailure, ValueError):
    """The payload of the job on the board makes no sense. A ValueError too, as for any text that cannot be parsed."""


class NotFound(SchedulerError):
    """There is no such job, no claim of it, no job to claim within a wait, or no such backend. Not a JobFailure."""


DOES_NOT_EXPIRE = -1.0
"""What Job.expires_in() returns for a claim that does not expire (JobBoard.NEVER)."""
NO_CLAIM = -2.0
"""What Job.expires_in() returns where nobody has claimed the job."""


class JobState(StrEnum):
    """The state of a job, as it follows from where the job is. A job that is not due yet is UNCLAIMED."""

    UNCLAIMED = "UNCLAIMED"
    CLAIMED = "CLAIMED"
    COMPLETE = "COMPLETE"
    TRASHED = "TRASHED"


@dataclass(frozen=True)
class LogBook:
    """What a job is about, when its details are not enough."""

    name: str
    uuid: str = field(default_factory=lambda: str(uuids.uuid4()))
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Any JSON. ``meta["store"]`` holds parameters of the flow (TaskFlow's word for what a conductor runs)."""


@dataclass(frozen=True, slots=True)
class Entity:
    """Something that works with a board, such as a conductor."""

    kind: str
    name: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


class _Payload(BaseModel):
    """The JSON of a job: what its poster says of it."""

    v: Literal[1] = 1
    """The version of this format."""
    details: dict[str, Any]
    book: LogBook | None = None


class Job:
    """A handle of one job. ``state``, ``last_modified`` and ``expires_in`` read the job at each call; of the rest only
    what the handle remembers of a claim changes.

    The handle remembers the claim that it saw when it was made, or that it made itself. It acts under that claim, and
    so never changes a job that was claimed again since.
    """

    def __init__(self, board: JobBoard, listing: Listing) -> None:
        fields = listing.fields
        self.board = board
        self.uuid = listing.uuid
        try:
            payload = _Payload.model_validate_json(fields["details"])
            self.name = fields["name"]
            self.sequence = int(fields["seq"])
            self.priority = list(JobPriority)[int(fields["prio"])]
            self.created_on = _moment(fields["created"])
        except (KeyError, ValueError) as error:
            raise UnreadableJob(f"{type(error).__name__}: {error}") from error
        self.details, self._book = payload.details, payload.book
        self.book_uuid = None if payload.book is None else payload.book.uuid
        self.book_name = None if payload.book is None else payload.book.name
        # The claim that the handle remembers. Only JobBoard.claim sets another, on the thread of its caller.
        self.fence = int(fields.get("fence", "0"))
        self.token = fields.get("claim", "")
        self.owner_seen = fields.get("owner", "")

    @property
    def book(self) -> Any:
        """The job's logbook; None for a job without one. It is read from the board's persistence, or is as it was when
        posted where the board has no persistence."""
        if self._book is None or self.board.persistence is None:
            return self._book
        with closing(self.board.persistence.get_connection()) as connection:
            return connection.get_logbook(self._book.uuid)

    @property
    def store(self) -> dict[str, Any]:
        """Parameters of the flow: the logbook's, overridden by those in the job's details."""
        from_book = {} if self._book is None else dict(self._book.meta.get("store", {}))
        return {**from_book, **self.details.get("store", {})}

    @property
    def state(self) -> JobState:
        """The job's state at this moment. Raises JobFailure when the store does not answer or the board is closed."""
        match self._field("state"):
            case "":  # the job is gone
                return JobState.COMPLETE
            case "claimed":
                return JobState.CLAIMED
            case "trash":
                return JobState.TRASHED
        return JobState.UNCLAIMED  # ready, or delayed

    @property
    def last_modified(self) -> datetime | None:
        """The moment at which the job was last claimed or written to, or its claim ended, by the clock of Redis; None
        before the first claim. Raises as ``state``."""
        text = self._field("modified")
        return _moment(text) if text else None

    def _field(self, name: str) -> str:
        """A field of the job as it is now; '' for a field, or a job, that is not there."""
        listing = self.board.job(self.uuid)
        return "" if listing is None else listing.fields.get(name, "")

    def expires_in(self) -> float:
        """Seconds until the claim expires; DOES_NOT_EXPIRE (-1) for a claim that never does, NO_CLAIM (-2) for a job
        without a claim. Raises as ``state``."""
        listing = self.board.job(self.uuid)
        if listing is None or listing.left_ms is None:
            return NO_CLAIM
        if listing.left_ms in (NO_CLAIM, DOES_NOT_EXPIRE):  # the script answers with the same numbers
            return listing.left_ms
        return max(0.0, listing.left_ms / 1000)

    def extend_expiry(self, expiry: float) -> bool:
        """Let the claim of this handle live ``expiry`` seconds from now; False when nobody has a claim.

        Raises ClaimLost when the job was claimed again since, ValueError for ``expiry`` <= 0, and as ``state``.
        """
        _check_expiry(expiry)
        claim = (self.uuid, self.owner_seen, self.fence, self.token)
        # The script that ends claims prolongs them as well.
        match self.board.call("board_end", *claim, "extend", life_ms(expiry)):
            case [1, *_]:
                return True
            case [0, "gone" | "unclaimed"]:
                return False
        raise ClaimLost(f"job {self.uuid} was claimed again since")

    def wait(
        self,
        timeout: float | None = None,
        delay: float = 0.01,
        delay_multiplier: float = 2.0,
        max_delay: float = 60.0,
        sleep_func: Callable[[float], None] = time.sleep,
    ) -> bool:
        """Wait until the job is complete (or trashed); False when that took longer than ``timeout`` seconds.

        The board's events end the wait within milliseconds. ``max_delay`` bounds the time between two looks, in
        seconds. The other parameters are TaskFlow's, and do nothing here. Raises as ``state``.
        """
        del delay, delay_multiplier, sleep_func
        done = (JobState.COMPLETE, JobState.TRASHED)
        return self.board.wait_until(lambda: self.state in done, timeout, longest=max_delay)

    def __eq__(self, other: object) -> bool:
        """Handles of one job are equal, whatever each has seen of it."""
        return self.uuid == other.uuid if isinstance(other, Job | FormerJob) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.uuid)

    def __repr__(self) -> str:
        return f"<Job {self.name} {self.uuid} {self.priority.value} #{self.sequence}>"


class FormerJob:
    """Stands in an event for a job that is gone, or could not be read. Equal to every handle of the job."""

    state = JobState.COMPLETE
    """The state of a job that is gone."""

    def __init__(self, board: JobBoard, uuid: str, name: str) -> None:
        self.board = board
        self.uuid = uuid
        self.name = name

    def __eq__(self, other: object) -> bool:
        return self.uuid == other.uuid if isinstance(other, Job | FormerJob) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.uuid)

    def __repr__(self) -> str:
        return f"<FormerJob {self.name} {self.uuid}>"


def _moment(milliseconds: str) -> datetime:
    """A time of Redis, in milliseconds since the epoch, as a moment in UTC."""
    return datetime.fromtimestamp(int(milliseconds) / 1000, UTC)


class JobIterator(Iterator[Job]):
    """Goes over the jobs of a board, and reads a page of them when it has come to the end of the one before. Jobs that
    nobody can read are put into the trash and passed over."""

    def __init__(self, board: JobBoard, *, only_unclaimed: bool, ensure_fresh: bool) -> None:
        self.board = board
        self.only_unclaimed = only_unclaimed
        self.ensure_fresh = ensure_fresh
        self._jobs = self._read()

    def __next__(self) -> Job:
        return next(self._jobs)

    def _read(self) -> Iterator[Job]:
        """The jobs that are wanted, as they are when their turn comes. One that nobody can read is put into the
        trash."""
        for listing in self.board.listings("ready" if self.only_unclaimed else "listed"):
            # The page was read a while ago: by now the job may be gone, or claimed.
            latest = self.board.job(listing.uuid) if self.only_unclaimed or self.ensure_fresh else listing
            if latest is None or (self.only_unclaimed and latest.fields["state"] != "ready"):
                continue
            try:
                job = Job(self.board, latest)
            except UnreadableJob as error:
                self.board.quarantine(listing.uuid, error)
                continue
            yield job


# What a board refuses before it asks Redis.


def _check_owner(who: str) -> None:
    """Refuse what is no name of an owner. Raises TypeError for what is no string, ValueError for an empty string."""
    if not isinstance(who, str):
        raise TypeError(f"an owner is named by a string, not by {type(who).__name__}")
    if not who:
        raise ValueError("an owner needs a name")


def _check_expiry(expiry: float) -> float:
    """The expiry, if it is above 0 seconds. Raises ValueError for any other, NaN included."""
    if not expiry > 0:  # false for NaN, as every comparison
        raise ValueError(f"a claim's expiry must be above 0 seconds, not {expiry!r}")
    return expiry


DEFAULT_CLAIM_SECONDS = 60.0
"""How long a claim lasts, unless the board is made with another time."""
LONGEST_LOOK_SECONDS = 1.0
"""The longest time between two looks at a board while a caller of JobBoard.wait waits: an event may be lost."""


class JobBoard(BoardScripts):
    """A board in a namespace. ``claim_ttl`` is the life in seconds of claims made without an expiry of their own.

    ``persistence`` is a backend as TaskFlow has them: an object whose ``get_connection()`` has ``get_logbook(uuid)``
    and ``close()``. ``clustered`` gives all keys one hash tag, for Redis Cluster. The client must decode responses, and
    the caller closes it. Thread-safe.
    """

    NEVER = NEVER
    """The expiry of a claim that does not expire. It lasts until its owner ends it."""

    def __init__(
        self,
        client: redis.Redis,
        namespace: str,
        *,
        name: str = "jobs",
        claim_ttl: float = DEFAULT_CLAIM_SECONDS,
        clustered: bool = False,
        persistence: Any = None,
    ) -> None:
        if not client.get_encoder().decode_responses:
            raise ValueError("the client of a board must be made with decode_responses=True")
        super().__init__(client, BoardKeys(namespace, name, clustered))
        self.name = name
        self.persistence = persistence
        self._claim_ttl = claim_ttl
        self._connected = False
        self.notifier = Notifier(self._reader, self._job_of_event)

    # Connection

    @property
    def connected(self) -> bool:
        """Whether connect() was called, and close() was not called since."""
        return self._connected

    def connect(self) -> None:
        """Check that Redis answers and is fit for a board. Raises JobFailure when it does not answer, is too old, or
        may evict keys."""
        with self._translated():
            unfit = why_unfit(self.client)
        if unfit:
            raise JobFailure(f"board {self.name!r}: Redis {unfit}")
        self._connected = True

    def close(self) -> None:
        """End notifications. Every later call raises BoardClosed until connect() is called; claims stay until they
        end."""
        self._connected = False
        self.notifier.stop()
        # The thread of a stopped notifier cannot be started again.
        self.notifier = Notifier(self._reader, self._job_of_event)

    def __enter__(self) -> JobBoard:
        self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def answering(self) -> AbstractContextManager[None]:
        """A context in which an error of Redis becomes a JobFailure. Raises BoardClosed at once when the board is not
        connected."""
        self._check_connected()
        return self._translated()

    def _check_connected(self) -> None:
        """Refuse a call of a board that is not connected. Raises BoardClosed."""
        if not self._connected:
            raise BoardClosed(f"board {self.name!r} is not connected")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise JobFailure, with words for people, where Redis fails or refuses."""
        try:
            yield
        except RedisError as error:
            what = "refuses" if is_lasting(error) else "does not answer"
            raise JobFailure(f"board {self.name!r}: Redis {what}: {describe(error)}") from error

    def call(self, script: str, *args: str | int | float) -> Any:
        """Call one of the board's scripts. Raises BoardClosed, and JobFailure for errors of Redis."""
        with self.answering():
            return super().call(script, *args)

    # Posting

    def post(
        self,
        name: str,
        book: LogBook | None = None,
        details: dict[str, Any] | None = None,
        priority: JobPriority | str = JobPriority.NORMAL,
        *,
        key: str | None = None,
        delay: float = 0.0,
    ) -> Job:
        """Post a job. ``key`` makes the call idempotent: while a job of that key is on the board (or in the trash),
        posting again returns that job. ``delay`` seconds pass before a worker gets the job.

        Raises ValueError for a bad priority, JobFailure for details or a book that JSON cannot hold, or when nobody
        can read the job that has the key.
        """
        rank = JobPriority.convert(priority).rank
        try:
            of_book = None if book is None else {"name": book.name, "uuid": book.uuid, "meta": dict(book.meta)}
            payload = json.dumps({"v": 1, "details": details or {}, "book": of_book}, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise JobFailure(f"job {name!r} cannot be posted: {error}") from error
        uuid, delay_ms = str(uuids.uuid4()), max(0, round(delay * 1000))
        # The last argument: the key by which Redis knows a call that the client repeats because the answer was lost.
        arguments = (uuid, name, key or "", payload, rank, delay_ms, self.keys.call(uuid))
        uuid_on_board, fields = self.call("board_post", *arguments)
        return Job(self, Listing(str(uuid_on_board), field_map(fields)))

    # Looking

    def find(self, uuid: str) -> Job | None:
        """A handle of the job of this id; None when the job is gone. Raises UnreadableJob, and as call()."""
        listing = self.job(uuid)
        return None if listing is None else Job(self, listing)

    @property
    def job_count(self) -> int:
        """How many jobs are on the board: ready, delayed or claimed, but not in the trash."""
        counts = self.counts()
        return counts.ready + counts.delayed + counts.claimed

    def iterjobs(self, only_unclaimed: bool = False, ensure_fresh: bool = False) -> JobIterator:
        """The jobs by priority, oldest first. Raises BoardClosed; going on with the iterator raises as call().

        With ``only_unclaimed`` the jobs that can be claimed now, without delayed ones; each is read again when the
        iterator reaches it. ``ensure_fresh`` has the iterator read every job again when it reaches it.
        """
        self._check_connected()
        return JobIterator(self, only_unclaimed=only_unclaimed, ensure_fresh=ensure_fresh)

    def wait(self, timeout: float | None = None) -> JobIterator:
        """Wait for a job that can be claimed, and return an iterator of the jobs that can. Raises NotFound when there
        was none for ``timeout`` seconds."""
        if not self.wait_until(lambda: self.counts().ready > 0, timeout, longest=LONGEST_LOOK_SECONDS):
            raise NotFound(f"no job to claim appeared on board {self.name!r} in {timeout:g} s")
        return self.iterjobs(only_unclaimed=True)

    def wait_until(self, done: Callable[[], bool], timeout: float | None, *, longest: float) -> bool:
        """Wait until ``done()`` is true; False when it was not within ``timeout`` seconds.

        ``done`` is called at once, after each event of the board, when a delayed job becomes due or a claim expires,
        and at least every ``longest`` seconds.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        reader = self._reader()
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            pause = min(left, longest)
            # A job that becomes due, or a claim that expires, makes no event before some process calls the board.
            next_due_ms = self.counts().next_ms
            if next_due_ms >= 0:
                pause = min(pause, next_due_ms / 1000)
            with self.answering():
                reader.read(pause)
        return True

    def _reader(self) -> EventReader:
        """A reader of the board's events from now on. Raises as call()."""
        with self.answering():
            return EventReader(self.client, self.keys.of("events"))

    def _job_of_event(self, uuid: str, name: str) -> Job | FormerJob:
        """The job as it is now; a FormerJob with what the event said where the job is gone or cannot be read."""
        try:
            return self.find(uuid) or FormerJob(self, uuid, name)
        except JobFailure as error:
            log.warning("job_of_event_not_read", board=self.name, job=uuid, error=str(error))
            return FormerJob(self, uuid, name)

    def find_owner(self, job: Job) -> str | None:
        """The owner of the job's claim; None when nobody has claimed the job, or it is gone. Raises as call()."""
        listing = self.job(job.uuid)
        return listing.fields["owner"] if listing is not None and listing.fields["state"] == "claimed" else None

    # Claims

    def claim(self, job: Job, who: str, expiry: float | None = None) -> Job:
        """Claim a job for ``expiry`` seconds: the board's claim_ttl by default, ``board.NEVER`` for ever. The handle
        remembers the claim, and is returned.

        Raises UnclaimableJob when the job is claimed or not due yet, NotFound when it is gone or in the trash,
        TypeError and ValueError for an owner without a name, ValueError for an expiry that is not above 0. A job that
        ``who`` has claimed already is UnclaimableJob, too, but that claim then lives ``expiry`` seconds from now if an
        expiry was given.
        """
        _check_owner(who)
        life = _check_expiry(self._claim_ttl if expiry is None else expiry)
        token = uuids.uuid4().hex
        answer = self.claim_job(job.uuid, who, token, life=life, again=expiry)
        match answer:
            case [1, _, fence, *_]:
                job.fence, job.token, job.owner_seen = int(fence), token, who
                return job
            case [0, "gone" | "trashed" as why]:
                raise NotFound(f"job {job.uuid} of board {self.name!r} is {why}")
            case [0, "held", owner]:
                raise UnclaimableJob(f"job {job.uuid} is claimed by {owner!r}")
        _, _not_yet, milliseconds = answer
        raise UnclaimableJob(f"job {job.uuid} is not due for {float(milliseconds) / 1000:.1f} s")

    def claim_next(self, who: str, expiry: float | None = None) -> Job | None:
        """Claim the job of the highest priority, the oldest of these; None when no job can be claimed.

        Redis finds and claims the job in one atomic step, in O(log n) of the jobs on the board. Raises TypeError and
        ValueError as claim(), and as call().
        """
        _check_owner(who)
        life = _check_expiry(self._claim_ttl if expiry is None else expiry)
        while True:
            token = uuids.uuid4().hex
            claimed, uuid, *_ = self.claim_job("", who, token, life=life)  # without an id: the next job
            if not claimed:
                return None
            try:
                found = self.find(uuid)
            except UnreadableJob as error:
                self.quarantine(uuid, error)
                continue
            # A claim that expired, or was ended by an operator, before the job was read is no claim: take another job.
            if found is not None and found.token == token:
                return found

    # Ends of claims

    def consume(self, job: Job, who: str) -> None:
        """Take a job off the board, because it is done.

        Raises NotFound when the job is gone or nobody has claimed it, ClaimLost when it was claimed again since this
        handle saw a claim of ``who``, JobFailure when another owner has it and the handle saw no claim of ``who``.
        """
        self._end(job, who, "consume")

    def abandon(self, job: Job, who: str) -> None:
        """Give the job back: others may claim it at once. Raises as consume()."""
        self._end(job, who, "abandon")

    def trash(self, job: Job, who: str, reason: str = "") -> None:
        """Put the job into the trash, with the reason. Raises as consume()."""
        self._end(job, who, "trash", error=reason)

    def _end(self, job: Job, who: str, how: End, *, error: str = "") -> None:
        """End the claim that the handle remembers. Raises as consume()."""
        _check_owner(who)
        match self.call("board_end", *self.end_call((job.uuid, who, job.fence, job.token), how, error=error)):
            case [1, *_]:
                return
            case [0, "gone" | "unclaimed" as why]:
                raise NotFound(f"cannot {how} job {job.uuid}: it is {why}")
            # Where the handle saw a claim of ``who``, another owner means that this claim was lost.
            case [0, "other", owner] if job.owner_seen != who:
                raise JobFailure(f"cannot {how} job {job.uuid}: it is claimed by {owner!r}, not by {who!r}")
        raise ClaimLost(f"cannot {how} job {job.uuid}: it was claimed again since")

    # The trash

    def trashed(self) -> Iterator[tuple[str, dict[str, str]]]:
        """The jobs in the trash, oldest first. Each is its id and its raw fields, because no handle can be made of a
        job that nobody can read. Going on with the iterator raises as call()."""
        return ((listing.uuid, listing.fields) for listing in self.listings("trash"))

    def restore(self, uuid: str) -> Job:
        """Put a job in the trash back on the board. Raises NotFound when the job is not in the trash."""
        restored, *_ = self.update(uuid, "restore")
        job = self.find(uuid) if restored else None
        if job is None:
            raise NotFound(f"job {uuid} is not in the trash of board {self.name!r}")
        return job

    def quarantine(self, uuid: str, error: UnreadableJob) -> None:
        """Put a job that nobody can read into the trash, so that iterating and claiming go on."""
        log.error("job_unreadable", board=self.name, job=uuid, error=str(error))
        self.update(uuid, "trash", f"unreadable: {error}", force=True)

    # Entities: records that expire unless they are registered again.

    def register_entity(self, entity: Entity, *, ttl_seconds: float = 60.0) -> None:
        """Register something that works with this board, such as a conductor, for ``ttl_seconds`` from now. Any object
        with the attributes of an Entity will do. Raises TypeError for metadata that JSON cannot hold."""
        key = self.keys.entity(entity.kind, entity.name)
        record = json.dumps({"kind": entity.kind, "name": entity.name, "metadata": dict(entity.metadata)})
        with self.answering(), self.client.pipeline(transaction=True) as pipe:
            pipe.set(key, record, px=max(1, round(ttl_seconds * 1000)))
            pipe.sadd(self.keys.entities, key)
            pipe.execute()

    def entities(self) -> list[Entity]:
        """The entities whose registration has not expired, by kind and name."""
        with self.answering():
            records = call_script(self.client, "board_entities", [self.keys.entities], [])
        found = [Entity(**json.loads(record)) for record in records]
        return sorted(found, key=attrgetter("kind", "name"))


# How a board is opened by name and configuration, through the entry points ``opencue_sched.jobboards``:
# ``fetch("mine", {"board": "redis", "host": "redis", "namespace": "cue"})``, or with a URI
# ``fetch("mine", "redis://redis:6379/0?namespace=cue&claim_ttl=30")``.

GROUP = "opencue_sched.jobboards"
"""The group of entry points under which backends of boards are found."""


class _Configuration(BaseModel):
    """The configuration of a Redis board. The fields about the client have the names that TaskFlow gives them."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    board: str
    url: str = ""
    namespace: str = "cue"
    claim_ttl: float = DEFAULT_CLAIM_SECONDS
    clustered: bool = False
    ssl: bool = False
    host: str | None = None
    port: int | None = None
    db: int | None = None
    username: str | None = None
    password: str | None = None
    unix_socket_path: str | None = None
    socket_timeout: float = 5.0
    socket_connect_timeout: float | None = None
    encoding: str | None = None
    encoding_errors: str = UNDECODABLE
    retry_on_timeout: bool | None = None
    health_check_interval: int | None = None
    sentinel: str | None = None
    sentinel_fallbacks: list[str] = []
    sentinel_kwargs: dict[str, Any] | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_cert_reqs: str | None = None
    ssl_ca_certs: str | None = None


def fetch(name: str, conf: Mapping[str, Any] | str, namespace: str = GROUP, **kwargs: Any) -> Any:
    """Open the board ``name``.

    ``conf`` is the name of a backend, a URI whose scheme is that name, or a mapping: its ``board`` is either of these,
    and its other fields are passed to the backend. ``kwargs`` (such as ``client`` and ``persistence``) are passed on as
    well. ``namespace`` is the group of entry points, as in TaskFlow; a board's own namespace is a field of ``conf``.

    Raises NotFound for a backend that is not installed, ValueError for a configuration that makes no sense.
    """
    settings = {"board": conf} if isinstance(conf, str) else dict(conf)
    kind = settings.get("board")
    if kind and ":" in kind:
        settings = _from_uri(kind) | {name: value for name, value in settings.items() if name != "board"}
        kind = settings["board"]
    if not kind:
        raise ValueError("the configuration of a board names its backend: {'board': 'redis', ...}")
    found = {entry.name: entry for entry in entry_points(group=namespace)}
    if kind not in found:
        raise NotFound(f"no board backend {kind!r} in {namespace}; there are: {', '.join(sorted(found)) or 'none'}")
    return found[kind].load()(name, settings, **kwargs)


def open_redis_board(
    name: str, conf: Mapping[str, Any], *, client: redis.Redis | None = None, **kwargs: Any
) -> JobBoard:
    """Open a board on Redis: the entry point ``redis``. Without a ``client`` the configuration says how one is made.
    Raises ValueError for a configuration that makes no sense."""
    said = _Configuration.model_validate(conf)
    client = _client(said) if client is None else client
    return JobBoard(client, said.namespace, name=name, claim_ttl=said.claim_ttl, clustered=said.clustered, **kwargs)


def _client(conf: _Configuration) -> redis.Redis:
    """The client that a configuration asks for. What the URL says wins over the other fields; whether TLS is used then
    follows from its scheme alone. Raises ValueError for a sentinel beside a URL."""
    tls = conf.url.startswith("rediss:") if conf.url else conf.ssl
    of_board = {"board", "url", "namespace", "claim_ttl", "clustered", "ssl"}
    of_sentinel = {"sentinel", "sentinel_fallbacks", "sentinel_kwargs"}
    options = conf.model_dump(exclude=of_board | of_sentinel, exclude_none=True) | {"decode_responses": True}
    if not tls:
        options = _without_tls(options)
    if conf.sentinel is None:
        return redis.Redis.from_url(conf.url, **options) if conf.url else redis.Redis(ssl=tls, **options)
    if conf.url:
        raise ValueError("a sentinel is asked at host and port, not at a URL")
    sentinels = [(options.pop("host", "localhost"), options.pop("port", SENTINEL_PORT))]
    for fallback in conf.sentinel_fallbacks:
        host, _, port = fallback.rpartition(":")
        sentinels.append((host, int(port)))
    options_for_sentinels = conf.sentinel_kwargs
    if options_for_sentinels is not None and not options_for_sentinels.get("ssl"):
        options_for_sentinels = _without_tls(options_for_sentinels)
    return master_of(sentinels, conf.sentinel, options_for_sentinels, {"ssl": tls, **options})


def _without_tls(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without those of TLS, which a client without TLS refuses."""
    return {name: value for name, value in options.items() if not name.startswith("ssl_")}


def _from_uri(uri: str) -> dict[str, Any]:
    """The configuration that a URI stands for. Its scheme names the backend; its query has other fields; of a board on
    Redis the rest is the URL of the client."""
    parts = urlsplit(uri)
    conf: dict[str, Any] = dict(parse_qsl(parts.query))
    conf["board"] = "redis" if parts.scheme in ("redis", "rediss", "unix") else parts.scheme
    if conf["board"] == "redis" and (parts.netloc or parts.path):
        conf["url"] = uri.partition("?")[0]
    return conf
