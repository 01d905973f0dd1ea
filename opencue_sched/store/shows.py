"""Shows, folders, allocations, subscriptions and limits, as an administrator lists and changes them.

Sizes and caps are in centicores, what is used of them in whole cores, as caps count it. It is summed from the procs:
the tables' own columns lag for managed shows. Triggers of ours tell the scheduler about changed caps.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, column, delete, or_, select, table, text, update
from sqlalchemy.dialects.postgresql import insert

from opencue_sched.domain.names import FOLDER_NAME_WIDTH
from opencue_sched.store.pending import USED, countable

_SHOWS = text(
    f"""
    SELECT show.pk_show AS id, show.str_name AS name, b_active AS active, b_scheduler_managed AS managed,
           b_booking_enabled AS booking, b_dispatch_enabled AS dispatch, b_paused AS paused,
           int_default_min_cores AS default_min_cores, int_default_max_cores AS default_max_cores,
           int_default_max_gpus AS default_max_gpus,
           coalesce(work.jobs, 0) AS pending_jobs, CAST(coalesce(work.running, 0) AS bigint) AS running_frames,
           CAST(coalesce(work.waiting, 0) AS bigint) AS waiting_frames,
           CAST(coalesce(work.dead, 0) AS bigint) AS dead_frames,
           CAST(coalesce(used.cores, 0) AS bigint) AS centicores, coalesce(used.gpus, 0) AS gpus
      FROM show
      LEFT JOIN (SELECT pk_show, count(*) AS jobs, sum(int_running_count) AS running, sum(int_waiting_count) AS waiting,
                        sum(int_dead_count) AS dead
                   FROM job JOIN job_stat ON job_stat.pk_job = job.pk_job
                  WHERE str_state = 'PENDING' GROUP BY pk_show) work ON work.pk_show = show.pk_show
      LEFT JOIN (SELECT pk_show, sum({countable("int_cores_reserved")}) AS cores,
                        sum({countable("int_gpus_reserved")}) AS gpus
                   FROM proc WHERE NOT b_local GROUP BY pk_show) used ON used.pk_show = show.pk_show
     WHERE CAST(:show AS varchar) IS NULL OR show.pk_show = :show
     ORDER BY show.str_name
    """  # noqa: S608 - only our own constant
)
# What a department uses of a show. The word "point" is a type of PostgreSQL's too, which an INSERT does not mind.
INSERT_POINT = text(
    """
    INSERT INTO point (pk_point, pk_dept, pk_show) VALUES (CAST(gen_random_uuid() AS varchar), :dept, :show)
    ON CONFLICT DO NOTHING
    """
)
_DEFAULT_DEPT = text("SELECT pk_dept FROM dept ORDER BY b_default DESC, (str_name = 'Unknown') DESC, pk_dept LIMIT 1")
# Ending a run takes a share of this lock, so nobody releases a proc of the show meanwhile.
_LOCK_SHOW = text("SELECT b_scheduler_managed FROM show WHERE pk_show = :show FOR NO KEY UPDATE")

_SUBSCRIPTIONS = text(
    f"""
    SELECT pk_subscription AS id, subscription.pk_show AS show_id, show.str_name AS show,
           subscription.pk_alloc AS alloc_id, alloc.str_name AS allocation, facility.str_name AS facility,
           alloc.pk_facility AS facility_id,
           int_size AS size_centicores, int_burst AS burst_centicores,
           coalesce(used.cores, 0) AS used_cores, coalesce(used.gpus, 0) AS used_gpus, coalesce(used.procs, 0) AS procs
      FROM subscription JOIN show USING (pk_show) JOIN alloc USING (pk_alloc) JOIN facility USING (pk_facility)
      LEFT JOIN (SELECT p.pk_show, host.pk_alloc, count(*) AS procs, {USED}
                   FROM proc p JOIN host USING (pk_host)
                  WHERE NOT b_local GROUP BY p.pk_show, host.pk_alloc) used USING (pk_show, pk_alloc)
     WHERE (CAST(:show AS varchar) IS NULL OR subscription.pk_show = :show)
       AND (CAST(:alloc AS varchar) IS NULL OR subscription.pk_alloc = :alloc)
     ORDER BY show.str_name, alloc.str_name
    """  # noqa: S608 - only our own constant
)


def insert_row(connection: Connection, name: str, **values: Any) -> Any:
    """Insert a row into the table of this name; its new id, or None when there is one like it."""
    row = {f"pk_{name}": str(uuid.uuid4()), **values}
    made = insert(table(name, *map(column, row))).values(row).on_conflict_do_nothing()
    return connection.execute(made.returning(column(f"pk_{name}"))).scalar()


def set_rows(connection: Connection, name: str, key: str, ids: Collection[str], values: Mapping[str, Any]) -> bool:
    """Set columns of the rows of the table of this name with these keys; whether any was otherwise."""
    row = table(name, *map(column, (key, *values)))
    chosen = row.c[key].in_(ids)
    # In the order in which everybody locks rows of a table.
    connection.execute(select(row.c[key]).where(chosen).order_by(row.c[key]).with_for_update(key_share=True))
    otherwise = or_(*(row.c[it].is_distinct_from(value) for it, value in values.items()))
    return connection.execute(update(row).where(chosen, otherwise).values(**values)).rowcount > 0


def delete_rows(connection: Connection, name: str, key: str, row_id: str) -> None:
    """Delete the rows of the table of this name with this key."""
    row = table(name, column(key))
    connection.execute(delete(row).where(row.c[key] == row_id))


def list_shows(connection: Connection, show_id: str | None = None) -> Sequence[Row[Any]]:
    """All shows, or one, and what each is doing. ``centicores`` and ``gpus`` are booked now."""
    return connection.execute(_SHOWS, {"show": show_id}).all()


def insert_show(connection: Connection, name: str, *, managed: bool) -> str:
    """A new show, made as Cuebot makes one: with its statistics, its root folder and its point. Its id."""
    dept = connection.execute(_DEFAULT_DEPT).scalar_one()
    show = str(insert_row(connection, "show", str_name=name, b_scheduler_managed=managed))
    connection.execute(text("INSERT INTO show_stats (pk_show) VALUES (:show)"), {"show": show})
    insert_row(connection, "folder", pk_show=show, str_name=name[:FOLDER_NAME_WIDTH], pk_dept=dept)
    connection.execute(INSERT_POINT, {"show": show, "dept": dept})
    return show


def lock_show(connection: Connection, show_id: str) -> bool:
    """Whether the show is managed, which nobody else changes until this transaction ends."""
    return bool(connection.execute(_LOCK_SHOW, {"show": show_id}).scalar_one())


def list_subscriptions(
    connection: Connection, *, show_id: str | None = None, alloc_id: str | None = None
) -> Sequence[Row[Any]]:
    """What shows may use of allocations, with live use; all, or of a show or an allocation.
    Local procs (a user's own machine) do not count against a subscription."""
    return connection.execute(_SUBSCRIPTIONS, {"show": show_id, "alloc": alloc_id}).all()


# Folders of shows (groups, in Cuebot's words), their caps, and the jobs in them.
#
# The caps that are enforced are those of ``folder_resource``. -1 is no cap.

_FOLDERS = text(
    f"""
    SELECT folder.pk_folder AS id, folder.str_name AS name, show.str_name AS show, show.b_active AS show_active,
           parent.str_name AS parent, dept.str_name AS dept, folder.pk_show AS show_id, folder.pk_dept AS dept_id,
           folder.pk_parent_folder IS NULL AS is_default, folder.int_job_min_cores AS job_min_cores,
           folder.int_job_max_cores AS job_max_cores, folder.int_job_min_gpus AS job_min_gpus,
           folder.int_job_max_gpus AS job_max_gpus,
           caps.int_min_cores AS min_centicores, caps.int_max_cores AS max_centicores,
           caps.int_min_gpus AS min_gpus, caps.int_max_gpus AS max_gpus,
           coalesce(work.jobs, 0) AS jobs, CAST(coalesce(work.waiting, 0) AS bigint) AS waiting,
           coalesce(used.cores, 0) AS used_cores, coalesce(used.gpus, 0) AS used_gpus,
           coalesce(used.procs, 0) AS running
      FROM folder JOIN show USING (pk_show) JOIN dept USING (pk_dept) JOIN folder_resource caps USING (pk_folder)
      LEFT JOIN folder_level level USING (pk_folder)
      LEFT JOIN (SELECT pk_folder, count(*) AS jobs, sum(int_waiting_count) AS waiting
                   FROM job JOIN job_stat ON job_stat.pk_job = job.pk_job
                  WHERE str_state = 'PENDING' GROUP BY pk_folder) work USING (pk_folder)
      LEFT JOIN (SELECT job.pk_folder, count(*) AS procs, {USED}
                   FROM proc p JOIN job USING (pk_job) GROUP BY job.pk_folder) used USING (pk_folder)
      LEFT JOIN folder parent ON parent.pk_folder = folder.pk_parent_folder
     WHERE CAST(:show AS varchar) IS NULL OR folder.pk_show = :show
     ORDER BY show.str_name, level.int_level, folder.str_name, folder.pk_folder
    """  # noqa: S608 - only our own constant
)
# As Cuebot moves jobs: they take the department of the folder, and what it says about its jobs (-1: nothing). Triggers
# of the schema move what they use to the rows of their new folder and department, so the latter must be there.
_MOVE_JOBS = (
    text(
        """
        WITH locked AS (
            SELECT pk_job FROM job WHERE pk_job = ANY(CAST(:jobs AS varchar[])) ORDER BY pk_job FOR NO KEY UPDATE)
        UPDATE job SET pk_folder = folder.pk_folder, pk_dept = folder.pk_dept
          FROM locked, folder WHERE job.pk_job = locked.pk_job AND folder.pk_folder = :folder
        """
    ),
    text(
        """
        UPDATE job_history SET pk_dept = folder.pk_dept
          FROM folder WHERE folder.pk_folder = :folder AND pk_job = ANY(CAST(:jobs AS varchar[]))
        """
    ),
    text(
        """
        UPDATE job_resource
           SET int_priority = coalesce(nullif(folder.int_job_priority, -1), job_resource.int_priority),
               int_min_cores = coalesce(nullif(folder.int_job_min_cores, -1), job_resource.int_min_cores),
               int_max_cores = coalesce(nullif(folder.int_job_max_cores, -1), job_resource.int_max_cores),
               int_min_gpus = coalesce(nullif(folder.int_job_min_gpus, -1), job_resource.int_min_gpus),
               int_max_gpus = coalesce(nullif(folder.int_job_max_gpus, -1), job_resource.int_max_gpus)
          FROM folder WHERE folder.pk_folder = :folder AND pk_job = ANY(CAST(:jobs AS varchar[]))
        """
    ),
)


def list_folders(connection: Connection, show_id: str | None = None) -> Sequence[Row[Any]]:
    """The folders of all shows, or of one, the root (the default one) first, with their caps, live use, and what they
    say about their jobs (-1: nothing)."""
    return connection.execute(_FOLDERS, {"show": show_id}).all()


def move_jobs(connection: Connection, job_ids: Collection[str], folder: Row[Any]) -> None:
    """Put jobs of the folder's show into it."""
    connection.execute(INSERT_POINT, {"dept": folder.dept_id, "show": folder.show_id})
    for statement in _MOVE_JOBS:
        connection.execute(statement, {"folder": folder.id, "jobs": sorted(job_ids)})


# What people call things: rows by name or id, and the names that come near a mistyped one.

NAMES_COMPARED = 500
"""Names fetched as candidates for a suggestion or a completion, those of about the same length first."""


class Kind(StrEnum):
    """What a name may stand for."""

    SHOW = "show"
    FACILITY = "facility"
    ALLOCATION = "allocation"
    LIMIT = "limit"
    HOST = "host"
    JOB = "job"


class NamedRow(NamedTuple):
    """A row that was asked for by name or id."""

    id: str
    name: str


_TABLES = {Kind.ALLOCATION: "alloc", Kind.LIMIT: "limit_record"}
"""Where the table is not called as what a row of it stands for. The key of each is ``pk_{table}``."""


def find_rows(connection: Connection, kind: Kind, names_or_ids: Collection[str]) -> dict[str, NamedRow]:
    """The rows of these names or ids, by what was asked for. A job's name means the live job, else the last one that
    was called so; a show is also found by an alias, a host by its full name, and in any case."""
    table = _TABLES.get(kind, kind.value)
    key = f"pk_{table}"
    also = {
        Kind.HOST: "OR lower(asked) IN (lower(str_fqdn), lower(str_name))",
        Kind.JOB: "OR str_name = lower(asked)",
        Kind.SHOW: "OR pk_show IN (SELECT pk_show FROM show_alias WHERE show_alias.str_name = asked)",
    }.get(kind, "")
    order = {
        Kind.HOST: "(str_fqdn = asked) DESC NULLS LAST, pk_host",
        Kind.JOB: "str_visible_name IS NOT NULL DESC, ts_started DESC",
    }.get(kind, key)
    statement = f"""
        SELECT asked, found.* FROM unnest(CAST(:names AS varchar[])) AS asked
         CROSS JOIN LATERAL (
             SELECT {key}, str_name FROM {table} WHERE str_name = asked OR {key} = asked {also}
              ORDER BY ({key} = asked) DESC, (str_name = asked) DESC, {order} LIMIT 1) found
        """  # noqa: S608 - only our own constants
    rows = connection.execute(text(statement), {"names": list(names_or_ids)})
    return {asked: NamedRow(*row) for asked, *row in rows}


def similar_names(connection: Connection, kind: Kind, name: str) -> Sequence[str]:
    """Names that may have been meant by ``name``, those that begin so first; of jobs, those of live ones."""
    only = "AND str_visible_name IS NOT NULL" if kind is Kind.JOB else ""
    statement = f"""
        SELECT str_name FROM {_TABLES.get(kind, kind.value)}
         WHERE (lower(left(str_name, 1)) = lower(left(:text, 1)) OR lower(right(str_name, 1)) = lower(right(:text, 1))
                OR position(lower(:text) IN lower(str_name)) > 0) {only}
         ORDER BY starts_with(str_name, :text) DESC, position(lower(:text) IN lower(str_name)) > 0 DESC,
                  abs(length(str_name) - length(:text)), str_name LIMIT :most
        """  # noqa: S608 - only our own constants
    return list(connection.execute(text(statement), {"text": name, "most": NAMES_COMPARED}).scalars())


_NAMES_BY_ID = text(
    """
    SELECT pk_show, str_name FROM show WHERE pk_show = ANY(CAST(:ids AS varchar[]))
    UNION ALL SELECT pk_facility, str_name FROM facility WHERE pk_facility = ANY(CAST(:ids AS varchar[]))
    UNION ALL SELECT pk_alloc, str_name FROM alloc WHERE pk_alloc = ANY(CAST(:ids AS varchar[]))
    UNION ALL SELECT pk_folder, str_name FROM folder WHERE pk_folder = ANY(CAST(:ids AS varchar[]))
    UNION ALL SELECT pk_limit_record, str_name FROM limit_record WHERE pk_limit_record = ANY(CAST(:ids AS varchar[]))
    UNION ALL SELECT pk_job, str_name FROM job WHERE pk_job = ANY(CAST(:ids AS varchar[]))
    UNION ALL SELECT pk_layer, layer.str_name || ' of ' || job.str_name
      FROM layer JOIN job USING (pk_job) WHERE pk_layer = ANY(CAST(:ids AS varchar[]))
    UNION ALL SELECT pk_proc, frame.str_name || ' of ' || job.str_name || ' on ' || host.str_name
      FROM proc JOIN frame USING (pk_frame) JOIN job ON job.pk_job = proc.pk_job JOIN host USING (pk_host)
     WHERE pk_proc = ANY(CAST(:ids AS varchar[]))
    """
)


def names_by_id(connection: Connection, ids: Collection[str]) -> dict[str, str]:
    """What people call shows, facilities, allocations, folders, limits, jobs, layers and procs. Unknown ids are left
    out. ``render of JOB`` is a layer, ``0001-render of JOB on HOST`` a proc."""
    return {row[0]: row[1] for row in connection.execute(_NAMES_BY_ID, {"ids": sorted(set(ids))})}


# Whose work a cap stands over: the shows to look at again when it has changed.

_SHOWS_UNDER_CAP = text(
    """
    SELECT pk_show FROM show WHERE b_scheduler_managed AND pk_show IN (
        SELECT pk_show FROM folder WHERE pk_folder = ANY(CAST(:folders AS varchar[]))
        UNION ALL
        SELECT pk_show FROM job WHERE pk_job = ANY(CAST(:jobs AS varchar[])) AND str_state = 'PENDING'
        UNION ALL
        SELECT job.pk_show FROM layer_limit JOIN layer_stat stat USING (pk_layer) JOIN job ON job.pk_job = stat.pk_job
         WHERE pk_limit_record = ANY(CAST(:limits AS varchar[])) AND stat.int_waiting_count > 0
           AND job.str_state = 'PENDING')
    """
)


def shows_under(
    connection: Connection, *, folders: Collection[str] = (), jobs: Collection[str] = (), limits: Collection[str]
) -> frozenset[str]:
    """The managed shows of these folders and pending jobs, and those with frames that wait under these limits."""
    parameters = {"folders": list(folders), "jobs": list(jobs), "limits": list(limits)}
    return frozenset(connection.execute(_SHOWS_UNDER_CAP, parameters).scalars())
