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
_listeners: list[Callable[[], None]] = []


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """``at`` is seconds since the epoch; ``queue`` the list it was taken from; ``body`` what was found, cut to 10,000
    characters.
    """

    at: float
    queue: str
    reason: str
    body: str


def count_with(listener: Callable[[], None]) -> None:
    """Call ``listener`` for each message that this process buries from now on, whoever found it."""
    _listeners.append(listener)


def readable(value: object) -> str:
    """What was found, as text that loses nothing: bytes and characters that are no text as escapes."""
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return str(value).encode(errors="backslashreplace").decode()


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
    for listener in _listeners:
        listener()
    log.error("message_unreadable", queue=queue, reason=reason, body=body[:200])


def read_dead_letters(client: redis.Redis, namespace: str, count: int = 50) -> list[DeadLetter]:
    """The newest dead letters, the newest first."""
    return [_letter(str(text)) for text in client.lrange(dead_letters(namespace), 0, count - 1)]


def purge_dead_letters(client: redis.Redis, namespace: str) -> int:
    """Delete all dead letters; how many there were."""
    key = dead_letters(namespace)
    with client.pipeline(transaction=True) as pipe:
        pipe.llen(key)
        pipe.delete(key)
        count, _ = pipe.execute()
    return int(count)


def _letter(text: str) -> DeadLetter:
    """A letter from its record. What is none, or another version's, is shown as it is."""
    try:
        data = json.loads(text)
        return DeadLetter(float(data["at"]), str(data["queue"]), str(data["reason"]), str(data["body"]))
    except (ValueError, TypeError, KeyError) as error:
        return DeadLetter(0.0, "", f"not a dead letter of ours: {type(error).__name__}: {error}", text)
