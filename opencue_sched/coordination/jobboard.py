"""The jobboard: post, claim, finish, abandon and watch jobs (TaskFlow's jobboards, on Redis).

Every write of an owner is checked by owner, fence and token in one Lua call. What is other than on TaskFlow's own Redis
board, and why, is in docs/references.md ("Jobboards").
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
from typing import Any, Literal, cast
from urllib.parse import parse_qsl, urlsplit

import redis
import structlog
from pydantic import BaseModel, ConfigDict
from redis.exceptions import RedisError

from opencue_sched.clients.redis_client import master_of, why_unfit
from opencue_sched.clients.store_errors import describe, is_lasting
from opencue_sched.coordination.board import NEVER, BoardScripts, End, JobPriority, Listing, field_map, life_ms
from opencue_sched.coordination.board_events import EventReader, Notifier
from opencue_sched.coordination.keys import BoardKeys
from opencue_sched.domain.redis_url import UNDECODABLE
from opencue_sched.errors import SchedulerError

log = structlog.get_logger(__name__)

# What can go wrong with a job on a board. Names and meanings are TaskFlow's; ClaimLost and BoardClosed are ours.


class JobFailure(SchedulerError):
    """A job cannot be posted, read or changed; also when the store does not answer."""


class UnclaimableJob(JobFailure):
    """Another owner has the job, or it is not due."""


class ClaimLost(JobFailure):
    """The claim this handle had ran out and the job was claimed again: nothing was written."""


class BoardClosed(JobFailure):
    """The board is not connected (any more)."""


class UnreadableJob(JobFailure, ValueError):
    """A posting whose payload nobody can read."""


class NotFound(SchedulerError):
    """There is no such job, or nobody has claimed it. Not a JobFailure."""


DOES_NOT_EXPIRE = -1.0
"""The time left of a claim that never ends."""
NO_CLAIM = -2.0
"""The time left where nobody has claimed the job."""


class JobState(StrEnum):
    """The state of a job, as it follows from where the job is. A job that is not due yet is UNCLAIMED."""

    UNCLAIMED = "UNCLAIMED"
    CLAIMED = "CLAIMED"
    COMPLETE = "COMPLETE"
    TRASHED = "TRASHED"


@dataclass(frozen=True)
class LogBook:
    """What a job is about, when its details are not enough. ``meta["store"]`` holds parameters of its flow."""

    name: str
    uuid: str = field(default_factory=lambda: str(uuids.uuid4()))
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entity:
    """Something that works with a board, such as a conductor."""

    kind: str
    name: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


class _Payload(BaseModel):
    """What is posted, as JSON."""

    v: Literal[1] = 1
    details: dict[str, Any]
    book: LogBook | None = None


class Job:
    """One job. ``state``, ``last_modified`` and ``expires_in`` are read anew; the rest never changes.

    The handle remembers under which fence and token it saw or made the claim, so that it can never act on another one.
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
        self.fence = int(fields.get("fence", "0"))
        self.token = fields.get("claim", "")
        self.owner_seen = fields.get("owner", "")

    @property
    def book(self) -> Any:
        """The logbook: from the board's persistence if it has one, else as it was when posted; None without one."""
        if self._book is None or self.board.persistence is None:
            return self._book
        with closing(self.board.persistence.get_connection()) as connection:
            return connection.get_logbook(self._book.uuid)

    @property
    def store(self) -> dict[str, Any]:
        """Parameters of the flow: the book's, overridden by those in the job's details."""
        from_book = {} if self._book is None else dict(self._book.meta.get("store", {}))
        return {**from_book, **self.details.get("store", {})}

    @property
    def state(self) -> JobState:
        """The job's state at this moment. Raises JobFailure when the store does not answer or the board is closed."""
        places = {"": JobState.COMPLETE, "claimed": JobState.CLAIMED, "trash": JobState.TRASHED}
        return places.get(self._field("state"), JobState.UNCLAIMED)

    @property
    def last_modified(self) -> datetime | None:
        """The moment at which the job was last claimed, ended or written to, by the clock of Redis; None before its
        first claim."""
        text = self._field("modified")
        return _moment(text) if text else None

    def _field(self, name: str) -> str:
        """A field of the job as it is now; '' for one that is not there."""
        listing = self.board.job(self.uuid)
        return "" if listing is None else listing.fields.get(name, "")

    def expires_in(self) -> float:
        """Seconds until the claim ends; DOES_NOT_EXPIRE (-1) if it never does, NO_CLAIM (-2) without one."""
        listing = self.board.job(self.uuid)
        left = NO_CLAIM if listing is None or listing.left_ms is None else listing.left_ms
        return left if left in (NO_CLAIM, DOES_NOT_EXPIRE) else max(0.0, left / 1000)

    def extend_expiry(self, expiry: float) -> bool:
        """Let the claim of this handle live ``expiry`` seconds from now; False when nobody has a claim.

        Raises ClaimLost when the job was claimed again since, ValueError for ``expiry`` <= 0.
        """
        _check_expiry(expiry)
        held = (self.uuid, self.owner_seen, self.fence, self.token)
        extended, answer, *_ = self.board.call("board_end", *held, "extend", life_ms(expiry))
        if answer in ("other", "lost"):
            raise ClaimLost(f"job {self.uuid} was claimed again since")
        return bool(extended)

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
    """A job that cannot be read any more, as an event names it. Equal to every handle of the job."""

    state = JobState.COMPLETE

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
    return datetime.fromtimestamp(int(milliseconds) / 1000, UTC)


class JobIterator(Iterator[Job]):
    """Jobs of a board, read in pages as it goes on. Jobs that nobody can read are put aside and passed over."""

    def __init__(self, board: JobBoard, *, only_unclaimed: bool, ensure_fresh: bool) -> None:
        self.board = board
        self.only_unclaimed = only_unclaimed
        self.ensure_fresh = ensure_fresh
        self._jobs = self._read()

    def __next__(self) -> Job:
        return next(self._jobs)

    def _read(self) -> Iterator[Job]:
        for listing in self.board.listings("ready" if self.only_unclaimed else "listed"):
            now = self.board.job(listing.uuid) if self.only_unclaimed or self.ensure_fresh else listing
            if now is None or (self.only_unclaimed and now.fields["state"] != "ready"):
                continue
            try:
                job = Job(self.board, now)
            except UnreadableJob as error:
                self.board.quarantine(listing.uuid, error)
                continue
            yield job


# What a board refuses before it asks Redis.


def _check_owner(who: str) -> None:
    """Raises TypeError for an owner that is no string, ValueError for an empty one."""
    if not isinstance(who, str):
        raise TypeError(f"an owner is named by a string, not by {type(who).__name__}")
    if not who:
        raise ValueError("an owner needs a name")


def _check_expiry(expiry: float) -> float:
    """Raises ValueError unless a claim's life is above 0 seconds."""
    if not expiry > 0:
        raise ValueError(f"a claim's expiry must be above 0 seconds, not {expiry!r}")
    return expiry


DEFAULT_CLAIM_SECONDS = 60.0
"""How long a claim lasts, unless the board is made with another time."""
LONGEST_LOOK_SECONDS = 1.0
"""The longest time between two looks at a board while a caller waits."""


class JobBoard(BoardScripts):
    """A board in a namespace. ``claim_ttl`` is the life in seconds of claims made without an expiry of their own.

    ``persistence`` is a backend as TaskFlow's: an object whose ``get_connection()`` has ``get_logbook(uuid)`` and
    ``close()``. ``clustered`` gives all keys one hash tag, for Redis Cluster. The client, which must decode responses,
    stays the caller's. Thread-safe.
    """

    NEVER = NEVER
    """The expiry of a claim that does not end by itself."""

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
        """Whether connect() was called, and close() not since."""
        return self._connected

    def connect(self) -> None:
        """Check that the store answers and is fit. Raises JobFailure when it does not answer, is too old or evicts."""
        with self._translated():
            unfit = why_unfit(self.client)
        if unfit:
            raise JobFailure(f"board {self.name!r}: Redis {unfit}")
        self._connected = True

    def close(self) -> None:
        """End notifications. Every later call raises BoardClosed; claims stay until they end."""
        self._connected = False
        self.notifier.stop()
        self.notifier = Notifier(self._reader, self._job_of_event)

    def __enter__(self) -> JobBoard:
        self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def answering(self) -> AbstractContextManager[None]:
        """Raises BoardClosed when the board is not connected, JobFailure for errors of Redis within."""
        if not self._connected:
            raise BoardClosed(f"board {self.name!r} is not connected")
        return self._translated()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except RedisError as error:
            what = "refuses" if is_lasting(error) else "does not answer"
            raise JobFailure(f"board {self.name!r}: Redis {what}: {describe(error)}") from error

    def call(self, script: str, *args: str | int | float) -> Any:
        """Call one of the board's scripts. Raises as answering()."""
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
        """Post a job. ``key`` makes it idempotent: while a job of that key is on the board (or in the trash), posting
        again returns that job. ``delay`` seconds pass before a worker gets it.

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
        there, fields = self.call("board_post", uuid, name, key or "", payload, rank, delay_ms, self.keys.call(uuid))
        return Job(self, Listing(str(there), field_map(fields)))

    # Looking

    def find(self, uuid: str) -> Job | None:
        """The job of this id; None when it is gone. Raises JobFailure for one that nobody can read."""
        listing = self.job(uuid)
        return None if listing is None else Job(self, listing)

    @property
    def job_count(self) -> int:
        """Jobs on the board, claimed ones included, trash not."""
        counts = self.counts()
        return counts.ready + counts.delayed + counts.claimed

    def iterjobs(self, only_unclaimed: bool = False, ensure_fresh: bool = False) -> JobIterator:
        """The jobs by priority, oldest first. ``only_unclaimed``: those that can be claimed now, each looked at again
        as the iterator reaches it. ``ensure_fresh``: each of the others is read again too.
        """
        with self.answering():
            return JobIterator(self, only_unclaimed=only_unclaimed, ensure_fresh=ensure_fresh)

    def wait(self, timeout: float | None = None) -> JobIterator:
        """Wait for a job that can be claimed; an iterator of those. Raises NotFound after ``timeout`` seconds."""
        if not self.wait_until(lambda: self.counts().ready > 0, timeout, longest=LONGEST_LOOK_SECONDS):
            raise NotFound(f"no job to claim appeared on board {self.name!r} in {timeout:g} s")
        return self.iterjobs(only_unclaimed=True)

    def wait_until(self, done: Callable[[], bool], timeout: float | None, *, longest: float) -> bool:
        """Look, then look again at each event, when a job becomes due, and at least every ``longest`` seconds."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        reader = self._reader()
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            due_ms = self.counts().next_ms
            due = LONGEST_LOOK_SECONDS if due_ms < 0 else max(0.001, due_ms / 1000)
            with self.answering():
                reader.read(min(left, longest, due))
        return True

    def _reader(self) -> EventReader:
        with self.answering():
            return EventReader(self.client, self.keys.of("events"))

    def _job_of_event(self, uuid: str, name: str) -> Job | FormerJob:
        """The job as it is now; what its event said of it when that is all there is."""
        try:
            return self.find(uuid) or FormerJob(self, uuid, name)
        except JobFailure as error:
            log.warning("job_of_event_not_read", board=self.name, job=uuid, error=str(error))
            return FormerJob(self, uuid, name)

    def find_owner(self, job: Job) -> str | None:
        """The owner of the job's claim; None when nobody has claimed it."""
        listing = self.job(job.uuid)
        return listing.fields["owner"] if listing is not None and listing.fields["state"] == "claimed" else None

    # Claims

    def claim(self, job: Job, who: str, expiry: float | None = None) -> Job:
        """Claim a job for ``expiry`` seconds: the board's claim_ttl by default, ``board.NEVER`` for ever.

        Raises UnclaimableJob when it is claimed (by the same owner too: its claim then lives ``expiry`` anew, if one
        was given) and when it is not due yet, NotFound when it is gone or in the trash, TypeError and ValueError.
        """
        _check_owner(who)
        life = _check_expiry(self._claim_ttl if expiry is None else expiry)
        token = uuids.uuid4().hex
        claimed, *answer = self.claim_job(job.uuid, who, token, life=life, again=expiry)
        if claimed:
            job.fence, job.token, job.owner_seen = int(answer[1]), token, who
            return job
        match answer:
            case ["gone" | "trashed" as why]:
                raise NotFound(f"job {job.uuid} of board {self.name!r} is {why}")
            case ["held", owner]:
                raise UnclaimableJob(f"job {job.uuid} is claimed by {owner!r}")
        raise UnclaimableJob(f"job {job.uuid} is not due for {float(answer[1]) / 1000:.1f} s")

    def claim_next(self, who: str, expiry: float | None = None) -> Job | None:
        """Claim the most urgent, oldest job that can be claimed, in one atomic step of O(log n); None without one."""
        _check_owner(who)
        life = _check_expiry(self._claim_ttl if expiry is None else expiry)
        while True:
            token = uuids.uuid4().hex
            claimed, *answer = self.claim_job("", who, token, life=life)
            if not claimed:
                return None
            uuid = str(answer[0])
            try:
                found = self.find(uuid)
            except UnreadableJob as error:
                self.quarantine(uuid, error)
                continue
            if found is not None and found.token == token:
                return found

    # Ends of claims

    def consume(self, job: Job, who: str) -> None:
        """Take a job off the board, because it is done.

        Raises NotFound when it is gone or nobody has it, JobFailure when another owner has, ClaimLost when the owner
        of this name claimed it again since.
        """
        self._end(job, who, "consume")

    def abandon(self, job: Job, who: str) -> None:
        """Give the job back: others may claim it at once. Raises as consume."""
        self._end(job, who, "abandon")

    def trash(self, job: Job, who: str, reason: str = "") -> None:
        """Put the job aside, with why. Raises as consume."""
        self._end(job, who, "trash", error=reason)

    def _end(self, job: Job, who: str, how: End, *, error: str = "") -> None:
        _check_owner(who)
        match self.call("board_end", *self.end_call((job.uuid, who, job.fence, job.token), how, error=error)):
            case [1, *_]:
                return
            case [0, "gone" | "unclaimed" as why]:
                raise NotFound(f"cannot {how} job {job.uuid}: it is {why}")
            case [0, "other", owner] if job.owner_seen != who:
                raise JobFailure(f"cannot {how} job {job.uuid}: it is claimed by {owner!r}, not by {who!r}")
        raise ClaimLost(f"cannot {how} job {job.uuid}: it was claimed again since")

    # The trash

    def trashed(self) -> Iterator[tuple[str, dict[str, str]]]:
        """What was put aside, oldest first: id and raw fields, because what lies there may be unreadable."""
        return ((listing.uuid, listing.fields) for listing in self.listings("trash"))

    def restore(self, uuid: str) -> Job:
        """Put a trashed job back on the board. Raises NotFound for one that is not in the trash."""
        if self.update(uuid, "restore")[0] and (job := self.find(uuid)) is not None:
            return job
        raise NotFound(f"job {uuid} is not in the trash of board {self.name!r}")

    def quarantine(self, uuid: str, error: UnreadableJob) -> None:
        """Put a job aside that nobody can read, so that iteration and claiming go on."""
        log.error("job_unreadable", board=self.name, job=uuid, error=str(error))
        self.update(uuid, "trash", f"unreadable: {error}", force=True)

    # Entities: records that end by themselves unless they are registered again.

    def register_entity(self, entity: Entity, *, ttl_seconds: float = 60.0) -> None:
        """Say that something (a conductor, say) works with this board, for ``ttl_seconds`` from now. Any object with
        the attributes of an Entity will do. Raises TypeError for metadata that JSON cannot hold."""
        key = self.keys.entity(entity.kind, entity.name)
        record = json.dumps({"kind": entity.kind, "name": entity.name, "metadata": dict(entity.metadata)})
        with self.answering(), self.client.pipeline(transaction=True) as pipe:
            pipe.set(key, record, px=max(1, round(ttl_seconds * 1000)))
            pipe.sadd(self.keys.of("entities"), key)
            pipe.execute()

    def entities(self) -> list[Entity]:
        """What is registered and has not run out, by kind and name."""
        with self.answering():
            keys = sorted(cast("set[str]", self.client.smembers(self.keys.of("entities"))))
            records = cast("list[str | None]", self.client.mget(keys)) if keys else []
            gone = [key for key, record in zip(keys, records, strict=True) if record is None]
            if gone:
                self.client.srem(self.keys.of("entities"), *gone)
        return [Entity(**json.loads(record)) for record in records if record is not None]


# Opens a board by name and configuration, through the entry points ``opencue_sched.jobboards``.
#
# ``fetch("mine", {"board": "redis", "host": "redis", "namespace": "cue"})``, or the same as a URI:
# ``fetch("mine", "redis://redis:6379/0?namespace=cue&claim_ttl=30")``.

GROUP = "opencue_sched.jobboards"
"""The group of entry points under which backends of boards are found."""


class _Configuration(BaseModel):
    """What the configuration of a redis board may say: of the client what TaskFlow's says, by the same names."""

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
    """The board ``name``. ``conf`` names the backend in ``board``, by its name or by a URI whose scheme is the name, or
    is just that; ``kwargs`` (such as ``client`` and ``persistence``) go to the backend. ``namespace`` is the group of
    entry points.

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
    """The entry point ``redis``."""
    said = _Configuration.model_validate(conf)
    client = _client(said) if client is None else client
    return JobBoard(client, said.namespace, name=name, claim_ttl=said.claim_ttl, clustered=said.clustered, **kwargs)


def _client(conf: _Configuration) -> redis.Redis:
    """The client that a configuration asks for. What its URL says wins over the rest, and on TLS only the URL's scheme
    decides."""
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
    asked = [(options.pop("host", "localhost"), options.pop("port", 26379))]
    for fallback in conf.sentinel_fallbacks:
        host, _, port = fallback.rpartition(":")
        asked.append((host, int(port)))
    asking = conf.sentinel_kwargs
    if asking is not None and not asking.get("ssl"):
        asking = _without_tls(asking)
    return master_of(asked, conf.sentinel, asking, {"ssl": tls, **options})


def _without_tls(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if not name.startswith("ssl_")}


def _from_uri(uri: str) -> dict[str, Any]:
    parts = urlsplit(uri)
    conf: dict[str, Any] = dict(parse_qsl(parts.query))
    conf["board"] = "redis" if parts.scheme in ("redis", "rediss", "unix") else parts.scheme
    if conf["board"] == "redis" and (parts.netloc or parts.path):
        conf["url"] = uri.partition("?")[0]
    return conf
