"""What a limit counts and how strictly, in any schema.

Cuebot's V49 gave limits a type, an enforcement, a soft value and reports; our own schema has the same columns. They are
found by name in the row as JSON, so that a Cuebot may be upgraded beside us at any moment. Before V49 a limit counts
machines where ``b_host_limit`` is true, of which V49 makes the type HOST.
"""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection, text

MOST = "greatest(0, coalesce(limit_record.int_max_value, 0))"
"""What a limit may count: a limit without a value or below zero admits nothing, as in OpenCue's comparison."""

# One row for each of limit_record. ``machines``: so many may hold it, -1 any number, NULL of one that counts frames. A
# report that is older than the limit's time to live opens it.
_TERMS = f"""
    SELECT said.type = 'HOST' AS counts_machines, said.reported_at IS NOT NULL AS is_reported,
           CASE WHEN said.type <> 'HOST' THEN NULL
                WHEN said.enforcement <> 'ENFORCED' OR said.reported_at + said.life < clock_timestamp() THEN -1
                WHEN said.soft >= 0 THEN least(said.soft, {MOST})
                ELSE {MOST} END AS machines,
           CASE WHEN said.type = 'HOST' AND said.enforcement = 'ENFORCED'
                THEN CAST(extract(epoch FROM said.reported_at + said.life) AS bigint) END AS opens_at,
           CASE WHEN said.type <> 'HOST' THEN ''
                ELSE concat_ws(' ', said.type, said.enforcement, said.soft, {MOST}, said.life,
                               coalesce(CAST(extract(epoch FROM said.reported_at) AS text), 'unreported'),
                               said.reported_at + said.life < clock_timestamp()) END AS terms
      FROM (SELECT coalesce(stored.columns ->> 'str_type',
                            CASE WHEN limit_record.b_host_limit THEN 'HOST' ELSE 'FRAME' END) AS type,
                   coalesce(stored.columns ->> 'str_enforcement', 'ENFORCED') AS enforcement,
                   coalesce(CAST(stored.columns ->> 'int_soft_value' AS bigint), -1) AS soft,
                   CAST(stored.columns ->> 'ts_reported' AS timestamptz) AS reported_at,
                   make_interval(secs => nullif(CAST(stored.columns ->> 'int_report_ttl' AS bigint), 0)) AS life
              FROM (SELECT to_jsonb(limit_record) AS columns) AS stored) AS said
"""  # noqa: S608 - only our own constants

TERMS = f"CROSS JOIN LATERAL ({_TERMS}) AS terms"
"""To be joined to limit_record: ``counts_machines``, ``is_reported``, ``machines`` (NULL of a limit of frames),
``opens_at`` (when its report is too old, in epoch seconds; NULL: never) and ``terms``: all that decides how it counts,
as a text that is another after each change; empty for a limit of frames."""

NAME_ON_HOST = """
    CASE WHEN {name} ~ '^[0-9.]+$' OR {name} LIKE '%:%' THEN lower(btrim({name}))
         ELSE split_part(lower(btrim({name})), '.', 1) END
"""
"""A machine's name as hosts and licence servers have it in common: without case and domain; an address whole."""

# The machines that hold limits as licence servers have said. One that is no host is named as it is.
_REPORTED = text(
    f"""
    SELECT held.pk_limit_record AS limit_id, coalesce(host.pk_host, held.name) AS machine
      FROM (SELECT pk_limit_record, {NAME_ON_HOST.format(name="str_reported_name")} AS name
              FROM limit_host WHERE pk_limit_record = ANY(CAST(:limits AS varchar[]))) held
      LEFT JOIN host ON {NAME_ON_HOST.format(name="host.str_name")} = held.name
    """  # noqa: S608 - only our own constants
)
_REPORTED_LIMITS = text(
    f"SELECT pk_limit_record FROM limit_record {TERMS} WHERE terms.counts_machines AND terms.is_reported"  # noqa: S608
)

_HAS_TYPES = text(
    "SELECT EXISTS (SELECT FROM pg_attribute WHERE attrelid = to_regclass('limit_record') AND attname = 'str_type'"
    " AND NOT attisdropped)"
)


def type_column(connection: Connection, limit_type: str) -> dict[str, object]:
    """The column, and its value, that makes a limit count machines (HOST) or frames (FRAME) in this schema."""
    if connection.scalar(_HAS_TYPES):
        return {"str_type": limit_type}
    return {"b_host_limit": limit_type == "HOST"}


def reported_machines(connection: Connection, limit_ids: Collection[str]) -> dict[str, set[str]]:
    """The machines that hold these limits by the licence servers' reports: ids of hosts, and names of what is none. To
    be asked of limits that were reported: an older schema has no reports."""
    found: dict[str, set[str]] = {limit_id: set() for limit_id in limit_ids}
    for row in connection.execute(_REPORTED, {"limits": list(limit_ids)}) if limit_ids else ():
        found[row.limit_id].add(row.machine)
    return found


def every_reported_machine(connection: Connection) -> dict[str, list[str]]:
    """The same of all limits that were reported, as parameters: each machine (``machines``) beside the limit that it
    holds (``limits``)."""
    found = reported_machines(connection, list(connection.execute(_REPORTED_LIMITS).scalars()))
    pairs = [(limit_id, machine) for limit_id, machines in found.items() for machine in machines]
    return {"limits": [limit_id for limit_id, _ in pairs], "machines": [machine for _, machine in pairs]}
