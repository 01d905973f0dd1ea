"""The rows that a licence server's report makes: who holds a limit, and when the server was asked.

Written only where there is no Cuebot: one of V49 takes such reports itself. The holders are written first, and the
limit's row last, because its trigger waits for the commits of bookings that are under way.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, text

from opencue_sched.store.limit_types import NAME_ON_HOST

TOO_EARLY_SECONDS = 5
"""A report that was asked for less than this after the last one of its limit is left out, as a Cuebot does."""

# Whether the schema keeps what licence servers report.
_HAS_HOLDERS = text("SELECT to_regclass('limit_host') IS NOT NULL")
# The time at which a licence server was asked, by the reporter's clock but never later than the database's.
_MOMENT = text("SELECT least(CAST(:asked AS timestamptz), clock_timestamp())")
# The limits of these names, locked: of two reports the second one waits here, and sees what the first one wrote.
_LOCK = text(
    f"""
    SELECT pk_limit_record AS id, str_name AS name, ts_reported AS reported_at,
           CASE WHEN ts_reported > :asked THEN 'late'
                WHEN ts_reported > :asked - make_interval(secs => {TOO_EARLY_SECONDS}) THEN 'early'
                ELSE 'taken' END AS outcome
      FROM limit_record WHERE str_name = ANY(CAST(:names AS varchar[]))
     ORDER BY pk_limit_record FOR NO KEY UPDATE
    """  # noqa: S608 - only our own constant
)
# What a report says, a row for each limit and machine. Of several names that are one machine's (NAME_ON_HOST cuts the
# domain and ignores case), the one with the most tokens counts.
_SAID = f"""
    SELECT DISTINCT ON (pk_limit_record, str_host_name) said.*
      FROM (SELECT limit_id AS pk_limit_record, {NAME_ON_HOST.format(name="host")} AS str_host_name,
                   btrim(host) AS str_reported_name, tokens AS int_tokens, "user" AS str_user
              FROM json_to_recordset(CAST(:holders AS json))
                   AS row(limit_id varchar, host varchar, tokens int, "user" varchar)) said
     ORDER BY pk_limit_record, str_host_name, int_tokens DESC, str_reported_name
"""  # noqa: S608 - only our own constant
# Delete the holders of these limits that the report does not name.
_DELETE_OTHERS = text(
    f"""
    DELETE FROM limit_host held
     WHERE held.pk_limit_record = ANY(CAST(:limits AS varchar[]))
       AND NOT EXISTS (SELECT FROM ({_SAID}) said
                        WHERE said.pk_limit_record = held.pk_limit_record
                          AND said.str_host_name = held.str_host_name)
    """  # noqa: S608 - only our own constants
)
# Write the holders that the report names, where they are new or changed.
_WRITE = text(
    f"""
    INSERT INTO limit_host AS held (pk_limit_host, pk_limit_record, str_host_name, str_reported_name, int_tokens,
                                    str_user, ts_reported)
    SELECT CAST(gen_random_uuid() AS varchar), pk_limit_record, str_host_name, str_reported_name, int_tokens, str_user,
           CAST(:asked AS timestamptz)
      FROM ({_SAID}) said
    ON CONFLICT (pk_limit_record, str_host_name) DO UPDATE
       SET str_reported_name = excluded.str_reported_name, int_tokens = excluded.int_tokens,
           str_user = excluded.str_user, ts_reported = excluded.ts_reported
     WHERE (held.str_reported_name, held.int_tokens, held.str_user)
           IS DISTINCT FROM (excluded.str_reported_name, excluded.int_tokens, excluded.str_user)
    """  # noqa: S608 - only our own constants
)
# Note when these limits were reported, and by what.
_STAMP = text(
    """
    UPDATE limit_record SET ts_reported = :asked, str_report_source = :source
     WHERE pk_limit_record = ANY(CAST(:limits AS varchar[]))
    """
)


def has_holders(connection: Connection) -> bool:
    """Whether the database has the table of the holders of limits."""
    return bool(connection.scalar(_HAS_HOLDERS))


def not_later_than_now(connection: Connection, asked_at: datetime) -> datetime:
    """``asked_at``, or the time of the database's clock where that is earlier."""
    moment: datetime = connection.execute(_MOMENT, {"asked": asked_at}).scalar_one()
    return moment


def lock_limits(connection: Connection, names: Collection[str], asked_at: datetime) -> list[Row[Any]]:
    """Lock the limits of these names and judge a report of them, for which the licence server was asked at
    ``asked_at``.

    A row has ``id``, ``name``, ``reported_at`` of the last report, and the ``outcome`` of this one: ``taken``,
    ``early`` (too soon after the last), or ``late`` (the last one is of a later time).
    """
    return list(connection.execute(_LOCK, {"names": sorted(names), "asked": asked_at}))


def replace_holders(
    connection: Connection,
    limit_ids: Collection[str],
    holders: Iterable[tuple[str, str, int, str | None]],
    asked_at: datetime,
    source: str | None,
) -> None:
    """Write ``holders`` (limit id, name of a machine, tokens, user) as all holders of these limits. The caller has
    locked the limits (lock_limits)."""
    fields = ("limit_id", "host", "tokens", "user")
    rows = json.dumps([dict(zip(fields, holder, strict=True)) for holder in holders])
    ids = sorted(limit_ids)
    connection.execute(_DELETE_OTHERS, {"limits": ids, "holders": rows})
    connection.execute(_WRITE, {"holders": rows, "asked": asked_at})
    connection.execute(_STAMP, {"limits": ids, "asked": asked_at, "source": source})
