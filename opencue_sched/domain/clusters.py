"""Clusters, the unit of dispatch work (docs/references.md)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from string import ascii_lowercase, ascii_uppercase


class ClusterKind(StrEnum):
    """The kind of a cluster's tags; the members' names are Cuebot's words for it (``host_tag.str_tag_type``)."""

    ALLOC = "alloc"
    MANUAL = "manual"
    HOSTNAME = "hostname"
    HARDWARE = "hardware"


@dataclass(frozen=True, slots=True, order=True)
class Cluster:
    """A show's work in one facility under one or more host tags."""

    facility_id: str
    show_id: str
    kind: ClusterKind
    tags: tuple[str, ...]
    """Normalised and sorted."""
    alloc_id: str | None = None
    shard: str = ""
    """Names the hosts that a pass over the cluster may use: those of one instance; "" means all."""

    @property
    def key(self) -> str:
        """A short stable name, safe in a queue message, a Redis key and a metric: ``kind-<16 hex digits>``, and
        ``@shard`` after that where there is one."""
        text = "\x1f".join((self.facility_id, self.show_id, self.kind.value, self.alloc_id or "", *self.tags))
        name = f"{self.kind.value}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        return f"{name}@{self.shard}" if self.shard else name


def without_shard(key: str) -> str:
    """The key of a cluster without the name of a shard: the postings of all its shards have it in common."""
    return key.partition("@")[0]


def as_in_this_release(cluster: Cluster) -> Cluster:
    """A cluster that another release may have made, with its tags normalised as in this one: an earlier release kept
    the spelling of hosts and layers."""
    return replace(cluster, tags=tuple(sorted(set(map(normalise_tag, cluster.tags)))))


# Tags: how layers name the hosts they may run on.
#
# Layer tags are one text column, ``a|b`` or ``a | b`` (Cuebot writes the second). OpenCue compares them without case,
# with every space removed, and split on the bar (so a name with spaces inside collapses: ``My tag`` is ``mytag``). Host
# tags come one a row of ``host_tag``. store/tags.py compares them in statements, just so.

_LOWER_CASE = str.maketrans(ascii_uppercase, ascii_lowercase)


def normalise_tag(tag: str) -> str:
    """One tag in the form in which tags are compared: without spaces, wherever they are, and the letters A to Z in
    lower case."""
    return tag.replace(" ", "").translate(_LOWER_CASE)


def normalise_tags(text: str | None) -> frozenset[str]:
    """The set of tags in ``layer.str_tags``, in the form in which tags are compared. An empty text and None have
    none."""
    return frozenset(tag for tag in normalise_tag(text or "").split("|") if tag)


def spelled_tags(text: str | None) -> dict[str, str]:
    """The tags in ``layer.str_tags``, in the form in which tags are compared, each with its spelling there, for
    people."""
    return {normalise_tag(tag): tag.strip() for tag in (text or "").split("|") if tag.strip()}


def join_tags(tags: Iterable[str]) -> str:
    """Tags for ``layer.str_tags``, as Cuebot joins them: its own host queries use the column as a regular expression
    that skips the spaces around the bar."""
    return " | ".join(tags)
