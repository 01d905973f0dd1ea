"""Work that one process of the fleet does at a time.

A turn ends by itself, should its process die, and is given back as soon as it is done. It spares doing the same side by
side; correctness must not depend on it, for one that outlives its turn goes on beside the next.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import redis
import structlog
from redis.exceptions import RedisError

from opencue_sched.coordination.names import turn_key
from opencue_sched.lua_scripts import call_script

log = structlog.get_logger(__name__)


@contextmanager
def turn(client: redis.Redis, namespace: str, work: str, *, seconds: float) -> Iterator[bool]:
    """Whether it is this caller's turn, for as long as the block takes and at most ``seconds``. Raises RedisError if
    that cannot be asked."""
    keys, token = [turn_key(namespace, work)], uuid.uuid4().hex
    mine = bool(call_script(client, "turn_take", keys, [token, round(1000 * seconds)]))
    try:
        yield mine
    finally:
        if mine:
            _give_back(client, work, keys, token)


def _give_back(client: redis.Redis, work: str, keys: list[str], token: str) -> None:
    """The work is done: that its turn could not be given back is no failure of it."""
    try:
        call_script(client, "token_drop", keys, [token])
    except RedisError as error:
        log.warning("turn_not_given_back", work=work, error=str(error))
