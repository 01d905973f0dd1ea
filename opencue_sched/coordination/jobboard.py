"""The jobboard: post, claim, finish, abandon and watch jobs (TaskFlow's jobboards, on Redis).

Differences from TaskFlow's own Redis board, each on purpose: claims end by themselves unless asked not to; every write
of an owner is checked by owner, fence and token in one Lua call; jobs come by priority and then age; times are Redis'
own and aware of their zone; the trash can be listed and restored; waiting is by event.
"""

from __future__ import annotations

import json
import time
import uuid as uuids
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import redis
import structlog
from redis.exceptions import RedisError

from opencue_sched.coordination.board import (
    NEVER,
    BoardScripts,
    End,
    Listing,
    Pages,
    Update,
    decoding,
    life_ms,
    new_token,
)
from opencue_sched.coordination.job import (
    STATES,
    Backend,
    BoardClosed,
    BoardError,
    ClaimLost,
    Entities,
    Entity,
    EventReader,
    Job,
    JobFailure,
    JobPriority,
    JobState,
    LogBook,
    NotFound,
    Notifier,
    Payload,
    UnclaimableJob,
    UnreadableJob,
)
from opencue_sched.coordination.names import BoardKeys
from opencue_sched.domain.redis_url import UNDECODABLE

log = structlog.get_logger(__name__)

# Iteration over a board, in pages.


class JobIterator:
    """Jobs of a board, read in pages as it goes on. Jobs that nobody can read are put aside and passed over."""

    def __init__(self, board: JobBoard, *, only_unclaimed: bool, ensure_fresh: bool) -> None:
        self.board = board
        self.only_unclaimed = only_unclaimed
        self.ensure_fresh = ensure_fresh
        self._which: Pages = "ready" if only_unclaimed else "listed"
        self._after = "-inf"
        self._page: list[Listing] = []
        self._ended = False

    def __iter__(self) -> JobIterator:
        return self

    def __next__(self) -> Job:
        while True:
            if not self._page and not self._ended:
                self._page = self.board.page(self._which, self._after)
                self._ended = not self._page
                self._after = self._page[-1].score if self._page else self._after
                self._page.reverse()
            if not self._page:
                raise StopIteration
            job = self._job(self._page.pop())
            if job is not None:
                return job

    def _job(self, listing: Listing) -> Job | None:
        now: Listing | None = listing
        if self.only_unclaimed or self.ensure_fresh:
            now = self.board.listing(listing.uuid)
        if now is None or (self.only_unclaimed and now.fields["state"] != "ready"):
            return None
        try:
            return Job(self.board, now)
        except UnreadableJob as error:
            self.board.quarantine(listing, error)
            return None


# What a board refuses before it asks Redis, and what Redis' refusals mean to the caller.


def check_owner(who: str) -> None:
    """Raises TypeError or ValueError for what names nobody."""
    if not isinstance(who, str):
        raise TypeError(f"an owner is named by a string, not by {type(who).__name__}")
    if not who:
        raise ValueError("an owner needs a name")


def check_expiry(expiry: float | None) -> None:
    """Raises ValueError for a life that is none."""
    if expiry is not None and not (expiry > 0 or expiry == NEVER):
        raise ValueError(f"a claim's expiry must be above 0 seconds, not {expiry!r}")


def claim_refused(board: str, uuid: str, answer: Sequence[Any]) -> BoardError:
    """Why a job was not claimed, from the answer of lua/board_claim.lua."""
    reason = answer[1]
    if reason == "gone":
        return NotFound(f"job {uuid} is not on board {board!r}")
    if reason == "trashed":
        return NotFound(f"job {uuid} is in the trash of board {board!r}")
    if reason == "held":
        return UnclaimableJob(f"job {uuid} is claimed by {answer[2]!r}", owner=str(answer[2]))
    return UnclaimableJob(f"job {uuid} is not due for {float(answer[2]) / 1000:.1f} s")


def end_refused(uuid: str, who: str, seen: str, how: End, answer: Sequence[Any]) -> BoardError:
    """Why a claim was not ended, from the answer of lua/board_end.lua; ``seen`` is the owner that the handle knows."""
    reason = answer[1]
    if reason in ("gone", "unclaimed"):
        return NotFound(f"job {uuid} is {'gone' if reason == 'gone' else 'claimed by nobody'}; cannot {how} it")
    if reason == "other" and seen != who:
        return JobFailure(f"job {uuid} is claimed by {answer[2]!r}, not by {who!r}; cannot {how} it")
    return ClaimLost(f"job {uuid} was claimed again since; cannot {how} it")


# Whether a Redis is fit to keep a jobboard.

OLDEST_REDIS = (6, 2)


def check_store(client: redis.Redis, board: str) -> None:
    """Raises JobFailure when Redis does not answer, is too old or evicts jobs; warns when it may evict entities."""
    try:
        client.ping()
        version = str(client.info("server").get("redis_version", "0.0"))
        policy = str(client.info("memory").get("maxmemory_policy", "noeviction"))
    except RedisError as error:
        raise JobFailure(f"board {board!r}: Redis does not answer: {error}") from error
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_REDIS:
        raise JobFailure(f"board {board!r}: Redis {version} is too old; 6.2 or newer is needed")
    if policy.startswith("allkeys"):
        raise JobFailure(
            f"board {board!r}: Redis may evict jobs and claims (maxmemory-policy {policy}); "
            "set maxmemory-policy to noeviction"
        )
    if policy != "noeviction":
        log.warning("board_may_lose_entities", policy=policy, cure="set maxmemory-policy to noeviction")


DEFAULT_CLAIM_SECONDS = 60.0
PAGE = 100
_LONGEST_LOOK_SECONDS = 1.0


class JobBoard:
    """A board in a namespace. ``claim_ttl`` is the life in seconds of claims made without an expiry of their own.

    ``persistence`` maps the uuid of a logbook to the logbook, or is a backend as TaskFlow's: an object whose
    ``get_connection()`` has ``get_logbook(uuid)`` and ``close()``. ``clustered`` gives all keys one hash tag, for Redis
    Cluster. The client stays the caller's; from one that does not decode responses another is made. Thread-safe.
    """

    def __init__(
        self,
        client: redis.Redis,
        namespace: str,
        *,
        name: str = "jobs",
        claim_ttl: float = DEFAULT_CLAIM_SECONDS,
        clustered: bool = False,
        persistence: Callable[[str], Any] | Backend | None = None,
    ) -> None:
        self.name = name
        self.persistence = persistence
        self._given = client
        client = self._client = decoding(client)
        self._keys = BoardKeys(namespace, name, clustered)
        self._scripts = BoardScripts(client, self._keys)
        self._claim_ttl = claim_ttl
        self._connected = False
        self.notifier = Notifier(self._reader)
        self._entities = Entities(client, self._keys)

    # Connection

    @property
    def connected(self) -> bool:
        return self._connected

    def connect(self) -> None:
        """Check that the store answers and is fit. Raises JobFailure."""
        check_store(self._client, self.name)
        self._connected = True

    def close(self) -> None:
        """End notifications. Every later call raises BoardClosed; claims stay until they end."""
        self._connected = False
        self.notifier.stop()
        if self._client is not self._given:
            self._client.close()

    def __enter__(self) -> JobBoard:
        self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        again returns that job. ``delay`` seconds pass before anybody gets it.

        Raises ValueError for a bad priority, JobFailure for details or a book that JSON cannot hold, or when nobody
        can read the job that has the key.
        """
        rank = JobPriority.convert(priority).rank
        try:
            payload = Payload(dict(details or {}), book).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise JobFailure(f"job {name!r} cannot be posted: {error}") from error
        uuid = str(uuids.uuid4())
        with self._answering():
            posted = self._scripts.post(uuid, name, key or "", payload, rank, delay_seconds=delay)
        return Job(self, posted)

    # Looking

    def find(self, uuid: str) -> Job | None:
        """The job of this id; None when it is gone. Raises JobFailure for one that nobody can read."""
        listing = self.listing(uuid)
        return None if listing is None else Job(self, listing)

    @property
    def job_count(self) -> int:
        """Jobs on the board, claimed ones included, trash not."""
        with self._answering():
            counts = self._scripts.counts()
        return counts.ready + counts.delayed + counts.claimed

    def iterjobs(self, only_unclaimed: bool = False, ensure_fresh: bool = False) -> JobIterator:
        """The jobs by priority, oldest first. ``only_unclaimed``: those that can be claimed now, each looked at again
        as the iterator reaches it. ``ensure_fresh``: each of the others is read again too.
        """
        self._check_open()
        return JobIterator(self, only_unclaimed=only_unclaimed, ensure_fresh=ensure_fresh)

    def page(self, which: Pages, after: str) -> list[Listing]:
        """A page of listings; see JobIterator."""
        with self._answering():
            return self._scripts.page(which, after, PAGE)

    def listing(self, uuid: str) -> Listing | None:
        """What the board says of a job now; None when it is gone."""
        with self._answering():
            return self._scripts.job(uuid)

    def wait(self, timeout: float | None = None) -> JobIterator:
        """Wait for a job that can be claimed; an iterator of those. Raises NotFound after ``timeout`` seconds."""

        def anything_ready() -> bool:
            return self._scripts.counts().ready > 0

        if not self._wait(anything_ready, timeout, longest=_LONGEST_LOOK_SECONDS):
            raise NotFound(f"no job to claim appeared on board {self.name!r} in {timeout:g} s")
        return self.iterjobs(only_unclaimed=True)

    def find_owner(self, job: Job) -> str | None:
        """Who has claimed the job; None when nobody has."""
        listing = self.listing(job.uuid)
        if listing is None or listing.fields.get("state") != "claimed":
            return None
        return listing.fields["owner"]

    def state_of(self, job: Job) -> JobState:
        """Where the job is now."""
        listing = self.listing(job.uuid)
        return JobState.COMPLETE if listing is None else STATES[listing.fields["state"]]

    def wait_for(self, job: Job, timeout: float | None, *, longest: float) -> bool:
        """Wait until a job is complete or trashed; see Job.wait."""
        done = (JobState.COMPLETE, JobState.TRASHED)
        return self._wait(lambda: self.state_of(job) in done, timeout, longest=longest)

    # Claims

    def claim(self, job: Job, who: str, expiry: float | None = None) -> Job:
        """Claim a job for ``expiry`` seconds: the board's claim_ttl by default, ``jobboard.NEVER`` for ever.

        Raises UnclaimableJob when somebody has it (the same owner too: its claim then lives ``expiry`` anew, if one was
        given) and when it is not due yet, NotFound when it is gone or in the trash, TypeError and ValueError.
        """
        check_owner(who)
        check_expiry(expiry)
        life = self._claim_ttl if expiry is None else expiry
        token = new_token()
        with self._answering():
            answer = self._scripts.claim(job.uuid, who, token, life=life, again=expiry)
        if answer[0]:
            job.fence, job.token, job.owner_seen = int(answer[1]), token, who
            return job
        raise claim_refused(self.name, job.uuid, answer)

    def claim_next(
        self,
        who: str,
        expiry: float | None = None,
        *,
        at_least: JobPriority = JobPriority.VERY_LOW,
        where: Callable[[Job], bool] | None = None,
    ) -> Job | None:
        """Claim the most urgent, oldest job that can be claimed, in one atomic step of O(log n); None without one.

        ``at_least`` leaves less urgent jobs. ``where`` picks by anything else: then jobs are looked at in turn.
        """
        check_owner(who)
        check_expiry(expiry)
        if where is not None:
            return self._claim_first(who, expiry, (job for job in self.iterjobs(only_unclaimed=True) if where(job)))
        life = self._claim_ttl if expiry is None else expiry
        while True:
            token = new_token()
            with self._answering():
                answer = self._scripts.next(who, token, life=life, highest=0, lowest=at_least.rank)
            if not answer[0]:
                return None
            _, uuid, _, _, name, details = answer
            try:
                Payload.decode(str(details))
            except UnreadableJob as error:
                self._quarantine(str(uuid), str(name), error)
                continue
            job = self.find(str(uuid))
            if job is not None and job.token == token:
                return job

    def _claim_first(self, who: str, expiry: float | None, jobs: Iterable[Job]) -> Job | None:
        for job in jobs:
            try:
                return self.claim(job, who, expiry)
            except (UnclaimableJob, NotFound):
                continue
        return None

    def extend_expiry(self, job: Job, expiry: float) -> bool:
        """See Job.extend_expiry."""
        check_expiry(expiry)
        with self._answering():
            answer = self._scripts.call("board_extend", job.uuid, job.owner_seen, job.fence, job.token, life_ms(expiry))
        if answer < 0:
            raise ClaimLost(f"job {job.uuid} was claimed by somebody since")
        return bool(answer)

    def extend(self, claims: Sequence[Job], *, ttl_seconds: float) -> list[Job]:
        """Prolong the claims of these handles; returns those still held. One round trip."""
        calls = [(job.uuid, job.owner_seen, job.fence, job.token, life_ms(ttl_seconds)) for job in claims]
        with self._answering():
            answers = self._scripts.call_each("board_extend", calls)
        return [job for job, held in zip(claims, answers, strict=True) if held == 1]

    def record(self, job: Job, who: str, result: Any) -> None:
        """Write a result on the job under the claim of this handle. Raises NotFound, JobFailure, ClaimLost."""
        check_owner(who)
        try:
            text = json.dumps(result, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise JobFailure(f"the result of job {job.uuid} cannot be written: {error}") from error
        with self._answering():
            answer = self._scripts.call("board_extend", job.uuid, who, job.fence, job.token, "", text)
        if answer == 0:
            raise NotFound(f"nobody has claimed job {job.uuid}")
        if answer < 0:
            raise ClaimLost(f"job {job.uuid} is no longer {who!r}'s under this claim")

    # Ends of claims

    def consume(self, job: Job, who: str) -> None:
        """The job is done and leaves the board.

        Raises NotFound when it is gone or nobody has it, JobFailure when somebody else has, ClaimLost when the owner
        of this name claimed it again since.
        """
        self._end(job, who, "consume")

    def abandon(self, job: Job, who: str) -> None:
        """Somebody else may have the job at once. Raises as consume."""
        self._end(job, who, "abandon")

    def trash(self, job: Job, who: str, reason: str = "") -> None:
        """Put the job aside, with why. Raises as consume."""
        self._end(job, who, "trash", error=reason)

    def _end(self, job: Job, who: str, how: End, *, error: str = "") -> None:
        check_owner(who)
        with self._answering():
            answer = self._scripts.end(job.uuid, who, job.fence, job.token, how, error=error)
        if not answer[0]:
            raise end_refused(job.uuid, who, job.owner_seen, how, answer)

    # The trash

    def trashed(self) -> Iterator[tuple[str, dict[str, str]]]:
        """What was put aside, oldest first: id and raw fields, because what lies there may be unreadable."""
        after = "-inf"
        while page := self.page("trash", after):
            yield from ((listing.uuid, listing.fields) for listing in page)
            after = page[-1].score

    def restore(self, uuid: str) -> Job:
        """Put a trashed job back on the board. Raises NotFound for one that is not in the trash."""
        self._update(uuid, "restore")
        job = self.find(uuid)
        if job is None:
            raise NotFound(f"job {uuid} is gone")
        return job

    def delete(self, uuid: str) -> None:
        """Delete a trashed job for good. Raises NotFound for one that is not in the trash."""
        self._update(uuid, "delete")

    def _update(self, uuid: str, how: Update) -> None:
        with self._answering():
            answer = self._scripts.update(uuid, how)
        if not answer[0]:
            raise NotFound(f"job {uuid} is not in the trash of board {self.name!r}")

    # Entities

    def register_entity(self, entity: Entity, *, ttl_seconds: float = 60.0) -> None:
        """Say that something (a conductor, say) works with this board, for ``ttl_seconds`` from now."""
        with self._answering():
            self._entities.register(entity, ttl_seconds=ttl_seconds)

    def entities(self) -> list[Entity]:
        """What is registered and has not run out."""
        with self._answering():
            return self._entities.all()

    # Inside

    def quarantine(self, listing: Listing, error: UnreadableJob) -> None:
        """Put a job aside that nobody can read, so that iteration and claiming go on."""
        self._quarantine(listing.uuid, listing.fields.get("name", "?"), error)

    def _quarantine(self, uuid: str, name: str, error: UnreadableJob) -> None:
        log.error("job_unreadable", board=self.name, job=uuid, name=name, error=str(error))
        with self._answering():
            self._scripts.update(uuid, "trash", f"unreadable: {error}", force=True)

    def _reader(self) -> EventReader:
        with self._answering():
            return EventReader(self._client, self._keys.of("events"))

    def _wait(self, done: Callable[[], bool], timeout: float | None, *, longest: float) -> bool:
        """Look, then look again at each event, when a job becomes due, and at least every ``longest`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._answering():
            reader = EventReader(self._client, self._keys.of("events"))
            while not done():
                due = self._scripts.counts().next_seconds
                pause = min(longest, _LONGEST_LOOK_SECONDS if due is None else max(0.001, due))
                if deadline is not None:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return False
                    pause = min(pause, left)
                reader.read(pause)
                self._check_open()
        return True

    def _check_open(self) -> None:
        if not self._connected:
            raise BoardClosed(f"board {self.name!r} is not connected")

    @contextmanager
    def _answering(self) -> Iterator[None]:
        self._check_open()
        try:
            yield
        except RedisError as error:
            raise JobFailure(f"board {self.name!r}: Redis does not answer: {error}") from error


# Opens a board by name and configuration, through the entry points ``opencue_sched.jobboards``.
#
# ``fetch("mine", {"board": "redis", "host": "redis", "namespace": "cue"})``, or the same as a URI:
# ``fetch("mine", "redis://redis:6379/0?namespace=cue&claim_ttl=30")``.

GROUP = "opencue_sched.jobboards"
_TEXTS = ("host", "password", "username", "unix_socket_path")
_TLS = ("ssl_keyfile", "ssl_certfile", "ssl_cert_reqs", "ssl_ca_certs")
_CLIENT = (*_TEXTS, *_TLS, "port", "db", "socket_timeout", "socket_connect_timeout", "ssl")
_OWN = ("board", "url", "namespace", "claim_ttl", "clustered")
_TRUE = ("1", "true", "yes", "on")


def fetch(name: str, conf: Mapping[str, Any] | str, namespace: str = GROUP, **kwargs: Any) -> Any:
    """The board ``name``. ``conf`` names the backend in ``board``, or is a URI whose scheme does; ``kwargs`` (such as
    ``client`` and ``persistence``) go to the backend. ``namespace`` is the group of entry points.

    Raises NotFound for a backend that is not installed, ValueError for a configuration that makes no sense.
    """
    settings = _from_uri(conf) if isinstance(conf, str) else dict(conf)
    kind = settings.get("board")
    if not kind:
        raise ValueError("the configuration of a board names its backend: {'board': 'redis', ...}")
    found = list(entry_points(group=namespace, name=str(kind)))
    if not found:
        known = sorted({entry.name for entry in entry_points(group=namespace)})
        raise NotFound(f"no board backend {kind!r} in {namespace}; there are: {', '.join(known) or 'none'}")
    return found[0].load()(name, settings, **kwargs)


def open_redis_board(
    name: str, conf: Mapping[str, Any], *, client: redis.Redis | None = None, **kwargs: Any
) -> JobBoard:
    """The entry point ``redis``."""
    unknown = set(conf) - {*_CLIENT, *_OWN}
    if unknown:
        raise ValueError(f"a redis board has no settings {', '.join(sorted(unknown))}")
    return JobBoard(
        client if client is not None else _client(conf),
        str(conf.get("namespace", "cue")),
        name=name,
        claim_ttl=float(conf.get("claim_ttl", DEFAULT_CLAIM_SECONDS)),
        clustered=_true(conf.get("clustered", False)),
        **kwargs,
    )


def _client(conf: Mapping[str, Any]) -> redis.Redis:
    """What a URL says of itself wins over the rest of ``conf``; whether by TLS, only its scheme says."""
    url = str(conf.get("url") or "")
    options: dict[str, Any] = {"decode_responses": True, "encoding_errors": UNDECODABLE}
    options["socket_timeout"] = float(conf.get("socket_timeout", 5.0))
    for option, convert in (("port", int), ("db", int), ("socket_connect_timeout", float)):
        if option in conf:
            options[option] = convert(conf[option])
    tls = url.startswith("rediss:") if url else _true(conf.get("ssl", False))
    options |= {name: conf[name] for name in (*_TEXTS, *(_TLS if tls else ())) if conf.get(name)}
    return redis.Redis.from_url(url, **options) if url else redis.Redis(ssl=tls, **options)


def _from_uri(uri: str) -> dict[str, Any]:
    parts = urlsplit(uri)
    if not parts.scheme:
        raise ValueError(f"{uri!r} is no board URI: it starts with the backend, as in redis://host:6379/0")
    conf: dict[str, Any] = dict(parse_qsl(parts.query))
    conf["board"] = "redis" if parts.scheme in ("redis", "rediss", "unix") else parts.scheme
    if conf["board"] == "redis" and (parts.netloc or parts.path):
        conf["url"] = uri.partition("?")[0]
    return conf


def _true(value: Any) -> bool:
    return value if isinstance(value, bool) else str(value).lower() in _TRUE
