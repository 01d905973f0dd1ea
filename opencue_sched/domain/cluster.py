"""Clusters: the unit of dispatch work (distributed scheduler reference, "Cluster System")."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum


class ClusterKind(StrEnum):
    ALLOC = "alloc"
    MANUAL = "manual"
    HOSTNAME = "hostname"
    HARDWARE = "hardware"


@dataclass(frozen=True, slots=True, order=True)
class Cluster:
    """A show's work in one facility under one or more host tags. ``tags`` are normalised and sorted."""

    facility_id: str
    show_id: str
    kind: ClusterKind
    tags: tuple[str, ...]
    alloc_id: str | None = None

    @property
    def key(self) -> str:
        """A short stable name, safe in a queue message, a Redis key and a metric: ``kind-<16 hex digits>``."""
        text = "\x1f".join((self.facility_id, self.show_id, self.kind.value, self.alloc_id or "", *self.tags))
        return f"{self.kind.value}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
