"""How much of each limit is in use, and which machines hold it, as people are shown it: counted from the procs and from
what licence servers have reported.

Counted as Cuebot's V49 counts. What a licence server reported is *settled*. What runs and the report need not show yet
is *pending*: procs that started later than a settle window before the licence server was asked, or all where it never
was. Of a limit of machines a machine counts once: settled if it is reported, else pending if such a proc is on it. The
statements name no column that a Cuebot before V49 has not, and of its tables only those that are there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

from sqlalchemy import Connection, Row, TextClause, text

from opencue_sched.store.limit_reports import has_holders
from opencue_sched.store.limit_types import MOST, NAME_ON_HOST

# The rows of limits, whatever the schema; a soft value is one of machines, and never above the maximum.
_LIMITS = f"""
    SELECT read.*, CASE WHEN counts_machines AND soft >= 0 THEN least(soft, max_value) ELSE max_value END AS threshold,
           enforcement <> 'ENFORCED' OR coalesce(report_age > ttl, false) AS is_open,
           CASE WHEN enforcement = 'ENFORCED' THEN coalesce(report_age > ttl, false) ELSE false END AS report_is_too_old
      FROM (SELECT pk_limit_record AS id, str_name AS name, {MOST} AS max_value,
                   coalesce(stored.columns ->> 'str_type',
                            CASE WHEN b_host_limit THEN 'HOST' ELSE 'FRAME' END) = 'HOST' AS counts_machines,
                   coalesce(stored.columns ->> 'str_enforcement', 'ENFORCED') AS enforcement,
                   coalesce(CAST(stored.columns ->> 'int_soft_value' AS bigint), -1) AS soft,
                   CAST(stored.columns ->> 'ts_reported' AS timestamptz) AS reported_at,
                   CAST(extract(epoch FROM clock_timestamp() - CAST(stored.columns ->> 'ts_reported' AS timestamptz))
                        AS double precision) AS report_age,
                   stored.columns ->> 'str_report_source' AS report_source,
                   nullif(CAST(stored.columns ->> 'int_report_ttl' AS bigint), 0) AS ttl,
                   CAST(stored.columns ->> 'int_exit_status' AS bigint) AS exit_status,
                   coalesce(CAST(stored.columns ->> 'int_delay_minutes' AS bigint), 0) AS delay_minutes,
                   coalesce(CAST(stored.columns ->> 'b_auto_tag' AS boolean), true) AS auto_tag
              FROM limit_record CROSS JOIN LATERAL (SELECT to_jsonb(limit_record) AS columns) AS stored) AS read
"""  # noqa: S608 - only our own constants
# The machines that hold each limit by its last report; one machine once, whatever names it was reported under.
_REPORTED = f"""
    SELECT pk_limit_record AS limit_id, {NAME_ON_HOST.format(name="str_reported_name")} AS machine,
           max(str_reported_name) AS reported_name, sum(int_tokens) AS tokens, min(limit_host.ts_reported) AS since,
           string_agg(DISTINCT str_user, ', ' ORDER BY str_user) AS users
      FROM limit_host JOIN limits ON limits.id = pk_limit_record AND limits.reported_at IS NOT NULL
     GROUP BY pk_limit_record, 2
"""  # noqa: S608 - only our own constants
# The same without rows, for a schema that keeps no reports.
_NOTHING_REPORTED = """
    SELECT CAST(NULL AS varchar) AS limit_id, CAST(NULL AS varchar) AS machine, CAST(NULL AS varchar) AS reported_name,
           CAST(NULL AS bigint) AS tokens, CAST(NULL AS timestamptz) AS since, CAST(NULL AS text) AS users WHERE false
"""
# What runs on each host under each limit. From the procs, which are few and live, rather than from the layers, most of
# which finished long ago. A layer listed twice under one limit counts once.
_RUNNING = f"""
    SELECT bound.limit_id, proc.pk_host, min({NAME_ON_HOST.format(name="host.str_name")}) AS machine,
           min(host.str_name) AS host, count(*) AS frames,
           count(*) FILTER (WHERE limits.reported_at IS NULL
                               OR proc.ts_dispatched > limits.reported_at - make_interval(secs => :settle_window))
               AS pending,
           min(proc.ts_dispatched) AS since, string_agg(DISTINCT job.str_user, ', ' ORDER BY job.str_user) AS users
      FROM (SELECT DISTINCT layer_limit.pk_layer, layer_limit.pk_limit_record AS limit_id
              FROM (SELECT DISTINCT pk_layer FROM proc WHERE EXISTS (SELECT FROM limit_record)) live
              JOIN layer_limit USING (pk_layer)) bound
      JOIN limits ON limits.id = bound.limit_id
      JOIN proc USING (pk_layer) JOIN host USING (pk_host) JOIN job ON job.pk_job = proc.pk_job
     GROUP BY bound.limit_id, proc.pk_host
"""  # noqa: S608 - only our own constants
# Each limit with what holds it: what its report says (settled), and frames that the report may not show (pending).
_USE = """
    WITH limits AS MATERIALIZED ({limits}), reported AS MATERIALIZED ({reported}), running AS MATERIALIZED ({running})
    SELECT used.*, CASE WHEN NOT is_open THEN greatest(0, threshold - running) END AS "left"
      FROM (SELECT limits.*, figures.settled + figures.pending AS running, figures.*
              FROM limits
              LEFT JOIN (SELECT limit_id, sum(tokens) AS tokens, count(*) AS machines FROM reported GROUP BY 1)
                        of_report ON of_report.limit_id = limits.id
              LEFT JOIN (SELECT running.limit_id, sum(running.frames) AS frames, sum(running.pending) AS pending,
                                count(*) FILTER (WHERE reported.machine IS NULL) AS machines,
                                count(*) FILTER (WHERE reported.machine IS NULL AND running.pending > 0)
                                    AS pending_machines
                           FROM running LEFT JOIN reported USING (limit_id, machine) GROUP BY 1)
                        of_frames ON of_frames.limit_id = limits.id
             CROSS JOIN LATERAL (
                   SELECT CAST(coalesce(CASE WHEN counts_machines THEN of_report.machines ELSE of_report.tokens END, 0)
                               AS bigint) AS settled,
                          CAST(coalesce(CASE WHEN counts_machines THEN of_frames.pending_machines
                                             ELSE of_frames.pending END, 0) AS bigint) AS pending,
                          CAST(coalesce(of_frames.frames, 0) AS bigint) AS frames,
                          CAST(coalesce(of_report.machines, 0) + coalesce(of_frames.machines, 0) AS bigint)
                              AS machines) figures) used
"""
# Each machine that holds a limit: it is reported, or a frame of a layer under it runs there, however long.
_HOLDERS = """
    WITH limits AS MATERIALIZED ({limits}), reported AS MATERIALIZED ({reported}), running AS MATERIALIZED ({running})
    SELECT limits.id AS limit_id, limits.name AS limit, held.host_id, held.host_id IS NOT NULL AS is_host,
           coalesce(held.host, held.reported_name) AS machine, CAST(coalesce(held.frames, 0) AS bigint) AS frames,
           CAST(coalesce(held.tokens, 0) AS bigint) AS tokens,
           CASE WHEN held.tokens IS NULL THEN 'frames' WHEN held.frames IS NULL THEN 'report' ELSE 'both' END AS why,
           held.since, held.users
      FROM limits JOIN (
           SELECT limit_id, running.pk_host AS host_id, running.host, reported.reported_name, running.frames,
                  reported.tokens, least(running.since, reported.since) AS since,
                  coalesce(nullif(concat_ws(', ', reported.users, CASE
                      WHEN reported.users IS DISTINCT FROM running.users THEN running.users END), ''), '') AS users
             FROM running LEFT JOIN reported USING (limit_id, machine)
           UNION ALL
           SELECT limit_id, named.pk_host, named.str_name, reported.reported_name, NULL, reported.tokens,
                  reported.since, coalesce(reported.users, '')
             FROM reported
             LEFT JOIN (SELECT min(pk_host) AS pk_host, min(str_name) AS str_name, {named} AS machine
                          FROM host GROUP BY 3) named USING (machine)
            WHERE NOT EXISTS (SELECT FROM running
                               WHERE running.limit_id = reported.limit_id AND running.machine = reported.machine)
           ) held ON held.limit_id = limits.id
     WHERE (CAST(:limits AS varchar[]) IS NULL OR limits.id = ANY(CAST(:limits AS varchar[])))
       AND (CAST(:host AS varchar) IS NULL OR held.host_id = :host)
     ORDER BY limits.name, held.host_id IS NULL, coalesce(held.host, held.reported_name)
"""


@cache
def _statement(template: str, *, has_holders: bool) -> str:
    """A statement about limits, by whether the schema has the table of holders (``limit_host``)."""
    return template.format(
        limits=_LIMITS,
        reported=_REPORTED if has_holders else _NOTHING_REPORTED,
        running=_RUNNING,
        named=NAME_ON_HOST.format(name="str_name"),
    )


@cache
def _compiled(template: str, *, has_holders: bool) -> TextClause:
    """The statement for SQLAlchemy, made once for each schema."""
    return text(_statement(template, has_holders=has_holders))


def limit_use(*, has_holders: bool) -> str:
    """The statement of `fetch_limits`, as a subquery for a statement that binds ``settle_window`` (seconds)."""
    return _statement(_USE, has_holders=has_holders)


def fetch_limits(connection: Connection, settle_window_seconds: float, *, has_holders: bool) -> dict[str, Row[Any]]:
    """Every limit by id, with what uses it in managed and unmanaged shows alike. ``has_holders``: whether the database
    has the table of the holders of limits.

    - ``id``, ``name`` and ``max_value``; ``counts_machines``: whether it counts machines, otherwise frames.
    - ``running``: how many use it, of which ``settled`` are reported and ``pending`` are not yet.
    - ``threshold``: how many may use it before nothing else may start, except on a machine that holds it.
    - ``left``: how many more may; None: any number, because the limit ``is_open``.
    - ``frames``: how many frames run under it now; ``machines``: how many machines hold it.
    - From its row: ``enforcement``, ``soft`` (-1: none), ``reported_at``, ``report_age`` and ``ttl`` (seconds; None:
      for ever), ``report_is_too_old``, ``report_source``, ``exit_status``, ``delay_minutes`` and ``auto_tag``.
    """
    statement = _compiled(_USE, has_holders=has_holders)
    return {row.id: row for row in connection.execute(statement, {"settle_window": settle_window_seconds})}


def list_holders(
    connection: Connection, *, limit_ids: Collection[str] | None = None, host_id: str | None = None
) -> Sequence[Row[Any]]:
    """The machines that hold these limits, or the limits that a host holds, a row for each pair.

    A row has ``limit``, ``machine``, ``host_id`` (None where the machine is no host here), ``why`` (frames, report or
    both), how many ``frames`` run there, the reported ``tokens``, since when (``since``) and for whom (``users``).
    """
    wanted = {"limits": None if limit_ids is None else list(limit_ids), "host": host_id}
    statement = _compiled(_HOLDERS, has_holders=has_holders(connection))
    # All that runs there is asked for, whether or not it is pending.
    return connection.execute(statement, {**wanted, "settle_window": 0}).all()


# Whether there are limits at all.
_HAS_LIMITS = text("SELECT to_regclass('limit_record') IS NOT NULL")
# The limits that b_host_limit makes count machines.
_FLAGGED = text("SELECT str_name FROM limit_record WHERE b_host_limit ORDER BY str_name")
# Whether the schema has exit statuses of limits (V49).
_HAS_TERMS = text(
    "SELECT EXISTS (SELECT FROM pg_attribute WHERE attrelid = to_regclass('limit_record')"
    " AND attname = 'int_exit_status' AND NOT attisdropped)"
)
# Other limits with this exit status.
_OF_STATUS = text("SELECT str_name FROM limit_record WHERE int_exit_status = :status AND pk_limit_record <> :limit")


def has_terms(connection: Connection) -> bool:
    """Whether limits have more than a maximum: Cuebot's V49, or our own schema."""
    return bool(connection.scalar(_HAS_TERMS))


def flagged_limits(connection: Connection) -> list[str]:
    """The names of limits that count machines because of ``b_host_limit``, which decides in a schema before V49; empty
    where limits have a type."""
    if not connection.scalar(_HAS_LIMITS) or has_terms(connection):
        return []
    return list(connection.execute(_FLAGGED).scalars())


def limit_of_exit_status(connection: Connection, status: int, *, but: str = "") -> str | None:
    """The name of the limit whose shortage frames report by this exit status. ``but``: the id of a limit to leave
    out."""
    name: str | None = connection.scalar(_OF_STATUS, {"status": status, "limit": but})
    return name
