"""Messages that nobody can read: put aside for people to look at, instead of killing a worker or vanishing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import redis
import structlog

from opencue_sched.coordination.names import dead_letters

log = structlog.get_logger(__name__)

KEPT = 1000
_BODY_CHARACTERS = 10_000


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """``at`` is seconds since the epoch; ``body`` the message as it was found, cut to 10,000 characters."""

    at: float
    queue: str
    reason: str
    body: str


def bury(
    client: redis.Redis, namespace: str, *, queue: str, reason: str, body: str, clock: Callable[[], float] = time.time
) -> None:
    """Put a message on the dead-letter list, which keeps the newest 1,000."""
    letter = DeadLetter(round(clock(), 3), queue, reason, body[:_BODY_CHARACTERS])
    key = dead_letters(namespace)
    with client.pipeline(transaction=True) as pipe:
        pipe.lpush(key, json.dumps(asdict(letter)))
        pipe.ltrim(key, 0, KEPT - 1)
        pipe.execute()
    log.error("message_unreadable", queue=queue, reason=reason, body=body[:200])


def read_dead_letters(client: redis.Redis, namespace: str, count: int = 50) -> list[DeadLetter]:
    """The newest dead letters."""
    return [DeadLetter(**json.loads(text)) for text in client.lrange(dead_letters(namespace), 0, count - 1)]
