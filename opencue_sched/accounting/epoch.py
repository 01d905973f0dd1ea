"""The epoch of the store: set by the bootstrap, passed to every script, and tied to one Redis process.

``acct:epoch`` holds ``open|{generation}|{run id}``, or ``filling|{token}|{run id}`` while a bootstrap is at work. The
run id is the server's own (see guard_epoch). ``|dual`` behind either says that another program publishes plain
decrements (release_feed cuebot-redis): what the ledger accounts for is kept apart.

The key is read by MGET, here and in the scripts: where another program made it a key of another type, MGET finds
nothing and GET would raise an error. Such an epoch is none, and the process that fills the store writes over it.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any, Literal

import redis
from redis.connection import Connection
from redis.exceptions import NoPermissionError, ResponseError

from opencue_sched.accounting import keys
from opencue_sched.clients.redis_client import make_redis
from opencue_sched.clients.store_errors import takes_no_write
from opencue_sched.errors import StoreUnusable
from opencue_sched.settings import Settings

_DUAL = "|dual"
"""How the text of an epoch ends whose store counts in a Cuebot's keys as well."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch as it stands in the store."""

    text: str

    @property
    def run_id(self) -> str:
        """The Redis process whose counters the epoch names; empty for text that is no epoch."""
        return "".join(self.text.split("|")[2:3])

    @property
    def dual(self) -> bool:
        """Whether the store counts in a Cuebot's keys as well, which publishes plain decrements."""
        return self.text.endswith(_DUAL)

    @classmethod
    def new(cls, run_id: str, *, dual: bool = False, state: Literal["open", "filling"] = "open") -> Epoch:
        """An epoch that no store ever had before (a counter would restart from 1 in an emptied Redis). ``filling`` is
        the state of a store under bootstrap: only the process that knows this epoch writes, and nothing is booked."""
        return cls(f"{state}|{uuid.uuid4().hex}|{run_id}{_DUAL if dual else ''}")

    @classmethod
    def parse(cls, text: str | None) -> Epoch | None:
        """An open epoch; None for an absent one, or a store that is still being filled."""
        return cls(text) if text and text.startswith("open|") and cls(text).run_id else None


DROP_EPOCH = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"
"""A script that deletes the epoch if it is still the one given."""


def guarded_redis(url: str, settings: Settings) -> redis.Redis:
    """The Redis client of a process, whose connections are guarded. Raises InvalidInput.

    Nothing else in the product makes a client: one without the guard could book on a Redis that failed over.
    """
    return make_redis(url, settings, guard_epoch)


def guard_epoch(connection: Connection) -> None:
    """Set up a new connection, and delete an epoch that belongs to another Redis process.

    A restarted or failed-over Redis may hold an epoch (and counters of some moments ago) from the process before it.
    Nobody can book there without having connected first, so the first connection closes the store for all. A replica
    may be connected to: it is read by people. A node of a Redis Cluster may not: StoreUnusable is raised.
    """
    connection.guarded = False  # type: ignore[attr-defined]
    info = _introduced(connection)
    (stored,) = _ask(connection, "MGET", keys.EPOCH)
    if stored and f"run_id:{Epoch(stored).run_id}\r\n" not in info:
        try:
            _ask(connection, "EVAL", DROP_EPOCH, "1", keys.EPOCH, stored)
        except ResponseError as error:
            if not takes_no_write(error):
                raise
    connection.guarded = True  # type: ignore[attr-defined]


def _introduced(connection: Connection) -> str:
    """Log in, choose the database, and return what the server says of itself. Raises StoreUnusable for a cluster."""
    refused: ResponseError | None = None
    try:
        connection.on_connect()  # type: ignore[no-untyped-call]
    except ResponseError as error:
        refused = error  # a cluster has no database but 0; what it is says more than that
    info = str(_ask(connection, "INFO", "server"))
    if "redis_mode:cluster" in info:
        connection.disconnect()  # type: ignore[no-untyped-call] # redis-py would keep it for the next call
        raise StoreUnusable(
            f"Redis {_place(connection)} runs in cluster mode, in which counters cannot change together; name a single "
            "Redis, or Sentinels, in OPENCUE_SCHED_REDIS_URL"
        )
    if refused is not None:
        raise refused
    return info


def _place(connection: Connection) -> str:
    """The address that a connection leads to, for people."""
    place = dict(connection.repr_pieces())  # type: ignore[no-untyped-call]
    return f"at {place.get('path') or '{host}:{port}'.format_map(place)}"


def _ask(connection: Connection, *command: str) -> Any:
    """The answer to one command on a connection that is being set up."""
    connection.send_command(*command)  # type: ignore[no-untyped-call]
    try:
        return connection.read_response()
    except NoPermissionError as error:  # of a key Redis does not say which
        raise NoPermissionError(f"{error}: {' '.join(command[:2])}") from error


def look_at_store(client: redis.Redis) -> tuple[bool, float | None]:
    """Whether the store is open, and seconds since the mark of the last whole recompute, or the filling; None when
    there was none, or when the key holds no time. One round trip. Raises RedisError."""
    with client.pipeline(transaction=False) as pipe:
        pipe.mget(keys.EPOCH, keys.RECOMPUTED_AT)
        pipe.time()
        (stored, recomputed_at), (seconds, _) = pipe.execute()
    known = recomputed_at is not None and recomputed_at.isdecimal()
    age = max(0.0, float(seconds) - float(recomputed_at)) if known else None
    return Epoch.parse(stored) is not None, age
