"""Shows, allocations, subscriptions and limits, as an administrator lists and changes them.

Sizes and caps are in centicores, what is used of them in whole cores, as caps count it. It is summed from the procs:
the tables' own columns lag for managed shows. Triggers of ours tell the scheduler about changed caps.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, column, delete, or_, select, table, text, update
from sqlalchemy.dialects.postgresql import insert

from opencue_sched.domain.names import FOLDER_NAME_WIDTH
from opencue_sched.errors import InvalidInput
from opencue_sched.store.pending import USED, countable

# Shows with their switches, counts of their pending jobs, and what they use.
_SHOWS = text(
    f"""
    SELECT show.pk_show AS id, show.str_name AS name, b_active AS active, b_scheduler_managed AS managed,
           b_booking_enabled AS booking, b_dispatch_enabled AS dispatch, b_paused AS paused,
           int_default_min_cores AS default_min_cores, int_default_max_cores AS default_max_cores,
           int_default_max_gpus AS default_max_gpus,
           coalesce(work.jobs, 0) AS pending_jobs, CAST(coalesce(work.running, 0) AS bigint) AS running_frames,
           CAST(coalesce(work.waiting, 0) AS bigint) AS waiting_frames,
           CAST(coalesce(work.paused, 0) AS bigint) AS paused_waiting_frames,
           CAST(coalesce(work.dead, 0) AS bigint) AS dead_frames,
           CAST(coalesce(used.cores, 0) AS bigint) AS centicores, coalesce(used.gpus, 0) AS gpus
      FROM show
      LEFT JOIN (SELECT pk_show, count(*) AS jobs, sum(int_running_count) AS running, sum(int_waiting_count) AS waiting,
                        sum(int_waiting_count) FILTER (WHERE b_paused) AS paused, sum(int_dead_count) AS dead
                   FROM job JOIN job_stat ON job_stat.pk_job = job.pk_job
                  WHERE str_state = 'PENDING' GROUP BY pk_show) work ON work.pk_show = show.pk_show
      LEFT JOIN (SELECT pk_show, sum({countable("int_cores_reserved")}) AS cores,
                        sum({countable("int_gpus_reserved")}) AS gpus
                   FROM proc WHERE NOT b_local AND CAST(:use AS boolean)
                  GROUP BY pk_show) used ON used.pk_show = show.pk_show
     WHERE CAST(:show AS varchar) IS NULL OR show.pk_show = :show
     ORDER BY show.str_name
    """  # noqa: S608 - only our own constant
)
# Adds the row that counts what a department uses of a show, unless it is there. "point" is a type of PostgreSQL's, too,
# which an INSERT does not mind.
INSERT_POINT = text(
    """
    INSERT INTO point (pk_point, pk_dept, pk_show) VALUES (CAST(gen_random_uuid() AS varchar), :dept, :show)
    ON CONFLICT DO NOTHING
    """
)
# The department of folders and jobs for which none is named.
_DEFAULT_DEPT = text("SELECT pk_dept FROM dept ORDER BY b_default DESC, (str_name = 'Unknown') DESC, pk_dept LIMIT 1")
# Ending a run takes a share of this lock, so nobody releases a proc of the show meanwhile.
_LOCK_SHOW = text("SELECT b_scheduler_managed FROM show WHERE pk_show = :show FOR NO KEY UPDATE")

# Subscriptions with what their shows use of them; each condition holds for all where its value is NULL.
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
                  WHERE NOT b_local AND CAST(:use AS boolean)
                  GROUP BY p.pk_show, host.pk_alloc) used USING (pk_show, pk_alloc)
     WHERE (CAST(:show AS varchar) IS NULL OR subscription.pk_show = :show)
       AND (CAST(:alloc AS varchar) IS NULL OR subscription.pk_alloc = :alloc)
     ORDER BY show.str_name, alloc.str_name
    """  # noqa: S608 - only our own constant
)


# What shows use of each allocation.
_USE = text(
    f"""
    SELECT p.pk_show AS show_id, host.pk_alloc AS alloc_id, {USED},
           CAST(sum({countable("p.int_cores_reserved")}) AS bigint) AS centicores
      FROM proc p JOIN host USING (pk_host) WHERE NOT b_local GROUP BY p.pk_show, host.pk_alloc
    """  # noqa: S608 - only our own constants
)


def insert_row(connection: Connection, name: str, **values: Any) -> Any:
    """Insert a row into the table of this name. Returns its new id, or None when a row with the same unique values is
    there."""
    row = {f"pk_{name}": str(uuid.uuid4()), **values}
    made = insert(table(name, *map(column, row))).values(row).on_conflict_do_nothing()
    return connection.execute(made.returning(column(f"pk_{name}"))).scalar()


def set_rows(connection: Connection, name: str, key: str, ids: Collection[str], values: Mapping[str, Any]) -> bool:
    """Set columns of the rows with these keys in the table of this name. Returns whether that changed any row."""
    row = table(name, *map(column, (key, *values)))
    chosen = row.c[key].in_(ids)
    # Locked in the order in which every transaction locks rows of a table.
    connection.execute(select(row.c[key]).where(chosen).order_by(row.c[key]).with_for_update(key_share=True))
    otherwise = or_(*(row.c[name].is_distinct_from(value) for name, value in values.items()))
    return connection.execute(update(row).where(chosen, otherwise).values(**values)).rowcount > 0


def delete_rows(connection: Connection, name: str, key: str, row_id: str) -> None:
    """Delete the rows of the table of this name with this key."""
    row = table(name, column(key))
    connection.execute(delete(row).where(row.c[key] == row_id))


def list_shows(connection: Connection, show_id: str | None = None, *, use: bool = True) -> Sequence[Row[Any]]:
    """All shows, or one, and what each is doing. ``centicores`` and ``gpus`` are booked now, and 0 without ``use``."""
    return connection.execute(_SHOWS, {"show": show_id, "use": use}).all()


def insert_show(connection: Connection, name: str, *, managed: bool) -> str:
    """A new show, made as Cuebot makes one: with its statistics, its root folder and its point. Its id.

    Raises InvalidInput where no department is there: Cuebot's migrations make none, its seed data does.
    """
    dept = connection.execute(_DEFAULT_DEPT).scalar()
    if dept is None:
        raise InvalidInput("there is no department (table dept) for the show's folder; Cuebot's seed data has one")
    show = str(insert_row(connection, "show", str_name=name, b_scheduler_managed=managed))
    connection.execute(text("INSERT INTO show_stats (pk_show) VALUES (:show)"), {"show": show})
    insert_row(connection, "folder", pk_show=show, str_name=name[:FOLDER_NAME_WIDTH], pk_dept=dept)
    connection.execute(INSERT_POINT, {"show": show, "dept": dept})
    return show


def lock_show(connection: Connection, show_id: str) -> bool:
    """Lock a show, so that no other transaction hands it over before this one ends. Returns whether it is managed."""
    return bool(connection.execute(_LOCK_SHOW, {"show": show_id}).scalar_one())


def list_subscriptions(
    connection: Connection, *, show_id: str | None = None, alloc_id: str | None = None, use: bool = True
) -> Sequence[Row[Any]]:
    """Subscriptions with what is used of them now: all, or those of a show or to an allocation. Without ``use`` that is
    not read, and 0.

    Local procs (on a user's own machine) do not count against a subscription.
    """
    return connection.execute(_SUBSCRIPTIONS, {"show": show_id, "alloc": alloc_id, "use": use}).all()


def list_use(connection: Connection) -> Sequence[Row[Any]]:
    """What shows use of allocations, local procs apart: for each ``show_id`` and ``alloc_id`` the ``cores`` and
    ``gpus``, as caps count them, and ``centicores``. Each proc is read once."""
    return connection.execute(_USE).all()


# The shows with work under a cap: those to look at again when the cap has changed.

# Managed shows with work under one of these caps.
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
