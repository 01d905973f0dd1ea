"""Caps and bookings as PostgreSQL holds them, for the counters in Redis. Cores are centicores throughout.

Caps: subscription, folder_resource, job_resource, point, limit_record. Bookings: proc.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, text

# Of two snapshots of one server the one that sees more commits has a higher xmax, or the same and fewer transactions in
# progress below it. A clock cannot tell: it is read before its snapshot is taken, or after.
_CAPS_VERSION = text(
    """
    SELECT CAST(extract(epoch FROM pg_postmaster_start_time()) * 1000000 AS bigint) || '|' ||
           (CAST(CAST(pg_snapshot_xmax(seen) AS text) AS bigint) * 8192
            - least(8191, (SELECT count(*) FROM pg_snapshot_xip(seen))))
      FROM pg_current_snapshot() AS seen
    """
)
_MANAGED_SHOWS = text("SELECT pk_show FROM show WHERE b_scheduler_managed")
_SHOW_VERSION = text("SELECT CAST(xmin AS text) FROM show WHERE pk_show = :show")
_MANAGED_VERSIONS = text("SELECT pk_show, CAST(xmin AS text) AS version FROM show WHERE b_scheduler_managed")

_RELEASE_TRIGGER = text(
    """
    SELECT EXISTS (SELECT 1 FROM pg_trigger
                    WHERE tgrelid = 'proc'::regclass AND tgname = 'opencue_sched_proc_released' AND tgenabled <> 'D')
    """
)

_SUBSCRIPTIONS_OF_SHOWS = text(
    "SELECT pk_show, pk_alloc, int_size, int_burst FROM subscription WHERE pk_show = ANY(:shows)"
)
_SUBSCRIPTIONS = text(
    """
    SELECT pk_show, pk_alloc, int_size, int_burst
      FROM subscription
      JOIN unnest(CAST(:shows AS varchar[]), CAST(:allocs AS varchar[])) AS wanted(show, alloc)
        ON wanted.show = pk_show AND wanted.alloc = pk_alloc
    """
)
_FOLDERS = """
    SELECT pk_folder, folder.pk_show, resource.int_min_cores, resource.int_max_cores, resource.int_min_gpus,
           resource.int_max_gpus
      FROM folder_resource resource JOIN folder USING (pk_folder)
"""
_FOLDERS_OF_SHOWS = text(f"{_FOLDERS} WHERE folder.pk_show = ANY(:shows)")
_FOLDERS_BY_ID = text(f"{_FOLDERS} WHERE pk_folder = ANY(:ids)")
_JOBS = """
    SELECT pk_job, resource.int_max_cores, resource.int_max_gpus, resource.int_priority
      FROM job_resource resource JOIN job USING (pk_job)
"""
_JOBS_OF_SHOWS = text(f"{_JOBS} WHERE job.pk_show = ANY(:shows) AND job.str_state <> 'FINISHED'")
_JOBS_BY_ID = text(f"{_JOBS} WHERE pk_job = ANY(:ids)")
_POINTS_OF_SHOWS = text("SELECT pk_dept, pk_show, int_min_cores FROM point WHERE pk_show = ANY(:shows)")
_POINTS = text(
    """
    SELECT pk_dept, pk_show, int_min_cores
      FROM point
      JOIN unnest(CAST(:depts AS varchar[]), CAST(:shows AS varchar[])) AS wanted(dept, show)
        ON wanted.dept = pk_dept AND wanted.show = pk_show
    """
)
# What the frames that the ledger does not have leave of a limit, counted as OpenCue counts: running frames. They are of
# shows that book elsewhere, and of managed ones that are not counted, or whose row changed since they were.
_LIMITS = """
    SELECT pk_limit_record, int_max_value,
           coalesce((SELECT sum(layer_stat.int_running_count)
                       FROM layer_limit JOIN layer_stat USING (pk_layer)
                       JOIN job ON job.pk_job = layer_stat.pk_job JOIN show ON show.pk_show = job.pk_show
                      WHERE layer_limit.pk_limit_record = limit_record.pk_limit_record
                        AND layer_stat.int_running_count > 0
                        AND NOT (show.b_scheduler_managed AND EXISTS (
                            SELECT 1
                              FROM unnest(CAST(:counted AS varchar[]), CAST(:versions AS varchar[]))
                                   AS note(show, version)
                             WHERE note.show = show.pk_show AND note.version = CAST(show.xmin AS text)
                        ))), 0) AS foreign_running
      FROM limit_record
"""
_ALL_LIMITS = text(_LIMITS)
_LIMITS_BY_ID = text(f"{_LIMITS} WHERE pk_limit_record = ANY(:ids)")


@dataclass(frozen=True, slots=True)
class SubscriptionRow:
    show_id: str
    alloc_id: str
    size_centicores: int
    burst_centicores: int


@dataclass(frozen=True, slots=True)
class FolderRow:
    """Maxima of 0 or below are unlimited."""

    folder_id: str
    show_id: str
    min_centicores: int
    max_centicores: int
    min_gpus: int
    max_gpus: int


@dataclass(frozen=True, slots=True)
class JobRow:
    """Maxima of 0 or below are unlimited."""

    job_id: str
    max_centicores: int
    max_gpus: int
    priority: int


@dataclass(frozen=True, slots=True)
class PointRow:
    dept_id: str
    show_id: str
    min_centicores: int


@dataclass(frozen=True, slots=True)
class LimitRow:
    """``max_value`` frames may run at once (NULL admits none, as in OpenCue's comparison)."""

    limit_id: str
    max_value: int | None
    foreign_running: int


def caps_version(connection: Connection) -> str:
    """What a REPEATABLE READ transaction sees, as ``server|number``: a snapshot with more commits has a higher number.

    ``server`` is the start of the server's process: another one, after a fail-over or a restart, begins anew.
    """
    return str(connection.execute(_CAPS_VERSION).scalar_one())


def managed_show_ids(connection: Connection) -> frozenset[str]:
    """Shows whose bookings this scheduler accounts for (b_scheduler_managed), active or not."""
    return frozenset(row.pk_show for row in connection.execute(_MANAGED_SHOWS))


def show_version(connection: Connection, show_id: str) -> str | None:
    """Something that differs after every change of the show's row; None for a show that is gone."""
    return connection.execute(_SHOW_VERSION, {"show": show_id}).scalar()


def managed_show_versions(connection: Connection) -> dict[str, str]:
    """The same of every managed show."""
    return {row.pk_show: row.version for row in connection.execute(_MANAGED_VERSIONS)}


def has_release_trigger(connection: Connection) -> bool:
    """Whether our trigger on deleted procs is in the database and enabled."""
    return bool(connection.execute(_RELEASE_TRIGGER).scalar_one())


def subscriptions_of_shows(connection: Connection, show_ids: Collection[str]) -> list[SubscriptionRow]:
    return [SubscriptionRow(*row) for row in connection.execute(_SUBSCRIPTIONS_OF_SHOWS, {"shows": list(show_ids)})]


def subscriptions(connection: Connection, pairs: Sequence[tuple[str, str]]) -> list[SubscriptionRow]:
    """Subscriptions by (show id, alloc id); one that does not exist has no row."""
    wanted = {"shows": [show for show, _ in pairs], "allocs": [alloc for _, alloc in pairs]}
    return [SubscriptionRow(*row) for row in connection.execute(_SUBSCRIPTIONS, wanted)]


def folders_of_shows(connection: Connection, show_ids: Collection[str]) -> list[FolderRow]:
    return [FolderRow(*row) for row in connection.execute(_FOLDERS_OF_SHOWS, {"shows": list(show_ids)})]


def folders(connection: Connection, folder_ids: Collection[str]) -> list[FolderRow]:
    return [FolderRow(*row) for row in connection.execute(_FOLDERS_BY_ID, {"ids": list(folder_ids)})]


def jobs_of_shows(connection: Connection, show_ids: Collection[str]) -> list[JobRow]:
    """Jobs that are not FINISHED."""
    return [JobRow(*row) for row in connection.execute(_JOBS_OF_SHOWS, {"shows": list(show_ids)})]


def jobs(connection: Connection, job_ids: Collection[str]) -> list[JobRow]:
    return [JobRow(*row) for row in connection.execute(_JOBS_BY_ID, {"ids": list(job_ids)})]


def points_of_shows(connection: Connection, show_ids: Collection[str]) -> list[PointRow]:
    return [PointRow(*row) for row in connection.execute(_POINTS_OF_SHOWS, {"shows": list(show_ids)})]


def points(connection: Connection, pairs: Sequence[tuple[str, str]]) -> list[PointRow]:
    """Points by (dept id, show id)."""
    wanted = {"depts": [dept for dept, _ in pairs], "shows": [show for _, show in pairs]}
    return [PointRow(*row) for row in connection.execute(_POINTS, wanted)]


def all_limits(connection: Connection, counted: Mapping[str, str]) -> list[LimitRow]:
    """``counted``: the shows whose frames the ledger has, each with the version of its row then."""
    return [LimitRow(*row) for row in connection.execute(_ALL_LIMITS, _counted(counted))]


def limits(connection: Connection, limit_ids: Collection[str], counted: Mapping[str, str]) -> list[LimitRow]:
    """The same for some limits."""
    parameters = {"ids": list(limit_ids), **_counted(counted)}
    return [LimitRow(*row) for row in connection.execute(_LIMITS_BY_ID, parameters)]


def _counted(counted: Mapping[str, str]) -> dict[str, list[str]]:
    return {"counted": list(counted), "versions": list(counted.values())}
