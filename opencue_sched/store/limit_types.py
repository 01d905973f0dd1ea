"""What a limit counts and how strictly, in any schema.

Cuebot's V49 gave limits a type, an enforcement, a soft value and reports; our own schema has the same columns. They are
found by name in the row as JSON, so that a Cuebot may be upgraded beside us at any moment. Before V49 a limit counts
machines where ``b_host_limit`` is true, of which V49 makes the type HOST.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from sqlalchemy import Connection, text

MOST = "greatest(0, coalesce(limit_record.int_max_value, 0))"
"""What a limit may count: a limit without a value or below zero admits nothing, as in OpenCue's comparison."""

# How each limit counts, one row for each row of limit_record. ``machines`` says how many machines may hold a limit that
# counts machines, ``frames`` how many frames may run under one that counts frames; -1 is any number, and the other of
# the two is NULL. Both are NULL for a limit of frames that is nothing but its maximum. A report that is older than the
# limit's time to live opens the limit. A soft value is a number of machines.
_TERMS = f"""
    SELECT said.type = 'HOST' AS counts_machines, said.reported_at,
           CASE WHEN said.type <> 'HOST' THEN NULL
                WHEN said.is_open THEN -1
                WHEN said.soft >= 0 THEN least(said.soft, {MOST})
                ELSE {MOST} END AS machines,
           CASE WHEN said.type = 'HOST' OR said.is_plain THEN NULL
                WHEN said.is_open THEN -1
                ELSE {MOST} END AS frames,
           CASE WHEN said.enforcement = 'ENFORCED'
                THEN CAST(extract(epoch FROM said.reported_at + said.life) AS bigint) END AS opens_at,
           CASE WHEN said.type <> 'HOST' AND said.is_plain THEN ''
                ELSE concat_ws(' ', said.type, said.enforcement, said.soft, {MOST}, said.life,
                               coalesce(CAST(extract(epoch FROM said.reported_at) AS text), 'unreported'),
                               said.reported_at + said.life < clock_timestamp()) END AS terms
      FROM (SELECT *, enforcement = 'ENFORCED' AND reported_at IS NULL AS is_plain,
                   enforcement <> 'ENFORCED' OR coalesce(reported_at + life < clock_timestamp(), false) AS is_open
              FROM (SELECT coalesce(stored.columns ->> 'str_type',
                                    CASE WHEN limit_record.b_host_limit THEN 'HOST' ELSE 'FRAME' END) AS type,
                           coalesce(stored.columns ->> 'str_enforcement', 'ENFORCED') AS enforcement,
                           coalesce(CAST(stored.columns ->> 'int_soft_value' AS bigint), -1) AS soft,
                           CAST(stored.columns ->> 'ts_reported' AS timestamptz) AS reported_at,
                           make_interval(secs => nullif(CAST(stored.columns ->> 'int_report_ttl' AS bigint), 0)) AS life
                      FROM (SELECT to_jsonb(limit_record) AS columns) AS stored) AS read) AS said
"""  # noqa: S608 - only our own constants

TERMS = f"CROSS JOIN LATERAL ({_TERMS}) AS terms"
"""A join for limit_record that adds how a limit counts: ``counts_machines``, ``reported_at`` (NULL: never),
``machines`` (NULL where the limit counts frames), ``frames`` (NULL where the limit counts machines, or is nothing but
its maximum), ``opens_at`` (when the report of the limit is too old, in epoch seconds; NULL: never) and ``terms``: all
that decides how the limit counts, as a text that is another after each change; empty for a limit of frames that is
nothing but its maximum."""

NAME_ON_HOST = """
    CASE WHEN {name} ~ '^[0-9.]+$' OR {name} LIKE '%:%' THEN lower(btrim({name}))
         ELSE split_part(lower(btrim({name})), '.', 1) END
"""
"""SQL for a machine's name in the form that hosts and licence servers have in common: without case and domain; an
address stays whole."""

# The holders of limits, as licence servers have said. A machine that is no host keeps the name that the server has for
# it. Of several hosts of one name, such as rows that an older name of a machine left, one that runs frames comes first,
# then one that is UP.
_REPORTED = text(
    f"""
    SELECT held.pk_limit_record AS limit_id, held.int_tokens AS tokens,
           coalesce((SELECT array_agg(pk_host ORDER BY EXISTS (SELECT FROM proc WHERE proc.pk_host = host.pk_host) DESC,
                                                       stat.str_state IS NOT DISTINCT FROM 'UP' DESC, pk_host)
                       FROM host LEFT JOIN host_stat stat USING (pk_host)
                      WHERE {NAME_ON_HOST.format(name="host.str_name")} = held.name), ARRAY[held.name]) AS machines
      FROM (SELECT pk_limit_record, {NAME_ON_HOST.format(name="str_reported_name")} AS name, int_tokens
              FROM limit_host WHERE pk_limit_record = ANY(CAST(:limits AS varchar[]))) held
    """  # noqa: S608 - only our own constants
)
# The database's clock, in epoch seconds.
_NOW = text("SELECT CAST(extract(epoch FROM clock_timestamp()) AS double precision)")

# Whether the schema has types of limits (V49).
_HAS_TYPES = text(
    "SELECT EXISTS (SELECT FROM pg_attribute WHERE attrelid = to_regclass('limit_record') AND attname = 'str_type'"
    " AND NOT attisdropped)"
)


def type_column(connection: Connection, limit_type: str) -> dict[str, object]:
    """The column, and its value, that makes a limit count machines (HOST) or frames (FRAME) in this schema."""
    if connection.scalar(_HAS_TYPES):
        return {"str_type": limit_type}
    return {"b_host_limit": limit_type == "HOST"}


@dataclass(slots=True)
class LicenceReport:
    """What a licence server said of a limit."""

    machines: set[str] = field(default_factory=set)
    """The machines that hold the limit: ids of hosts, and names of machines that are no hosts here."""
    namesakes: set[str] = field(default_factory=set)
    """Other hosts of the same names. They hold the limit as well, and the report counts once."""
    tokens: int = 0
    """How many tokens (licences) are taken, of all machines together."""


def reports_of(connection: Connection, limit_ids: Collection[str]) -> dict[str, LicenceReport]:
    """The licence servers' reports of these limits, by limit id. To be called only for limits that were reported: an
    older schema has no table of reports."""
    found = {limit_id: LicenceReport() for limit_id in limit_ids}
    for row in connection.execute(_REPORTED, {"limits": list(limit_ids)}) if limit_ids else ():
        found[row.limit_id].machines.add(row.machines[0])
        found[row.limit_id].namesakes.update(row.machines[1:])
        found[row.limit_id].tokens += row.tokens
    return found


def database_seconds(connection: Connection) -> float:
    """What the database's clock says now, in epoch seconds."""
    return float(connection.scalar(_NOW))
