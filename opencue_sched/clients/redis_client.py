"""The Redis client of a process: time-outs, pool, TLS and auth by URL, Sentinel, and whether a Redis will do.

What a URL may say is in domain/redis_url.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, ResponseError
from redis.retry import Retry
from redis.sentinel import Sentinel

from opencue_sched.domain.redis_url import UNDECODABLE, read_redis_url
from opencue_sched.settings import Settings

REDIS_SECONDS = 5.0
"""Connect and read time-out of a try: two and a pause are over before a leader's lease of 15 s is."""
_RETRIES = 1
"""How often a command is tried again after its connection failed: once is enough for a connection that a restarted or
failed-over Redis has closed. With more, a command to a Redis that is away takes longer than a leader's lease lives."""


def make_redis(url: str, settings: Settings, guard: Callable[[Connection], None]) -> redis.Redis:
    """A thread-safe client with ``decode_responses``, each of whose new connections is set up by ``guard``. Raises
    InvalidInput.

    Every call ends within REDIS_SECONDS a try, and is tried twice: the scripts are idempotent, so a
    pipeline that is sent again after a lost answer books nothing twice. Connections are made on first use, and anew to
    wherever the URL leads when their server has become a replica. Idle ones get no health check: redis-py would make it
    from within ``guard``, without end on a Redis that hangs.
    """
    options: dict[str, Any] = {
        "decode_responses": True,
        "encoding_errors": UNDECODABLE,
        "socket_timeout": REDIS_SECONDS,
        "socket_connect_timeout": REDIS_SECONDS,
        "socket_keepalive": True,
        "max_connections": settings.accounting.redis_pool_size,
        "retry": Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), _RETRIES),
        "redis_connect_func": guard,
    }
    named = read_redis_url(url)
    if named.scheme == "sentinel":
        time_outs = {name: options[name] for name in ("socket_timeout", "socket_connect_timeout")}
        options |= named.options | {"ssl": named.tls is not None}
        return master_of(named.nodes, named.service, time_outs | named.sentinel_options, options)
    kind: type[Any] = SSLConnection if named.tls else Connection
    place: dict[str, Any] = {"host": named.host, "port": named.port}
    if named.scheme == "unix":
        kind, place = UnixDomainSocketConnection, {"path": named.path}
        del options["socket_keepalive"]  # such a connection takes no option of TCP, and raises TypeError for one
    options |= named.options | place
    pool = redis.BlockingConnectionPool(connection_class=leaving_replicas(kind), timeout=REDIS_SECONDS, **options)  # type: ignore[no-untyped-call]
    return redis.Redis.from_pool(pool)


class UnverifiedCertificate(RedisConnectionError):
    """The certificate of a Sentinel cannot be verified. redis-py keeps of a Sentinel's error the name of its class."""


def master_of(
    sentinels: Sequence[tuple[str, int]],
    service: str,
    sentinel_options: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> redis.Redis:
    """A client of the master that Sentinels name. ``sentinel_options`` are for the connections to the Sentinels; None:
    the same ``options`` as for the master."""
    watched = Sentinel(sentinels, sentinel_kwargs=sentinel_options, **options)  # type: ignore[no-untyped-call]
    for sentinel in watched.sentinels:
        sentinel.sentinel_masters = _naming_certificates(sentinel.sentinel_masters)  # type: ignore[method-assign]
    return cast("redis.Redis", watched.master_for(service))  # type: ignore[no-untyped-call]


def _naming_certificates(call: Callable[[], Any]) -> Callable[[], Any]:
    """A call of a Sentinel that raises UnverifiedCertificate where the certificate cannot be verified."""

    def named() -> Any:
        try:
            return call()
        except RedisConnectionError as error:
            if "certificate verify failed" in str(error):
                raise UnverifiedCertificate(str(error)) from error
            raise

    return named


def leaving_replicas(kind: type[AbstractConnection]) -> type[AbstractConnection]:
    """Connections that end when their server turns out to be a replica, as those of a Sentinel's master do.

    Behind a name or an address that moves, the server that takes writes is at the end of a new connection only.
    """

    class LeavingReplicas(kind):  # type: ignore[valid-type, misc]
        guarded = False
        """Whether the guard has set this connection up. Set by the guard (accounting.epoch), in the thread that
        connects.
        """

        def read_response(self, *args: Any, **how: Any) -> Any:
            try:
                return super().read_response(*args, **how)
            except ResponseError as error:
                if not self.guarded or not (isinstance(error, ReadOnlyError) or "READONLY" in str(error)):
                    raise
                self.disconnect()
                raise RedisConnectionError("READONLY: this Redis has become a replica") from error

    return LeavingReplicas


_OLDEST_REDIS = (6, 2)
"""The oldest version of Redis that serves."""


def why_unfit(client: redis.Redis) -> str:
    """Why this Redis may not keep counters, claims and messages: it is too old, or would lose them without a sound.
    Empty where it may. Raises RedisError."""
    version = str(client.info("server").get("redis_version", "0.0"))
    policy = str(client.info("memory").get("maxmemory_policy", "noeviction"))
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_REDIS:
        return f"is {version}; 6.2 or newer (or Valkey) is needed"
    unsafe = f"may evict keys (maxmemory-policy {policy}); set maxmemory-policy to noeviction"
    return "" if policy == "noeviction" else unsafe
