"""Limits (licences and the like): how many frames may run at once under a name, and how many do."""

from __future__ import annotations

from collections.abc import Mapping
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


def fetch_limits(connection: Connection) -> Mapping[str, Limit]:
    """Every limit by id, in one statement."""
    return {
        row.pk_limit_record: Limit(row.pk_limit_record, row.str_name, max(0, row.int_max_value or 0), int(row.running))
        for row in connection.execute(_LIMITS)
    }
