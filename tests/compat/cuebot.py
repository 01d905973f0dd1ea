"""Databases as Cuebot makes them, from a directory of its migration files (which are not ours to ship)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import psycopg2
from sqlalchemy import make_url

_FILE = re.compile(r"^V(\d+(?:[._]\d+)*)__(\w+)\.sql$")


class BadMigrations(Exception):
    """A directory that is not one of Cuebot's migrations, or a file in it that PostgreSQL refuses."""


@dataclass(frozen=True, order=True)
class Migration:
    """One of Cuebot's files: V47__Add_something.sql."""

    version: tuple[int, ...]
    path: Path


def find_migrations(directory: Path) -> list[Migration]:
    """The migration files of ``directory`` in the order of their versions."""
    if not directory.is_dir():
        raise BadMigrations(f"{directory} is not a directory")
    found = []
    for path in directory.iterdir():
        match = _FILE.match(path.name)
        if match is not None:
            found.append(Migration(tuple(int(part) for part in re.split(r"[._]", match.group(1))), path))
    if not found:
        raise BadMigrations(f"{directory} holds no file named like V1__Initial_schema.sql")
    return sorted(found)


def apply_migrations(url: str, migrations: list[Migration]) -> None:
    """Run the files against the database at ``url``, each in a transaction of its own, as Flyway does."""
    target = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    connection = psycopg2.connect(target)
    try:
        for migration in migrations:
            try:
                with connection, connection.cursor() as cursor:
                    cursor.execute(migration.path.read_text(encoding="utf-8"))
            except psycopg2.Error as error:
                raise BadMigrations(f"{migration.path.name}: {str(error).strip()}") from error
    finally:
        connection.close()
