"""Rows looked up by their keys, whatever the statistics of a table say."""

from __future__ import annotations


def row_of(table: str, alias: str, condition: str) -> str:
    """``table``'s rows for which ``condition`` holds, to be joined as ``alias`` to what stands before; ``xmin`` too.

    They are looked up for each row before them by an index of the condition. Joined in the ordinary way PostgreSQL
    would rather read a whole table, or all of another index, and join that: from a few hundred ids on, or from one on
    where the statistics are old. What a few rows cost must not grow with how many there are.
    """
    # OFFSET 0 keeps the subquery as it is.
    return f"LATERAL (SELECT *, xmin FROM {table} WHERE {condition} OFFSET 0) {alias}"  # noqa: S608 - our own constants
