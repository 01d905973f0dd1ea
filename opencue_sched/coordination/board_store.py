"""Whether a Redis is fit to keep a jobboard."""

from __future__ import annotations

import redis
import structlog
from redis.exceptions import RedisError

from opencue_sched.coordination.board_errors import JobFailure

log = structlog.get_logger(__name__)

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
