"""Damage to the keys that everything is counted by: another type, or a number that cannot be used.

A store with such a key is lost, as an emptied one is: a process that meets the damage closes it, and a bootstrap drops
what is there and fills it from PostgreSQL (accounting.bootstrap).
"""

from __future__ import annotations

import re
from typing import cast

import redis
import structlog

from opencue_sched.accounting import keys
from opencue_sched.accounting.epoch import DROP_EPOCH, Epoch
from opencue_sched.clock import boot_id
from opencue_sched.errors import StoreDamaged

log = structlog.get_logger(__name__)

_USABLE_SEQ = re.compile("[0-9]{1,15}")
"""A sequence number that the ledger's records can have (lua/includes/seq.lua); a longer one fits into none."""
_SHOWN_CHARACTERS = 40
"""How many characters of a damaged value are shown."""


def find_damage(client: redis.Redis) -> str | None:
    """What makes the store unusable, in words; None if nothing does. Raises RedisError."""
    return _look(client)[0]


def close_if_damaged(client: redis.Redis) -> str | None:
    """Close a damaged store, and return what is wrong. Nothing is booked in a closed store, and the process that fills
    it next does so from PostgreSQL. Raises RedisError."""
    damage, stored = _look(client)
    # A store that is being filled is left to its filler, who drops all keys.
    if damage is not None and (epoch := Epoch.parse(stored)) is not None:
        close_store(client, epoch, damage)
    return damage


def raise_if_damaged(client: redis.Redis) -> None:
    """Raise StoreDamaged once a damaged store is closed. Raises RedisError as well."""
    if damage := close_if_damaged(client):
        raise StoreDamaged(damage)


def close_store(client: redis.Redis, epoch: Epoch, damage: str) -> None:
    """Close the store unless it has another epoch by now: then a process has filled it since the damage was seen."""
    log.error("store_damaged", damage=damage)
    client.eval(DROP_EPOCH, 1, keys.EPOCH, epoch.text)


def _look(client: redis.Redis) -> tuple[str | None, str | None]:
    """The damage, and the epoch at that moment."""
    now = int(client.time()[0])
    types = {keys.SEQ: "string", keys.LEDGER: "hash", keys.IMPORTED: "hash", keys.MARKS_PREFIX + boot_id(): "zset"}
    types |= dict.fromkeys(keys.tombstones(now), "set")
    with client.pipeline(transaction=False) as pipe:
        pipe.mget(keys.EPOCH, keys.SEQ)
        for key in types:
            pipe.type(key)
        (stored, seq), *found = pipe.execute()
    for (key, right_type), type_ in zip(types.items(), found, strict=True):
        if type_ not in (right_type, "none"):
            return f"{key} is a {type_}, and must be a {right_type}", stored
    if seq is not None and not _USABLE_SEQ.fullmatch(cast("str", seq)):
        return f"{keys.SEQ} is {seq[:_SHOWN_CHARACTERS]!r}, which cannot be counted on from", stored
    return None, stored
