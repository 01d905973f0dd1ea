"""Notices of waiting work that are lost for a while: the triggers are there and run, and nobody is told of anything.

Workers cannot know of it, other than of a listener that was cut or a trigger that was disabled: what waits is found by
the resync.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Connection, text

_NAMES = ("opencue_sched_backlog_changed", "opencue_sched_work_arrived")
"""Functions of triggers that do nothing but tell."""
_DEFINITIONS = text(
    "SELECT pg_get_functiondef(oid) FROM pg_proc WHERE proname = ANY(:names) AND prosrc LIKE '%pg\\_notify%'"
)


def drop_notices(connection: Connection) -> list[str]:
    """Have the triggers tell nothing; returns what `tell_again` needs, nothing where they are told nothing already."""
    definitions = list(connection.execute(_DEFINITIONS, {"names": list(_NAMES)}).scalars())
    for name in _NAMES if definitions else ():
        connection.exec_driver_sql(
            f"CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'"
        )
    return definitions


def tell_again(connection: Connection, definitions: Iterable[str]) -> None:
    """End what `drop_notices` began."""
    for definition in definitions:
        connection.exec_driver_sql(definition)
