"""The Redis client of a process: time-outs, pool, TLS and auth by URL, Sentinel, and the guard on the epoch.

What a URL may say is in domain/redis_url.py.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any, Literal, cast

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.connection import AbstractConnection, Connection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MasterDownError, OutOfMemoryError, ReadOnlyError, ResponseError
from redis.retry import Retry
from redis.sentinel import Sentinel

from opencue_sched.accounting import keys
from opencue_sched.domain.redis_url import UNDECODABLE, read_redis_url
from opencue_sched.settings import Settings

# The generation of the store: set by the bootstrap, passed to every script, and tied to one Redis process.
#
# ``acct:epoch`` holds ``open|{generation}|{run id}``, or ``filling|{token}|{run id}`` while a bootstrap is at work. The
# run id is the server's own (see guard_epoch). ``|dual`` behind either says that another program publishes plain
# decrements (release_feed cuebot-redis): what the ledger accounts for is kept apart.
#
# It is read by MGET, here and in the scripts, which says nothing of a key of another type where GET raises an error:
# such an epoch is none, and whoever fills the store writes over it.

_DUAL = "|dual"


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch as it stands in the store."""

    text: str

    @property
    def run_id(self) -> str:
        """The Redis process it belongs to; empty for text that is no epoch."""
        return "".join(self.text.split("|")[2:3])

    @property
    def dual(self) -> bool:
        return self.text.endswith(_DUAL)

    @classmethod
    def new(cls, run_id: str, *, dual: bool = False, state: Literal["open", "filling"] = "open") -> Epoch:
        """An epoch that no store ever had before (a counter would restart from 1 in an emptied Redis). ``filling`` is
        of a store under bootstrap: only who has this value may write, and nobody may book."""
        return cls(f"{state}|{uuid.uuid4().hex}|{run_id}{_DUAL if dual else ''}")

    @classmethod
    def parse(cls, text: str | None) -> Epoch | None:
        """An open epoch; None for an absent one, or a store that is still being filled."""
        return cls(text) if text and text.startswith("open|") and cls(text).run_id else None


REDIS_SECONDS = 5.0
"""Connect and read time-out of a try: two and a pause are over before a leader's lease of 15 s is."""
_RETRIES = 1
_NO_WRITE_ERRORS = (ReadOnlyError, MasterDownError, OutOfMemoryError)
_NO_WRITE_WORDS = ("READONLY", "MASTERDOWN", "MISCONF", "NOREPLICAS", "BUSY Redis", "OOM command not allowed")
_DROP_FOREIGN_EPOCH = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


def make_redis(url: str, settings: Settings) -> redis.Redis:
    """A thread-safe client with ``decode_responses``. Raises InvalidInput.

    Every call ends within REDIS_SECONDS a try, and is tried twice: the scripts are idempotent, so a
    pipeline that is sent again after a lost answer books nothing twice. Connections are made on first use, and anew to
    wherever the URL leads when their server has become a replica. Idle ones get no health check: redis-py would make it
    from within ``guard_epoch``, without end on a Redis that hangs.
    """
    options: dict[str, Any] = {
        "decode_responses": True,
        "encoding_errors": UNDECODABLE,
        "socket_timeout": REDIS_SECONDS,
        "socket_connect_timeout": REDIS_SECONDS,
        "socket_keepalive": True,
        "max_connections": settings.accounting.redis_pool_size,
        "retry": Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), _RETRIES),
        "redis_connect_func": guard_epoch,
    }
    named = read_redis_url(url)
    if named.scheme == "sentinel":
        asking = {name: options[name] for name in ("socket_timeout", "socket_connect_timeout")} | named.asking
        sentinel = Sentinel(named.nodes, sentinel_kwargs=asking)  # type: ignore[no-untyped-call]
        return cast("redis.Redis", sentinel.master_for(named.service, **options, **named.master))  # type: ignore[no-untyped-call]
    if named.scheme == "unix":
        del options["socket_keepalive"]  # such a connection takes no option of TCP, and raises TypeError for one
    pool = redis.BlockingConnectionPool.from_url(url, timeout=REDIS_SECONDS, **options)
    pool.connection_class = leaving_replicas(pool.connection_class)
    return redis.Redis.from_pool(pool)


def leaving_replicas(kind: type[AbstractConnection]) -> type[AbstractConnection]:
    """Connections that end when their server turns out to be a replica, as those of a Sentinel's master do.

    Behind a name or an address that moves, the server that takes writes is at the end of a new connection only.
    """

    class LeavingReplicas(kind):  # type: ignore[valid-type, misc]
        guarded = False

        def read_response(self, *args: Any, **how: Any) -> Any:
            try:
                return super().read_response(*args, **how)
            except ResponseError as error:
                if not self.guarded or not (isinstance(error, ReadOnlyError) or "READONLY" in str(error)):
                    raise
                self.disconnect()
                raise RedisConnectionError("READONLY: this Redis has become a replica") from error

    return LeavingReplicas


def guard_epoch(connection: Connection) -> None:
    """Set up a new connection, and delete an epoch that belongs to another Redis process.

    A restarted or failed-over Redis may hold an epoch (and counters of some moments ago) from the process before it.
    Nobody can book there without having connected first, so the first connection closes the store for all. A replica
    may be connected to: it is read by people.
    """
    connection.guarded = False  # type: ignore[attr-defined]
    connection.on_connect()  # type: ignore[no-untyped-call]
    info = _ask(connection, "INFO", "server")
    (stored,) = _ask(connection, "MGET", keys.EPOCH)
    if stored and f"run_id:{Epoch(stored).run_id}\r\n" not in info:
        try:
            _ask(connection, "EVAL", _DROP_FOREIGN_EPOCH, "1", keys.EPOCH, stored)
        except ResponseError as error:
            if not takes_no_write(error):
                raise
    connection.guarded = True  # type: ignore[attr-defined]


def takes_no_write(error: ResponseError) -> bool:
    """Whether Redis answers, but takes no write: a replica, one that lost its master or its replicas, one
    that is held up by a script, a full disk, full memory.

    Up to Redis 6.2 an error inside a script is told by its text only; from 7 on, and in Valkey, it has a class of its
    own, and redis-py cuts the word from its text.
    """
    return isinstance(error, _NO_WRITE_ERRORS) or any(word in str(error) for word in _NO_WRITE_WORDS)


def _ask(connection: Connection, *command: str) -> Any:
    connection.send_command(*command)  # type: ignore[no-untyped-call]
    return connection.read_response()


def look_at_store(client: redis.Redis) -> tuple[bool, float | None]:
    """Whether the store is open, and seconds since the mark of the last whole recompute, or the filling; None when
    there was none. One round trip. Raises RedisError."""
    with client.pipeline(transaction=False) as pipe:
        pipe.mget(keys.EPOCH, keys.RECOMPUTED_AT)
        pipe.time()
        (stored, recomputed_at), (seconds, _) = pipe.execute()
    age = None if recomputed_at is None else max(0.0, float(seconds) - float(recomputed_at))
    return Epoch.parse(stored) is not None, age
