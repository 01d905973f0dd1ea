"""What the Redis user of a fleet must be allowed, and a check that asks a server which of these permissions it lacks.

docs/run.md lists the same permissions as the smallest ACL; a test runs a whole fleet with that ACL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from opencue_sched.accounting import keys
from opencue_sched.coordination.keys import control_exchange, everything_under
from opencue_sched.domain.redis_url import read_redis_url, without_secrets
from opencue_sched.errors import StoreUnusable
from opencue_sched.settings import Settings

if TYPE_CHECKING:
    import redis

_CALLS_TO_TRY = """
blpop K 1, brpop K 1, del K, eval return 0, evalsha 0 0, exec, exists K, expire K 1, get K, hdel K f,
hexists K f, hget K f, hgetall K, hincrby K f 1, hkeys K, hmget K f, hscan K 0, hset K f v, hsetnx K f v, incr K,
info server, lindex K 0, llen K, lpush K v, lrange K 0 0, lrem K 0 v, ltrim K 0 0, mget K, multi, pexpire K 1, ping,
psubscribe C, pttl K, publish C v, punsubscribe C, rpop K, rpush K v, sadd K v, scan 0, scard K, select 0, set K v,
sismember K v, smembers K, srem K v, time, type K, unlink K, unwatch, watch K, xadd K * f v, xrange K - +,
xread streams K 0, xrevrange K + -, zadd K 0 v, zcard K, zcount K 0 0, zinter 1 K, zrange K 0 0,
zrangebyscore K 0 0, zrem K v, zremrangebyscore K 0 0, zrevrange K 0 0, zrevrangebyscore K 0 0, zscore K v
"""
"""The commands of a fleet, each with as many arguments as a server wants before it looks at permissions. K stands for a
key and C for a channel; f, v and numbers are values without a meaning, because no command is carried out."""
_CALLS = [call.split() for call in _CALLS_TO_TRY.replace("\n", " ").split(",")]
"""The same calls, each as a list of words that begins with the name of the command."""

COMMANDS = tuple(call[0] for call in _CALLS)
"""The names of the commands that a fleet sends."""

_NEVER_QUEUED = ("exec", "watch", "unwatch", "multi")
"""The commands that are sent before the transaction that queues all others, in this order.

EXEC inside the transaction would carry it out, and WATCH and MULTI are refused inside a transaction. EXEC comes first,
because it does nothing before MULTI; UNWATCH comes after WATCH, and ends what that began; MULTI comes last, because it
opens the transaction."""
_BROKER_COMMANDS = ("psubscribe", "publish", "punsubscribe", "brpop", "watch", "unwatch", "rpop")
"""The commands that only Celery's transport sends."""
_RULES_NAMED = 8
"""How many missing rules an error names."""


@dataclass(frozen=True, slots=True)
class RedisAccess:
    """What a process does in Redis: commands, and patterns of the keys and channels it uses."""

    commands: tuple[str, ...]
    """Names of commands, in lower case."""
    keys: tuple[str, ...]
    """Patterns of keys."""
    channels: tuple[str, ...]
    """Channels, literally: a subscriber of a pattern needs that very pattern in its rules."""

    def rules(self) -> list[str]:
        """The rules for ACL SETUSER that grant this access."""
        return [
            *(f"+{command}" for command in self.commands),
            *(f"~{key}" for key in self.keys),
            *(f"&{channel}" for channel in self.channels),
        ]


def access_of(settings: Settings, *, broker: bool = True) -> RedisAccess:
    """What a process of a fleet with these settings does in Redis. ``broker`` is False for a process that sends and
    takes no messages of Celery's, such as a report service."""
    namespace = settings.coordination.namespace
    own_keys = (everything_under(namespace), keys.EVERYTHING, keys.HANDED_BACK)
    if not broker:
        return RedisAccess(tuple(name for name in COMMANDS if name not in _BROKER_COMMANDS), own_keys, ())
    control = control_exchange(namespace, settings.scheduler.facility)
    broker_keys = ("_kombu.binding*", "unacked*", "celeryev.*", f"*.{control}.pidbox*")
    legacy_keys = tuple(f"{queue}*" for queue in settings.coordination.legacy_queues)
    database = read_redis_url(settings.redis_dsn).database
    channels = (f"/{database}.{control}.pidbox", f"/{database}.celeryev/*")
    return RedisAccess(COMMANDS, own_keys + broker_keys + legacy_keys, channels)


def check_access(client: redis.Redis, settings: Settings, *, broker: bool = True) -> None:
    """Check that the Redis user of ``client`` may do all that a process of a fleet does (`access_of`).

    Raises StoreUnusable, with the ACL rules that the user lacks, and RedisError when Redis cannot be asked.
    """
    missing = _missing_rules(client, access_of(settings, broker=broker))
    if not missing:
        return
    user = read_redis_url(settings.redis_dsn).username or "default"
    more = f" and {len(missing) - _RULES_NAMED} more" if len(missing) > _RULES_NAMED else ""
    raise StoreUnusable(
        f"Redis at {without_secrets(settings.redis_dsn)} refuses what user {user} must be allowed: "
        f"{' '.join(missing[:_RULES_NAMED])}{more}; docs/run.md has them all, under A Redis user of its own"
    )


def _missing_rules(client: redis.Redis, access: RedisAccess) -> list[str]:
    """The rules whose lack makes Redis refuse a command, once each. No command changes anything: Redis looks at
    permissions as it queues the commands of a transaction, and this transaction is never executed."""
    calls = {call[0]: call for call in _CALLS if call[0] in access.commands}
    before = [_with_names(calls.pop(name), access) for name in _NEVER_QUEUED if name in calls]
    queued = [_with_names(call, access) for call in calls.values()]
    # A user may be allowed to read a key and not to write to it, or the reverse: GET reads, INCR writes.
    queued += [([command, key], f"~{key}") for key in access.keys for command in ("get", "incr")]
    queued += [(["psubscribe", channel], f"&{channel}") for channel in access.channels]
    connection: Any = client.connection_pool.get_connection()
    try:
        missing = _refused(connection, before)
        if "+multi" not in missing:  # without a transaction the commands would be carried out
            missing |= _refused(connection, queued)
        return list(missing)
    finally:
        connection.disconnect()  # ends the transaction
        client.connection_pool.release(connection)


def _refused(connection: Any, tried: list[tuple[list[str], str]]) -> dict[str, None]:
    """The rules that are missing for the commands of ``tried``, which are sent in one go. Each command comes with the
    rule that is missing if Redis refuses its key or channel. Raises ResponseError where MULTI fails otherwise.

    The rules are the keys of the answer, in the order of the commands; its values mean nothing.
    """
    from redis.exceptions import NoPermissionError, ResponseError

    connection.send_packed_command(connection.pack_commands([command for command, _ in tried]))
    missing: dict[str, None] = {}
    for command, rule in tried:
        try:
            connection.read_response()
        except ResponseError as error:
            # EXEC answers EXECABORT, with NOPERM further on in its text. Redis refuses a command with the words "has no
            # permissions to run the ... command", and a key or a channel with words among which is no "run".
            if isinstance(error, NoPermissionError) or "NOPERM" in str(error):
                missing[f"+{command[0]}" if " run " in str(error) else rule] = None
            elif command[0] == "multi":  # without a transaction the commands that follow would be carried out
                raise
            # Any other error is about the arguments, which make no sense here: the command itself is allowed.
    return missing


def _with_names(call: list[str], access: RedisAccess) -> tuple[list[str], str]:
    """A command with the first key or channel for its K or C, and the rule that is missing if Redis refuses that key or
    channel."""
    if "C" in call:
        return [access.channels[0] if word == "C" else word for word in call], f"&{access.channels[0]}"
    return [access.keys[0] if word == "K" else word for word in call], f"~{access.keys[0]}"
