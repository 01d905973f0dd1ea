"""Limits (licences and the like): how many frames may run at once under a name, and how many do.

Cuebots after V47 give a limit a type (frames or hosts) and say how strictly it is meant (enforced, advisory, disabled).
No limit is taken otherwise here than before: it bounds running frames, always. Hosts are never more than the frames on
them, so that errs on the side of the licence, whatever those columns are called and say; they are told to people.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, text

# Counted from the procs, which are few and live, rather than from the layers sharing a limit, most of which finished
# long ago. A layer listed twice under one limit counts once.
_LIMITS = text(
    """
    SELECT r.pk_limit_record, r.str_name, r.int_max_value, COALESCE(u.running, 0) AS running
    FROM limit_record r
    LEFT JOIN (
        SELECT once.pk_limit_record, sum(once.running) AS running
        FROM (
            SELECT DISTINCT ll.pk_limit_record, p.pk_layer, p.running
            FROM (
                SELECT pk_layer, count(*) AS running
                FROM proc
                WHERE EXISTS (SELECT 1 FROM limit_record)
                GROUP BY pk_layer
            ) p
            JOIN layer_limit ll ON ll.pk_layer = p.pk_layer
        ) once
        GROUP BY once.pk_limit_record
    ) u ON u.pk_limit_record = r.pk_limit_record
    """
)

_ROWS = text("SELECT str_name, to_jsonb(limit_record) FROM limit_record ORDER BY str_name")
_HOLDS = text("SELECT name, to_regclass(name) IS NOT NULL FROM unnest(ARRAY['limit_host', 'limit_usage']) AS name")
_AS_HERE = ("frame", "enforced")


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit_record. ``running`` counts the procs of every layer under it, of managed and unmanaged shows alike.

    ``max_value`` is never negative: a limit without a value or below zero admits nothing, as in Cuebot, whose
    comparison with it is never true.
    """

    id: str
    name: str
    max_value: int
    running: int

    @property
    def full(self) -> bool:
        return self.running >= self.max_value


@dataclass(frozen=True, slots=True)
class OtherwiseMeant:
    """A limit of which a newer Cuebot says something that this scheduler does not follow: column -> what it says."""

    name: str
    says: Mapping[str, str]


def limits_meant_otherwise(connection: Connection, columns: Collection[str]) -> list[OtherwiseMeant]:
    """Limits of which one of ``columns`` (SchemaFacts.limit_columns) says something else than that frames are counted
    and the limit is enforced. Only words are looked at: numbers and times do not say what a limit is."""
    found = []
    for name, row in connection.execute(_ROWS):
        words = {column: row[column] for column in columns if isinstance(row.get(column), str)}
        says = {
            column: word
            for column, word in words.items()
            if column.startswith("str_") and word and word.lower() not in _AS_HERE
        }
        if says:
            found.append(OtherwiseMeant(name, says))
    return found


def holds_of_limits(connection: Connection) -> list[str]:
    """The tables in which a newer Cuebot notes who holds a limit, as far as they are there."""
    return [name for name, there in connection.execute(_HOLDS) if there]


def fetch_limits(connection: Connection) -> Mapping[str, Limit]:
    """Every limit by id, in one statement."""
    return {
        row.pk_limit_record: Limit(row.pk_limit_record, row.str_name, max(0, row.int_max_value or 0), int(row.running))
        for row in connection.execute(_LIMITS)
    }
