"""How much room some folders, jobs and limits have under their caps now, by live use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum, auto

from sqlalchemy import Connection, text

from opencue_sched.domain.farm import Headroom
from opencue_sched.domain.reservation import cores_cap, gpus_cap
from opencue_sched.store.limits import fetch_limits

_ROOM = text(
    """
    SELECT 'folder' AS kind, r.pk_folder AS id, r.int_max_cores, r.int_max_gpus, used.cores, used.gpus
    FROM folder_resource r
    CROSS JOIN LATERAL (
        SELECT COALESCE(sum((p.int_cores_reserved + 99) / 100), 0) AS cores,
               COALESCE(sum(p.int_gpus_reserved), 0) AS gpus
        FROM job j JOIN proc p ON p.pk_job = j.pk_job
        WHERE j.pk_folder = r.pk_folder
    ) used
    WHERE r.pk_folder = ANY(CAST(:folders AS varchar[]))
    UNION ALL
    SELECT 'job', r.pk_job, r.int_max_cores, r.int_max_gpus, used.cores, used.gpus
    FROM job_resource r
    CROSS JOIN LATERAL (
        SELECT COALESCE(sum((p.int_cores_reserved + 99) / 100), 0) AS cores,
               COALESCE(sum(p.int_gpus_reserved), 0) AS gpus
        FROM proc p
        WHERE p.pk_job = r.pk_job
    ) used
    WHERE r.pk_job = ANY(CAST(:jobs AS varchar[]))
    """
)


class CapKind(StrEnum):
    """What has a cap under which runs of any tags are counted."""

    FOLDER = auto()
    JOB = auto()
    LIMIT = auto()


@dataclass(frozen=True, slots=True)
class Capped:
    """One of them, by its id."""

    kind: CapKind
    id: str


@dataclass(frozen=True, slots=True)
class Room:
    """Whole cores (of a limit: running frames) and GPUs."""

    cores: float
    gpus: float

    def covers(self, other: Room) -> bool:
        return self.cores >= other.cores and self.gpus >= other.gpus

    def less(self, other: Room) -> Room:
        return Room(self.cores - other.cores, self.gpus - other.gpus)


def fetch_room(connection: Connection, caps: Collection[Capped]) -> dict[Capped, Room]:
    """What each has left; none for one that is gone. A statement for folders and jobs, and one for limits."""
    ids = defaultdict[CapKind, list[str]](list)
    for capped in caps:
        ids[capped.kind].append(capped.id)
    room = {}
    if ids[CapKind.FOLDER] or ids[CapKind.JOB]:
        for row in connection.execute(_ROOM, {"folders": ids[CapKind.FOLDER], "jobs": ids[CapKind.JOB]}):
            cores = Headroom(cores_cap(row.int_max_cores or 0), int(row.cores)).left
            gpus = Headroom(gpus_cap(row.int_max_gpus or 0), int(row.gpus)).left
            room[Capped(CapKind(row.kind), row.id)] = Room(cores, gpus)
    if ids[CapKind.LIMIT]:
        limits = fetch_limits(connection)
        for key in limits.keys() & ids[CapKind.LIMIT]:
            room[Capped(CapKind.LIMIT, key)] = Room(max(0, limits[key].max_value - limits[key].running), 0)
    return room
