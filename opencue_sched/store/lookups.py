"""Rows looked up by their keys, whatever the statistics of a table say."""

from __future__ import annotations

from sqlalchemy import TextClause, text

from opencue_sched.clients.prepared import prepare

AS_WRITTEN = """
    SELECT set_config('enable_seqscan', 'off', true), set_config('enable_hashjoin', 'off', true),
           set_config('enable_mergejoin', 'off', true), set_config('join_collapse_limit', '1', true);
"""
"""Stands before a statement that is not prepared. The statement, and all others of the transaction, are planned with
their joins in the order in which they are written, and look up row by row what they name. For the planner to try other
orders takes longer than the statement does, and the rows of five hundred frames are found sooner by their ids than all
frames that run are read."""

PLANNED_ONCE = """
    SELECT set_config('enable_seqscan', 'off', true), set_config('plan_cache_mode', 'force_generic_plan', true);
"""
"""Stands before a statement that is prepared. The statement, and all others of the transaction that are prepared, are
planned once for any parameters, and by indexes."""

BY_KEYS = f"{AS_WRITTEN} {PLANNED_ONCE}"
"""Stands before a statement that is prepared, as PLANNED_ONCE does, and has the planner look up row by row what the
statement names, as AS_WRITTEN does."""


def prepared(statement: str) -> TextClause:
    """The statement, or statements with semicolons between, marked to be prepared by each connection
    (clients/prepared.py).

    A prepared statement is planned once for all parameters, so it must leave no choice to the planner: whatever the
    statement looks up is found by an index, and joined in the order in which the statement is written.
    """
    return prepare(text(statement))


def row_of(table: str, alias: str, condition: str) -> str:
    """SQL for the rows of ``table`` for which ``condition`` holds, with ``xmin``, to be joined as ``alias`` to what
    stands before.

    The rows are looked up by an index of the condition, for each row that stands before. In an ordinary join PostgreSQL
    would rather read a whole table, or all of another index: from a few hundred ids on, or from one on where the
    statistics are old. What a few rows cost must not grow with how many rows the table has.
    """
    # OFFSET 0 keeps PostgreSQL from pulling the subquery up into an ordinary join.
    return f"LATERAL (SELECT *, xmin FROM {table} WHERE {condition} OFFSET 0) {alias}"  # noqa: S608 - our own constants


def same_key(column: str, value: str) -> str:
    """The condition that a column of the table that a statement changes, which cannot stand in row_of, has a value of
    what stands beside it.

    The rows are looked up by an index of the column, for each value. For `column = value` PostgreSQL would also read
    all of the index, and where the statistics know of no row in the table once for each value. An array in the place of
    the value leaves it no other way. It is an array of one: one of many would be sorted for each row.
    """
    return f"{column} = ANY(ARRAY[{value}])"
