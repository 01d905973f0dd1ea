"""The comparison of our schema with Cuebot's, on small cases of both."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from opencue_sched.store import schema
from tests.compat.cuebot import BadMigrations, add_first_rows, apply_migrations, find_migrations
from tests.compat.differences import compare
from tests.kit.catalog import Catalog, read_catalog

_COUNTED = text(
    "SELECT (SELECT count(*) FROM facility), (SELECT count(*) FROM dept), (SELECT count(*) FROM alloc),"
    " (SELECT count(*) FROM service)"
)


def _catalog(url: str) -> Catalog:
    engine = create_engine(url, poolclass=NullPool)
    with engine.connect() as connection:
        return read_catalog(connection)


def test_migration_files_are_found_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("V10__ten.sql", "V9__nine.sql", "V9_1__nine_and_one.sql", "seed_data.sql", "V1__Initial_schema.sql"):
        (tmp_path / name).touch()
    assert [migration.version for migration in find_migrations(tmp_path)] == [(1,), (9,), (9, 1), (10,)]


def test_a_directory_without_migrations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadMigrations, match=re.escape(str(tmp_path))):
        find_migrations(tmp_path)
    with pytest.raises(BadMigrations, match="not a directory"):
        find_migrations(tmp_path / "nowhere")


def test_a_file_that_fails_is_named_and_leaves_those_before_it(empty_database_url: str, tmp_path: Path) -> None:
    (tmp_path / "V1__first.sql").write_text("CREATE TABLE one (id int)")
    (tmp_path / "V2__second.sql").write_text("CREATE TABLE two (id int); SELECT nothing FROM nowhere")
    with pytest.raises(BadMigrations, match=r"V2__second\.sql: .*nowhere"):
        apply_migrations(empty_database_url, find_migrations(tmp_path))
    assert set(_catalog(empty_database_url)["table"]) == {"one"}


def test_first_rows_are_added_where_there_are_none(database_url: str) -> None:
    engine = create_engine(database_url, poolclass=NullPool)

    def rows() -> tuple[int, ...]:
        with engine.connect() as connection:
            return tuple(connection.execute(_COUNTED).one())

    there = rows()
    add_first_rows(database_url)
    assert rows() == there
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE facility, dept, alloc, service CASCADE"))
    add_first_rows(database_url)
    assert rows() == (1, 1, 1, 1)


def test_differences_are_found_and_those_meant_have_a_reason(empty_database_url: str) -> None:
    schema.upgrade(empty_database_url)
    ours = _catalog(empty_database_url)
    assert list(compare(ours, ours)) == []
    engine = create_engine(empty_database_url, poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE host ALTER str_name TYPE varchar(40)"))
        connection.execute(text("ALTER TABLE frame ALTER int_version DROP DEFAULT"))
        connection.execute(text("DROP TRIGGER verify_subscription ON subscription"))
        connection.execute(text("CREATE INDEX i_host_of_theirs ON host (str_name)"))
        connection.execute(text("CREATE TABLE history_period_bak (pk integer)"))
    theirs = _catalog(empty_database_url)
    found = {(difference.kind, difference.name): bool(difference.reason) for difference in compare(theirs, ours)}
    assert found == {
        ("column", "host.str_name"): False,
        ("column", "frame.int_version"): False,
        ("trigger", "subscription.verify_subscription"): False,
        ("index", "i_host_of_theirs"): False,
        ("table", "history_period_bak"): True,
        ("column", "history_period_bak.pk"): True,
    }
