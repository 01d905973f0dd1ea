"""Shards: which instance plans which hosts, so that no two plan the same ones.

Every host is in one of 256 buckets, by its id alone. Every bucket belongs to one of the instances among which the hosts
are divided (*the division*), by rendezvous hashing: everybody who knows the division comes to the same answer, and
when an instance comes or goes only its own hosts move. A shard is called after its instance. In a farm that is not
divided the one shard is called "": all hosts, for any worker.

The buckets and both hashes are fixed: PostgreSQL computes buckets, too, and workers of two versions divide one farm.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from functools import lru_cache

BUCKETS = 256
"""One for each value of a byte."""
ALL_BUCKETS = frozenset(range(BUCKETS))
HOSTS_PER_SHARD = 64
"""The fewest hosts that a shard has on average. A farm is divided among as many instances as this allows; a farm with
too few hosts for two of them is not divided. In a shard of few hosts work waits for a large host, while one of the next
shard idles, and each shard costs passes of its own. One pass plans hundreds of hosts in milliseconds, so a small farm
gains nothing from a second planner."""
_BUCKETS_KEPT = 10_000
"""The number of ids whose buckets are remembered: plans ask again and again for those of the first frames of layers,
and of the hosts that come free."""
Division = tuple[str, ...]
"""The instances among which the hosts are divided, by name; () when they are not divided."""


def divide(instances: Collection[str], hosts: int) -> Division:
    """The division of ``hosts`` hosts among live instances. There is room for one for every HOSTS_PER_SHARD hosts;
    where more are alive, those whose names come first have the shards."""
    among = tuple(sorted(instances)[: hosts // HOSTS_PER_SHARD])
    return among if len(among) > 1 else ()


def hosts_divided(instances: int) -> int:
    """How many hosts are enough for each of ``instances`` instances to have a shard."""
    return instances * HOSTS_PER_SHARD


@lru_cache(maxsize=_BUCKETS_KEPT)
def bucket_of(row_id: str) -> int:
    """The bucket of a host, job or frame: the first byte of the MD5 of its id, which PostgreSQL computes as well
    (store/hosts.py, store/backlog.py)."""
    return hashlib.md5(row_id.encode(), usedforsecurity=False).digest()[0]


def shard_of(host_id: str, division: Division) -> str:
    """The shard that a host belongs to."""
    return _owners(division)[bucket_of(host_id)] if division else ""


def shards(division: Division) -> tuple[str, ...]:
    """The names of all shards: of the instances of the division, or "" alone."""
    return division or ("",)


def place_of(shard: str, division: Division) -> float:
    """The position of a shard in its division, from 0 to below 1; 0 for one that is not in it.

    Shards begin the turns of drawn jobs at different places by this (placement/policies/order.py).
    """
    return division.index(shard) / len(division) if shard in division else 0.0


@lru_cache(maxsize=64)
def buckets(shard: str, division: Division) -> frozenset[int]:
    """The buckets of a shard.

    A shard that is not in the division has the buckets it would have if it were. Its instance has just come or gone,
    and a worker that has a message about it must neither find no hosts there nor take all.
    """
    if not shard:
        return ALL_BUCKETS
    owners = _owners(division if shard in division else tuple(sorted({*division, shard})))
    return frozenset(bucket for bucket, owner in enumerate(owners) if owner == shard)


def rendezvous(key: str, instances: Sequence[str]) -> str | None:
    """The instance that everybody picks for ``key``; None without instances."""

    def weight(instance: str) -> bytes:
        return hashlib.blake2b(f"{instance}\x1f{key}".encode(), digest_size=8).digest()

    return max(instances, key=weight, default=None)


@lru_cache(maxsize=64)
def _owners(division: Division) -> tuple[str, ...]:
    """The instance that owns each bucket, by the bucket's number."""
    return tuple(rendezvous(str(bucket), division) or "" for bucket in range(BUCKETS))
