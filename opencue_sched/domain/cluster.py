"""Clusters, the unit of dispatch work (distributed scheduler reference, "Cluster System"), and the shards of the farm's
hosts that passes over them use."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache


class ClusterKind(StrEnum):
    """The kind of a cluster's tags; the members' names are Cuebot's words for it (``host_tag.str_tag_type``)."""

    ALLOC = "alloc"
    MANUAL = "manual"
    HOSTNAME = "hostname"
    HARDWARE = "hardware"


@dataclass(frozen=True, slots=True, order=True)
class Cluster:
    """A show's work in one facility under one or more host tags. ``tags`` are normalised and sorted.

    ``shard`` names the hosts that a pass over it may use: those of one instance; "" means all.
    """

    facility_id: str
    show_id: str
    kind: ClusterKind
    tags: tuple[str, ...]
    alloc_id: str | None = None
    shard: str = ""

    @property
    def key(self) -> str:
        """A short stable name, safe in a queue message, a Redis key and a metric: ``kind-<16 hex digits>``, and
        ``@shard`` after that where there is one."""
        text = "\x1f".join((self.facility_id, self.show_id, self.kind.value, self.alloc_id or "", *self.tags))
        name = f"{self.kind.value}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        return f"{name}@{self.shard}" if self.shard else name


# Tags: how layers name the hosts they may run on.
#
# Layer tags are one text column, ``a|b`` or ``a | b`` (Cuebot writes the second). OpenCue's queries compare them with
# every space removed and split on the bar (so a name with spaces inside collapses: ``my tag`` is
# ``mytag``). Host tags come one a row of ``host_tag``.


def normalise_tag(tag: str) -> str:
    """One tag as the queries compare it: without spaces, wherever they are."""
    return tag.replace(" ", "")


def normalise_tags(text: str | None) -> frozenset[str]:
    """``layer.str_tags`` in any spelling of the separator, as a set. Empty and NULL give the empty set."""
    return frozenset(tag for tag in normalise_tag(text or "").split("|") if tag)


def join_tags(tags: Iterable[str]) -> str:
    """Tags for ``layer.str_tags``, as Cuebot joins them: its own host queries use the column as a regular expression
    that skips the spaces around the bar."""
    return " | ".join(tags)


# Shards: which instance plans which hosts, so that no two plan the same ones.
#
# Every host is in one of 256 buckets, by its id alone, and every bucket belongs to one of the instances among which the
# hosts are divided (*the division*), by rendezvous hashing: everybody who knows the division comes to the same answer,
# and when an instance comes or goes only its own hosts move. A shard is called after its instance. In a farm that is
# not divided the one shard is called "": all hosts, for any worker.

BUCKETS = 256
ALL_BUCKETS = frozenset(range(BUCKETS))
HOSTS_PER_SHARD = 64
"""A farm is divided among so many instances that each has at least so many hosts, and only among two or more. Where a
shard has few hosts, work waits for a large host of its own while that of the next shard idles, and each shard costs
passes of its own; one pass plans hundreds of hosts in milliseconds, so a small farm gains nothing from a second
planner."""

Division = tuple[str, ...]
"""The instances among which the hosts are divided, by name; () when they are not divided."""


def divide(instances: Collection[str], hosts: int) -> Division:
    """The division of so many hosts among live instances: the first by name, one for each HOSTS_PER_SHARD."""
    among = tuple(sorted(instances)[: hosts // HOSTS_PER_SHARD])
    return among if len(among) > 1 else ()


def bucket_of(host_id: str) -> int:
    """The bucket of a host: the first byte of the MD5 of its id, which PostgreSQL computes as well (store/hosts.py)."""
    return hashlib.md5(host_id.encode(), usedforsecurity=False).digest()[0]


def shard_of(host_id: str, division: Division) -> str:
    """The shard that a host belongs to."""
    return _owners(division)[bucket_of(host_id)] if division else ""


def shards(division: Division) -> Division:
    """The names of all shards."""
    return division or ("",)


@lru_cache(maxsize=64)
def buckets(shard: str, division: Division) -> frozenset[int]:
    """The buckets of a shard. Of a shard that is not in the division, those it would have if it were: its instance has
    just come or gone, and whoever works for it now must neither miss its hosts nor take all."""
    if not shard:
        return ALL_BUCKETS
    owners = _owners(division if shard in division else tuple(sorted({*division, shard})))
    return frozenset(bucket for bucket, owner in enumerate(owners) if owner == shard)


def rendezvous(key: str, instances: Sequence[str]) -> str | None:
    """The instance that everybody picks for ``key``; None without instances."""
    return max(
        instances, key=lambda it: hashlib.blake2b(f"{it}\x1f{key}".encode(), digest_size=8).digest(), default=None
    )


@lru_cache(maxsize=64)
def _owners(division: Division) -> Division:
    """The owner of each bucket."""
    return tuple(rendezvous(str(bucket), division) or "" for bucket in range(BUCKETS))


# What a periodic task acts under.


@dataclass(frozen=True, slots=True)
class Fence:
    """The fence of the leader that sent a periodic task, and the Redis key under which the newest one is recorded."""

    key: str
    number: int


class Verdict(StrEnum):
    """Why a layer did, or did not, get a host in a pass; docs/operator-guide.md says what each means. Every layer
    that is looked at ends with one; quarantined, behind and cooled down are frames that no pass looks at.

    Where several clusters judged one layer, the verdict that stands first here is shown (``most_telling``): that hosts
    of one tag are busy says more than that no host has the other. So the order counts.
    """

    FLOWING = "flowing"
    QUARANTINED = "quarantined"
    FAILED = "failed"
    OVER_LIMIT = "over_limit"
    OVER_JOB = "over_job"
    OVER_JOB_GPUS = "over_job_gpus"
    OVER_FOLDER = "over_folder"
    OVER_FOLDER_GPUS = "over_folder_gpus"
    OVER_SUBSCRIPTION = "over_subscription"
    DRAINING = "draining"
    HELD = "held"
    KEPT_FOR_GPUS = "kept_for_gpus"
    LAYER_SHARE = "layer_share"
    OVER_SHARE = "over_share"
    CAPACITY = "capacity"
    NO_FIT = "no_fit"
    NO_HOST = "no_host"
    BACKING_OFF = "backing_off"
    PERMIT_HELD = "permit_held"
    BEHIND = "behind"
    COOLED_DOWN = "cooled_down"


@dataclass(frozen=True, slots=True)
class LayerVerdict:
    """``detail`` is one sentence for an operator; ``frames`` is how many were placed, ``waiting`` how many were not."""

    job_id: str
    layer_id: str
    verdict: Verdict
    frames: int
    waiting: int
    detail: str = ""
