"""Rows into tables, many at a time, for the farm builder."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, text

_ROWS_PER_STATEMENT = 20_000


class FarmTables:
    """Inserts rows and makes up ids and names. ``seed`` makes them the same every time."""

    def __init__(self, connection: Connection, *, seed: int | None = None) -> None:
        self.connection = connection
        self._random = random.Random(seed) if seed is not None else random.SystemRandom()
        self._serial = 0

    def new_id(self) -> str:
        """A new row id."""
        return str(uuid.UUID(int=self._random.getrandbits(128), version=4))

    def next_name(self, prefix: str) -> str:
        """``prefix`` with the next number of this farm."""
        self._serial += 1
        return f"{prefix}{self._serial:04d}"

    def named(self, table: str, key: str, name: str, **row: Any) -> str:
        """Id of the row of ``table`` called ``name``; it is inserted, with ``row``, if there is none."""
        found = self.connection.execute(
            text(f"SELECT {key} FROM {table} WHERE str_name = :name ORDER BY {key}"),  # noqa: S608 - names are ours
            {"name": name},
        ).scalar()
        if found is not None:
            return str(found)
        new_id = self.new_id()
        self.insert(table, [{key: new_id, "str_name": name, **row}])
        return new_id

    def insert(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert rows that all have the same columns; columns that are not given get the schema's defaults."""
        if not rows:
            return
        columns = ", ".join(rows[0])
        statement = text(
            f"INSERT INTO {table} ({columns}) SELECT {columns}"  # noqa: S608 - names are ours
            f" FROM json_populate_recordset(CAST(NULL AS {table}), CAST(:rows AS json))"
        )
        for start in range(0, len(rows), _ROWS_PER_STATEMENT):
            self.connection.execute(statement, {"rows": json.dumps(rows[start : start + _ROWS_PER_STATEMENT])})
