"""Rows looked up by their keys, whatever the statistics of a table say."""

from __future__ import annotations

from sqlalchemy import TextClause, text

from opencue_sched.clients.prepared import prepare

AS_WRITTEN = """
    SELECT set_config('enable_seqscan', 'off', true), set_config('enable_hashjoin', 'off', true),
           set_config('enable_mergejoin', 'off', true), set_config('join_collapse_limit', '1', true);
"""
"""Before a statement: it, and the rest of the transaction, are planned as they are written, and look up row by row what
is named. Trying other orders of joins took longer than what they do, and the row of each of five hundred frames is
found sooner than all frames that run are read."""

PLANNED_ONCE = """
    SELECT set_config('enable_seqscan', 'off', true), set_config('plan_cache_mode', 'force_generic_plan', true);
"""
"""Before a statement that is prepared: it, and those of the rest of the transaction, are planned once, for any number
of rows and by the indexes that they name."""


def prepared(statement: str) -> TextClause:
    """The statement, or statements with semicolons between, as each connection prepares it (clients/prepared.py).

    It is planned once for whatever it is asked for, so it must leave no choice to the planner: what it looks up it
    finds by an index, and joins in the order in which it is written.
    """
    return prepare(text(statement))


def row_of(table: str, alias: str, condition: str) -> str:
    """``table``'s rows for which ``condition`` holds, to be joined as ``alias`` to what stands before; ``xmin`` too.

    They are looked up for each row before them by an index of the condition. Joined in the ordinary way PostgreSQL
    would rather read a whole table, or all of another index, and join that: from a few hundred ids on, or from one on
    where the statistics are old. What a few rows cost must not grow with how many there are.
    """
    # OFFSET 0 keeps the subquery as it is.
    return f"LATERAL (SELECT *, xmin FROM {table} WHERE {condition} OFFSET 0) {alias}"  # noqa: S608 - our own constants
