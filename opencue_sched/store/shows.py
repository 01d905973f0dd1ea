"""Shows, allocations, subscriptions and limits, as an administrator lists and changes them (facts A).

Cores are centicores throughout. What is used is summed from the procs: the tables' own columns lag for managed shows.
Triggers of ours tell the scheduler about changed caps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import Connection, TextClause, text

from opencue_sched.store.hosts import RECALCULATE_TAGS

_SHOWS = text(
    """
    SELECT show.pk_show, show.str_name, b_active, b_scheduler_managed, b_booking_enabled, b_dispatch_enabled, b_paused,
           int_default_min_cores, int_default_max_cores, coalesce(work.jobs, 0),
           CAST(coalesce(work.running, 0) AS bigint), CAST(coalesce(work.waiting, 0) AS bigint),
           CAST(coalesce(used.cores, 0) AS bigint), coalesce(used.gpus, 0)
      FROM show
      LEFT JOIN (SELECT pk_show, count(*) AS jobs, sum(int_running_count) AS running, sum(int_waiting_count) AS waiting
                   FROM job JOIN job_stat ON job_stat.pk_job = job.pk_job
                  WHERE str_state = 'PENDING' GROUP BY pk_show) work ON work.pk_show = show.pk_show
      LEFT JOIN (SELECT pk_show, sum(int_cores_reserved) AS cores, sum(int_gpus_reserved) AS gpus
                   FROM proc WHERE NOT b_local GROUP BY pk_show) used ON used.pk_show = show.pk_show
     WHERE CAST(:show AS varchar) IS NULL OR show.pk_show = :show
     ORDER BY show.str_name
    """
)
# The lock of a show's flip is one of the session: it ends with the process that holds it, however that ends.
_LOCK_FLIP = text("SELECT pg_try_advisory_lock(hashtextextended('opencue-sched flip ' || CAST(:show AS varchar), 0))")
_UNLOCK_FLIP = text("SELECT pg_advisory_unlock(hashtextextended('opencue-sched flip ' || CAST(:show AS varchar), 0))")
_STILL_THERE = text("SELECT 1")
_INSERT_SHOW = text(
    """
    INSERT INTO show (pk_show, str_name, b_scheduler_managed, int_default_min_cores, int_default_max_cores)
    VALUES (:show, :name, :managed, coalesce(:min_cores, 100), coalesce(:max_cores, 10000))
    """
)
_INSERT_SHOW_STATS = text("INSERT INTO show_stats (pk_show) VALUES (:show)")
_INSERT_ROOT = text("INSERT INTO folder (pk_folder, pk_show, str_name, pk_dept) VALUES (:folder, :show, :root, :dept)")
_INSERT_POINT = text(
    "INSERT INTO point (pk_point, pk_dept, pk_show) VALUES (:point, :dept, :show) ON CONFLICT DO NOTHING"
)
_DEFAULT_DEPT = text("SELECT pk_dept FROM dept ORDER BY b_default DESC, (str_name = 'Unknown') DESC, pk_dept LIMIT 1")
# Ending a run takes a share of this lock, so nobody releases a proc of the show meanwhile.
_LOCK_SHOW = text("SELECT b_scheduler_managed, b_booking_enabled FROM show WHERE pk_show = :show FOR NO KEY UPDATE")
_SHOW_FLAGS = {
    flag: text(f"UPDATE show SET {flag} = :value WHERE pk_show = :show AND {flag} <> :value")  # noqa: S608
    for flag in ("b_active", "b_scheduler_managed", "b_booking_enabled")
}
_SHOW_NUMBERS = {
    column: text(f"UPDATE show SET {column} = :value WHERE pk_show = :show")  # noqa: S608 - only our own constants
    for column in ("int_default_min_cores", "int_default_max_cores")
}

_ALLOCATIONS = text(
    """
    SELECT alloc.pk_alloc, alloc.str_name, alloc.str_tag, facility.str_name AS facility, alloc.b_default,
           CAST(coalesce(sum(host.int_cores), 0) AS bigint),
           CAST(coalesce(sum(host.int_cores - host.int_cores_idle), 0) AS bigint),
           CAST(coalesce(sum(host.int_cores_idle) FILTER (WHERE str_lock_state = 'OPEN' AND str_state = 'UP'), 0)
                AS bigint),
           count(host.pk_host), count(host.pk_host) FILTER (WHERE str_lock_state <> 'OPEN'),
           count(host.pk_host) FILTER (WHERE str_state <> 'UP')
      FROM alloc
      JOIN facility ON facility.pk_facility = alloc.pk_facility
      LEFT JOIN host ON host.pk_alloc = alloc.pk_alloc
      LEFT JOIN host_stat ON host_stat.pk_host = host.pk_host
     WHERE coalesce(alloc.b_enabled, true)
     GROUP BY alloc.pk_alloc, facility.str_name
     ORDER BY facility.str_name, alloc.str_name
    """
)
_INSERT_FACILITY = text("INSERT INTO facility (pk_facility, str_name) VALUES (:facility, :name)")
_DEFAULT_FACILITY = text("SELECT pk_facility, str_name FROM facility ORDER BY b_default DESC, str_name LIMIT 1")
_INSERT_ALLOCATION = text(
    """
    INSERT INTO alloc (pk_alloc, str_name, str_tag, pk_facility) VALUES (:alloc, :name, :tag, :facility)
    ON CONFLICT DO NOTHING RETURNING pk_alloc
    """
)
_SET_ALLOCATION_TAG = text("UPDATE alloc SET str_tag = :tag WHERE pk_alloc = :alloc")
_SET_HOST_ALLOCATION_TAGS = text(
    """
    UPDATE host_tag SET str_tag = :tag
      FROM host WHERE host.pk_host = host_tag.pk_host AND host.pk_alloc = :alloc AND upper(str_tag_type) = 'ALLOC'
    RETURNING host.pk_host
    """
)
_SUBSCRIPTIONS = text(
    """
    SELECT pk_subscription, subscription.pk_show, show.str_name, subscription.pk_alloc, alloc.str_name AS alloc,
           int_size, int_burst, CAST(coalesce(used.cores, 0) AS bigint), coalesce(used.gpus, 0),
           coalesce(used.procs, 0), CAST(coalesce(idle.cores, 0) AS bigint)
      FROM subscription
      JOIN show ON show.pk_show = subscription.pk_show
      JOIN alloc ON alloc.pk_alloc = subscription.pk_alloc
      LEFT JOIN (SELECT proc.pk_show, host.pk_alloc, sum(int_cores_reserved) AS cores, sum(int_gpus_reserved) AS gpus,
                        count(*) AS procs
                   FROM proc JOIN host ON host.pk_host = proc.pk_host
                  WHERE NOT b_local GROUP BY proc.pk_show, host.pk_alloc) used
             ON used.pk_show = subscription.pk_show AND used.pk_alloc = subscription.pk_alloc
      LEFT JOIN (SELECT pk_alloc, sum(int_cores_idle) AS cores
                   FROM host JOIN host_stat ON host_stat.pk_host = host.pk_host
                  WHERE str_lock_state = 'OPEN' AND str_state = 'UP' GROUP BY pk_alloc) idle
             ON idle.pk_alloc = subscription.pk_alloc
     WHERE (CAST(:show AS varchar) IS NULL OR subscription.pk_show = :show)
       AND (CAST(:alloc AS varchar) IS NULL OR subscription.pk_alloc = :alloc)
     ORDER BY show.str_name, alloc.str_name
    """
)
_INSERT_SUBSCRIPTION = text(
    """
    INSERT INTO subscription (pk_subscription, pk_show, pk_alloc, int_size, int_burst)
    VALUES (:subscription, :show, :alloc, :size, :burst) ON CONFLICT DO NOTHING RETURNING pk_subscription
    """
)
_SET_SUBSCRIPTION = text(
    """
    UPDATE subscription SET int_size = coalesce(:size, int_size), int_burst = coalesce(:burst, int_burst)
     WHERE pk_show = :show AND pk_alloc = :alloc RETURNING pk_subscription
    """
)
_DELETE_SUBSCRIPTION = text("DELETE FROM subscription WHERE pk_show = :show AND pk_alloc = :alloc")

_INSERT_LIMIT = text("INSERT INTO limit_record (pk_limit_record, str_name, int_max_value) VALUES (:limit, :name, :max)")
_SET_LIMIT = text("UPDATE limit_record SET int_max_value = :max WHERE pk_limit_record = :limit")
_LIMIT_USERS = text(
    """
    SELECT count(DISTINCT job.pk_job) FROM layer_limit
      JOIN layer ON layer.pk_layer = layer_limit.pk_layer
      JOIN job ON job.pk_job = layer.pk_job AND job.str_state = 'PENDING'
     WHERE pk_limit_record = :limit
    """
)
# No foreign key says so, but a layer under a limit that is gone would never be booked again.
_DELETE_LIMIT_LAYERS = text("DELETE FROM layer_limit WHERE pk_limit_record = :limit")
_DELETE_LIMIT = text("DELETE FROM limit_record WHERE pk_limit_record = :limit")


@dataclass(frozen=True, slots=True)
class Show:
    """A show and what it is doing. ``centicores`` and ``gpus`` are booked now."""

    id: str
    name: str
    active: bool
    managed: bool
    booking: bool
    dispatch: bool
    paused: bool
    default_min_cores: int
    default_max_cores: int
    pending_jobs: int
    running_frames: int
    waiting_frames: int
    centicores: int
    gpus: int


@dataclass(frozen=True, slots=True)
class ShowFlags:
    """Whose a show is, and whether it may book."""

    managed: bool
    booking: bool


@dataclass(frozen=True, slots=True)
class Allocation:
    """An allocation and its hosts. Idle cores are those of hosts that are OPEN and UP."""

    id: str
    name: str
    tag: str | None
    facility: str
    default: bool
    centicores: int
    booked_centicores: int
    idle_centicores: int
    hosts: int
    locked: int
    down: int


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a show may use of an allocation, what it uses, and what is idle there."""

    id: str
    show_id: str
    show: str
    alloc_id: str
    allocation: str
    size_centicores: int
    burst_centicores: int
    used_centicores: int
    used_gpus: int
    procs: int
    idle_centicores: int


def list_shows(connection: Connection, show_id: str | None = None) -> list[Show]:
    """All shows, or one."""
    return [Show(*row) for row in connection.execute(_SHOWS, {"show": show_id})]


def default_dept(connection: Connection) -> str | None:
    """The department of what names none."""
    return connection.execute(_DEFAULT_DEPT).scalar_one_or_none()


def insert_show(
    connection: Connection,
    *,
    show_id: str,
    folder_id: str,
    point_id: str,
    name: str,
    dept_id: str,
    managed: bool,
    min_cores: int | None,
    max_cores: int | None,
) -> None:
    """A show with its statistics, its root folder and its point, as Cuebot makes it."""
    row: dict[str, object] = {"show": show_id, "folder": folder_id, "point": point_id, "dept": dept_id}
    row |= {"name": name, "root": name[:36]}
    row |= {"managed": managed, "min_cores": min_cores, "max_cores": max_cores}
    for statement in (_INSERT_SHOW, _INSERT_SHOW_STATS, _INSERT_ROOT, _INSERT_POINT):
        connection.execute(statement, row)


def lock_show(connection: Connection, show_id: str) -> ShowFlags:
    """The show's flags, which nobody else changes until this transaction ends."""
    return ShowFlags(*connection.execute(_LOCK_SHOW, {"show": show_id}).one())


def set_show_flag(connection: Connection, show_id: str, flag: str, value: bool) -> bool:
    """Set b_active, b_scheduler_managed or b_booking_enabled; whether that changed anything."""
    return connection.execute(_SHOW_FLAGS[flag], {"show": show_id, "value": value}).rowcount > 0


def set_show_number(connection: Connection, show_id: str, column: str, value: int) -> None:
    """Set int_default_min_cores or int_default_max_cores of a show."""
    connection.execute(_SHOW_NUMBERS[column], {"show": show_id, "value": value})


def lock_flip(connection: Connection, show_id: str) -> bool:
    """Become the only one who flips this show, until unlock_flip() or the session's end; False: somebody else is."""
    return bool(connection.execute(_LOCK_FLIP, {"show": show_id}).scalar_one())


def keep_flip_lock(connection: Connection) -> None:
    """Raises SQLAlchemy's errors when the session, and with it the lock, is gone."""
    connection.execute(_STILL_THERE)


def unlock_flip(connection: Connection, show_id: str) -> None:
    """Let others flip the show."""
    connection.execute(_UNLOCK_FLIP, {"show": show_id})


def list_allocations(connection: Connection) -> list[Allocation]:
    """All allocations that are in use, by facility and name."""
    return [Allocation(*row) for row in connection.execute(_ALLOCATIONS)]


def default_facility(connection: Connection) -> tuple[str, str] | None:
    """Id and name of the facility of what names none."""
    row = connection.execute(_DEFAULT_FACILITY).one_or_none()
    return None if row is None else (row.pk_facility, row.str_name)


def insert_facility(connection: Connection, facility_id: str, name: str) -> None:
    """A new facility."""
    connection.execute(_INSERT_FACILITY, {"facility": facility_id, "name": name})


def insert_allocation(connection: Connection, alloc_id: str, name: str, tag: str, facility_id: str) -> bool:
    """A new allocation; False when the name is taken."""
    row = {"alloc": alloc_id, "name": name, "tag": tag, "facility": facility_id}
    return connection.execute(_INSERT_ALLOCATION, row).one_or_none() is not None


def set_allocation_tag(connection: Connection, alloc_id: str, tag: str) -> Sequence[str]:
    """Give an allocation, and with it its hosts, another tag; the ids of those hosts."""
    connection.execute(_SET_ALLOCATION_TAG, {"alloc": alloc_id, "tag": tag})
    tagged = connection.execute(_SET_HOST_ALLOCATION_TAGS, {"alloc": alloc_id, "tag": tag}).scalars().all()
    hosts = sorted(set(tagged))
    connection.execute(RECALCULATE_TAGS, {"hosts": hosts})
    return hosts


def list_subscriptions(
    connection: Connection, *, show_id: str | None = None, alloc_id: str | None = None
) -> list[Subscription]:
    """All subscriptions, or those of a show or an allocation, with live use."""
    rows = connection.execute(_SUBSCRIPTIONS, {"show": show_id, "alloc": alloc_id})
    return [Subscription(*row) for row in rows]


def insert_subscription(
    connection: Connection, subscription_id: str, show_id: str, alloc_id: str, *, size: int, burst: int
) -> bool:
    """A new subscription; False when the show has one for the allocation."""
    row = {"subscription": subscription_id, "show": show_id, "alloc": alloc_id, "size": size, "burst": burst}
    return connection.execute(_INSERT_SUBSCRIPTION, row).one_or_none() is not None


def set_subscription(
    connection: Connection, show_id: str, alloc_id: str, *, size: int | None = None, burst: int | None = None
) -> bool:
    """Change size or burst; False when there is no such subscription."""
    row = {"show": show_id, "alloc": alloc_id, "size": size, "burst": burst}
    return connection.execute(_SET_SUBSCRIPTION, row).one_or_none() is not None


def delete_subscription(connection: Connection, show_id: str, alloc_id: str) -> None:
    """Delete a subscription."""
    connection.execute(_DELETE_SUBSCRIPTION, {"show": show_id, "alloc": alloc_id})


def insert_limit(connection: Connection, limit_id: str, name: str, most: int) -> None:
    """A new limit of ``most`` running frames."""
    connection.execute(_INSERT_LIMIT, {"limit": limit_id, "name": name, "max": most})


def set_limit(connection: Connection, limit_id: str, most: int) -> None:
    """Change how many frames may run under a limit."""
    connection.execute(_SET_LIMIT, {"limit": limit_id, "max": most})


def pending_jobs_under_limit(connection: Connection, limit_id: str) -> int:
    """How many pending jobs have layers under a limit."""
    return int(connection.execute(_LIMIT_USERS, {"limit": limit_id}).scalar_one())


def delete_limit(connection: Connection, limit_id: str) -> None:
    """Delete a limit and take its layers out from under it."""
    connection.execute(_DELETE_LIMIT_LAYERS, {"limit": limit_id})
    connection.execute(_DELETE_LIMIT, {"limit": limit_id})


# What people call things: rows by name or id, and the names that come near a mistyped one.

NAMES_COMPARED = 500
"""Names fetched as candidates for a suggestion, those of about the same length first."""


class Kind(StrEnum):
    """What a name may stand for."""

    SHOW = "show"
    FACILITY = "facility"
    ALLOCATION = "allocation"
    LIMIT = "limit"
    HOST = "host"
    JOB = "job"


@dataclass(frozen=True, slots=True)
class NamedRow:
    """A row that was asked for by name or id."""

    id: str
    name: str


_TABLES = {
    Kind.SHOW: ("show", "pk_show"),
    Kind.FACILITY: ("facility", "pk_facility"),
    Kind.ALLOCATION: ("alloc", "pk_alloc"),
    Kind.LIMIT: ("limit_record", "pk_limit_record"),
    Kind.HOST: ("host", "pk_host"),
    Kind.JOB: ("job", "pk_job"),
}


def _find(kind: Kind) -> TextClause:
    table, key = _TABLES[kind]
    also = {Kind.HOST: "OR str_fqdn = :text", Kind.JOB: "OR str_name = lower(:text)"}.get(kind, "")
    # Of several jobs of one name the live one counts, else the last.
    order = {Kind.JOB: "str_visible_name IS NOT NULL DESC, ts_started DESC"}.get(kind, key)
    return text(
        f"""
        SELECT {key} AS id, str_name AS name FROM {table}
         WHERE str_name = :text OR {key} = :text {also}
         ORDER BY ({key} = :text) DESC, (str_name = :text) DESC, {order} LIMIT 1
        """  # noqa: S608 - only our own constants
    )


def _similar(kind: Kind) -> TextClause:
    table, _ = _TABLES[kind]
    only = "AND str_visible_name IS NOT NULL" if kind is Kind.JOB else ""
    return text(
        f"""
        SELECT str_name FROM {table}
         WHERE (lower(left(str_name, 1)) = lower(left(:text, 1)) OR lower(right(str_name, 1)) = lower(right(:text, 1))
                OR position(lower(:text) IN lower(str_name)) > 0) {only}
         ORDER BY position(lower(:text) IN lower(str_name)) > 0 DESC, abs(length(str_name) - length(:text)), str_name
         LIMIT :most
        """  # noqa: S608 - only our own constants
    )


_FIND = {kind: _find(kind) for kind in Kind}
_SIMILAR = {kind: _similar(kind) for kind in Kind}


def find_row(connection: Connection, kind: Kind, name_or_id: str) -> NamedRow | None:
    """The row of this name or id. A job's name means the live job, else the last one that was called so."""
    row = connection.execute(_FIND[kind], {"text": name_or_id}).one_or_none()
    return None if row is None else NamedRow(row.id, row.name)


def similar_names(connection: Connection, kind: Kind, name: str) -> Sequence[str]:
    """Names that may have been meant by ``name``, as candidates for a closer comparison."""
    return list(connection.execute(_SIMILAR[kind], {"text": name, "most": NAMES_COMPARED}).scalars())


# Whose work a cap stands over: the shows to look at again when it has changed.

_SHOWS_UNDER_CAP = text(
    """
    SELECT s.pk_show
    FROM show s
    JOIN (
        SELECT pk_show FROM folder WHERE pk_folder = ANY(CAST(:folders AS varchar[]))
        UNION
        SELECT pk_show FROM job WHERE pk_job = ANY(CAST(:jobs AS varchar[])) AND str_state = 'PENDING'
        UNION
        SELECT j.pk_show
        FROM layer_limit ll
        JOIN layer_stat ls ON ls.pk_layer = ll.pk_layer AND ls.int_waiting_count > 0
        JOIN job j ON j.pk_job = ls.pk_job AND j.str_state = 'PENDING'
        WHERE ll.pk_limit_record = ANY(CAST(:limits AS varchar[]))
    ) capped USING (pk_show)
    WHERE s.b_scheduler_managed
    """
)


def shows_under(
    connection: Connection, *, folders: Collection[str], jobs: Collection[str], limits: Collection[str]
) -> frozenset[str]:
    """The managed shows of these folders and pending jobs, and those with frames that wait under these limits."""
    parameters = {"folders": list(folders), "jobs": list(jobs), "limits": list(limits)}
    return frozenset(connection.execute(_SHOWS_UNDER_CAP, parameters).scalars())
