"""Databases as Cuebot makes them, from a directory of its migration files (which are not ours to ship)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import psycopg2
from sqlalchemy import make_url

# A Cuebot's database gets its first rows by a file beside the migrations; these are as many as a show needs.
_FIRST_ROWS = """
    INSERT INTO facility (pk_facility, str_name, b_default)
    SELECT gen_random_uuid()::text, 'local', true WHERE NOT EXISTS (SELECT FROM facility);
    INSERT INTO dept (pk_dept, str_name, b_default)
    SELECT gen_random_uuid()::text, 'Unknown', true WHERE NOT EXISTS (SELECT FROM dept);
    INSERT INTO alloc (pk_alloc, str_name, str_tag, b_default, pk_facility)
    SELECT gen_random_uuid()::text, 'local.general', 'general', true, pk_facility FROM facility
    WHERE NOT EXISTS (SELECT FROM alloc);
    INSERT INTO service (pk_service, str_name, b_threadable, int_cores_min, int_mem_min, str_tags)
    SELECT gen_random_uuid()::text, 'default', false, 100, 3355443, 'general' WHERE NOT EXISTS (SELECT FROM service);
"""

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


def add_first_rows(url: str) -> None:
    """Give a database fresh from its migrations a facility, a department, an allocation and a service."""
    connection = psycopg2.connect(make_url(url).set(drivername="postgresql").render_as_string(hide_password=False))
    try:
        with connection, connection.cursor() as cursor:
            cursor.execute(_FIRST_ROWS)
    finally:
        connection.close()
