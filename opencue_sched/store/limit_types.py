"""What a limit counts and how strictly, in any schema.

Cuebot's V49 gave limits a type, an enforcement, a soft value and reports; our own schema has the same columns. They are
found by name in the row as JSON, so that a Cuebot may be upgraded beside us at any moment. Before V49 a limit counts
machines where ``b_host_limit`` is true, of which V49 makes the type HOST.
"""

from __future__ import annotations

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

_HAS_TYPES = text(
    "SELECT EXISTS (SELECT FROM pg_attribute WHERE attrelid = to_regclass('limit_record') AND attname = 'str_type'"
    " AND NOT attisdropped)"
)


def type_column(connection: Connection, limit_type: str) -> dict[str, object]:
    """The column, and its value, that makes a limit count machines (HOST) or frames (FRAME) in this schema."""
    if connection.scalar(_HAS_TYPES):
        return {"str_type": limit_type}
    return {"b_host_limit": limit_type == "HOST"}
