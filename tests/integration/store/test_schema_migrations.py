"""Migrating up and down: an empty database, one made by Cuebot, one that is too old, and what may go wrong."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Connection, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from benchmarks import warm_start
from opencue_sched.errors import SchedulerError, WrongSchema
from opencue_sched.store import schema
from opencue_sched.store.frame_history import drain_frame_history
from tests.kit.catalog import Catalog, read_catalog
from tests.kit.wording import lacks

_ROOT = Path(__file__).resolve().parents[3]
_FLYWAY = "CREATE TABLE flyway_schema_history (installed_rank integer PRIMARY KEY, version varchar(50))"


@contextmanager
def _session(url: str) -> Iterator[Connection]:
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        yield connection
    engine.dispose()


def _catalog(url: str) -> Catalog:
    with _session(url) as connection:
        return read_catalog(connection)


def _our_names(url: str) -> set[str]:
    with _session(url) as connection:
        return set(
            connection.execute(
                text(
                    "SELECT relname FROM pg_class WHERE relname LIKE 'opencue%'"
                    " UNION SELECT proname FROM pg_proc WHERE proname LIKE 'opencue%'"
                    " UNION SELECT tgname FROM pg_trigger WHERE tgname LIKE 'opencue%'"
                )
            ).scalars()
        )


def _facts(url: str) -> schema.SchemaFacts:
    with _session(url) as connection:
        return schema.check_schema(connection)


@pytest.fixture
def cuebot_url(empty_database_url: str) -> str:
    """A database that looks as Cuebot leaves it: OpenCue's objects, a Flyway history, nothing of ours."""
    schema.upgrade(empty_database_url, "0001")
    with _session(empty_database_url) as connection:
        connection.execute(text("DROP TABLE opencue_sched_origin, opencue_sched_version"))
        connection.execute(text(_FLYWAY))
        connection.execute(text("INSERT INTO flyway_schema_history VALUES (1, '47')"))
    return empty_database_url


def test_an_empty_database_gets_everything_and_gives_it_back(empty_database_url: str) -> None:
    schema.upgrade(empty_database_url)
    facts = _facts(empty_database_url)
    assert (facts.origin, facts.revision, facts.has_start_after) == ("opencue-sched", schema.REVISION, True)
    assert not facts.has_frame_history_queue
    schema.upgrade(empty_database_url)
    schema.downgrade(empty_database_url)
    assert _our_names(empty_database_url) == set()
    assert all(found == {} for found in _catalog(empty_database_url).values())


def test_a_database_made_by_cuebot_gets_only_our_objects_and_keeps_its_own(cuebot_url: str) -> None:
    before = _catalog(cuebot_url)
    schema.upgrade(cuebot_url)
    facts = _facts(cuebot_url)
    assert (facts.origin, facts.revision) == ("cuebot", schema.REVISION)
    assert _catalog(cuebot_url) == before
    assert "opencue_sched_frame_waiting" in _our_names(cuebot_url)
    schema.downgrade(cuebot_url)
    assert _our_names(cuebot_url) == set()
    assert _catalog(cuebot_url) == before
    with _session(cuebot_url) as connection:
        assert connection.scalar(text("SELECT version FROM flyway_schema_history")) == "47"
        assert connection.scalar(text("SELECT count(*) FROM alloc")) == 1


def test_a_cuebot_of_v45_has_no_start_after(cuebot_url: str) -> None:
    with _session(cuebot_url) as connection:
        connection.execute(text("ALTER TABLE layer DROP ts_start_after, DROP str_start_after_reason"))
    schema.upgrade(cuebot_url)
    assert not _facts(cuebot_url).has_start_after


def test_what_an_upgraded_cuebot_makes_possible_is_added_by_the_next_migration(cuebot_url: str) -> None:
    # given a database of a Cuebot before V47, migrated
    with _session(cuebot_url) as connection:
        connection.execute(text("ALTER TABLE layer DROP ts_start_after, DROP str_start_after_reason"))
    schema.upgrade(cuebot_url)
    assert _lacks(cuebot_url) == []
    # when Cuebot is upgraded,
    with _session(cuebot_url) as connection:
        connection.execute(text("ALTER TABLE layer ADD ts_start_after timestamptz, ADD str_start_after_reason text"))
    assert len(_lacks(cuebot_url)) == 1
    # then the next migration adds the trigger, once,
    for _ in range(2):
        schema.upgrade(cuebot_url)
        assert _triggers_of_layer(cuebot_url) == ["opencue_sched_backlog", "opencue_sched_work_arrived"]
        assert _lacks(cuebot_url) == []
    # and it goes with all the others.
    schema.downgrade(cuebot_url)
    assert _our_names(cuebot_url) == set()


def _lacks(url: str) -> list[str]:
    with _session(url) as connection:
        return schema.newly_possible(connection)


def _triggers_of_layer(url: str) -> list[str]:
    asked = "SELECT tgname FROM pg_trigger WHERE tgrelid = 'layer'::regclass AND tgname LIKE 'opencue%' ORDER BY 1"
    with _session(url) as connection:
        return list(connection.execute(text(asked)).scalars())


def test_what_names_the_backlog_comes_with_its_revision_and_goes_with_it(cuebot_url: str) -> None:
    # given a database of the revision before
    schema.upgrade(cuebot_url, "0014")
    before = _our_definitions(cuebot_url)
    # when it is upgraded and taken back, twice
    for _ in range(2):
        schema.upgrade(cuebot_url, "0015")
        added = _our_definitions(cuebot_url) - before
        assert {name for _, name in added} == {
            "opencue_sched_backlog",
            "opencue_sched_backlog_changed",
            "opencue_sched_work_arrived",
        }
        _alembic(cuebot_url, "downgrade", "0014")
        # then nothing of it stays, and what it replaced is as before
        assert _our_definitions(cuebot_url) == before


def _our_definitions(url: str) -> set[tuple[str, str]]:
    """The text and the name of each trigger and function of ours."""
    with _session(url) as connection:
        return {
            (row.definition, row.name)
            for row in connection.execute(
                text(
                    "SELECT pg_get_functiondef(oid) AS definition, proname::text AS name FROM pg_proc"
                    " WHERE proname LIKE 'opencue%'"
                    " UNION SELECT pg_get_triggerdef(oid), tgname::text FROM pg_trigger WHERE tgname LIKE 'opencue%'"
                )
            )
        }


def test_a_migration_of_cuebots_that_alters_a_column_of_our_triggers_waits_until_ours_are_taken_back(
    cuebot_url: str,
) -> None:
    """As docs/tasks/upgrade.md says, which names these columns."""
    schema.upgrade(cuebot_url)
    with _session(cuebot_url) as connection:
        columns = set(connection.execute(text(_COLUMNS_OF_OUR_TRIGGERS)).scalars())
    page = (_ROOT / "docs/tasks/upgrade.md").read_text(encoding="utf-8")
    named = {
        f"{table}.{column}"
        for table, cell in re.findall(r"^\| `(\w+)` \| (.+) \|$", page, re.MULTILINE)
        for column in re.findall(r"`(\w+)`", cell)
    }
    assert named == columns
    # These two a newer Cuebot's migrations alter: with our triggers on them it could not be upgraded without ado.
    assert not columns & {"layer.str_cmd", "layer.str_range"}
    altered = "ALTER TABLE layer ALTER ts_start_after TYPE timestamptz(3)"
    with _session(cuebot_url) as connection, pytest.raises(DBAPIError, match="used in a trigger definition"):
        connection.execute(text(altered))
    schema.downgrade(cuebot_url)
    with _session(cuebot_url) as connection:
        connection.execute(text(altered))
    schema.upgrade(cuebot_url)
    assert _facts(cuebot_url).revision == schema.REVISION


_COLUMNS_OF_OUR_TRIGGERS = """
    SELECT DISTINCT t.tgrelid::regclass::text || '.' || a.attname
    FROM pg_trigger t
    JOIN pg_depend d ON d.classid = 'pg_trigger'::regclass AND d.objid = t.oid
                    AND d.refobjid = t.tgrelid AND d.refobjsubid > 0
    JOIN pg_attribute a ON a.attrelid = t.tgrelid AND a.attnum = d.refobjsubid
    WHERE t.tgname LIKE 'opencue%'
"""


def test_columns_of_newer_cuebots_are_recognised(cuebot_url: str) -> None:
    schema.upgrade(cuebot_url)
    plain = _facts(cuebot_url)
    schema.downgrade(cuebot_url)
    with _session(cuebot_url) as connection:
        connection.execute(text("CREATE TABLE frame_history_queue (id bigserial PRIMARY KEY, pk_frame varchar(36))"))
        connection.execute(
            text("CREATE INDEX theirs ON frame (pk_layer, int_dispatch_order) WHERE str_state = 'WAITING'")
        )
    schema.upgrade(cuebot_url)
    assert _facts(cuebot_url) == replace(plain, has_frame_history_queue=True)
    # An index of theirs that does what ours would is enough.
    assert "opencue_sched_frame_waiting" not in _our_names(cuebot_url)
    assert "opencue_sched_host_tag" in _our_names(cuebot_url)


@pytest.mark.parametrize("migrate", [schema.upgrade, schema.downgrade])
def test_a_cuebot_that_is_too_old_is_refused_and_left_alone(cuebot_url: str, migrate: Callable[[str], None]) -> None:
    with _session(cuebot_url) as connection:
        connection.execute(text("ALTER TABLE show DROP b_scheduler_managed"))
    before = _catalog(cuebot_url)
    with pytest.raises(WrongSchema, match=r"V45.*b_scheduler_managed"):
        migrate(cuebot_url)
    assert _catalog(cuebot_url) == before
    assert _our_names(cuebot_url) == set()
    with _session(cuebot_url) as connection, pytest.raises(WrongSchema):
        schema.check_schema(connection)


def test_a_database_without_a_schema_is_told_apart(empty_database_url: str) -> None:
    with (
        _session(empty_database_url) as connection,
        pytest.raises(WrongSchema, match=r"opencue-sched migrate`$"),
    ):
        schema.check_schema(connection)


def test_a_database_without_our_objects_or_with_older_ones_is_refused_and_a_newer_one_is_not(cuebot_url: str) -> None:
    with pytest.raises(WrongSchema, match=r"`opencue-sched migrate`"):
        _facts(cuebot_url)
    schema.upgrade(cuebot_url, "0006")
    with pytest.raises(WrongSchema, match=r"\b0006\b.*`opencue-sched migrate`"):
        _facts(cuebot_url)
    schema.upgrade(cuebot_url)
    assert _facts(cuebot_url).revision == schema.REVISION
    with _session(cuebot_url) as connection:
        connection.execute(text("UPDATE opencue_sched_version SET version_num = '9999'"))
    assert _facts(cuebot_url).revision == "9999"


def test_revisions_are_numbers_in_their_order_and_the_program_knows_its_own() -> None:
    # The start check compares them as text.
    numbers = sorted(path.name.partition("_")[0] for path in (_ROOT / "alembic" / "versions").glob("*.py"))
    assert numbers == [f"{number:04}" for number in range(1, len(numbers) + 1)]
    assert numbers[-1] == schema.REVISION


def test_a_database_whose_trigger_of_ours_is_disabled_can_be_scheduled_on(cuebot_url: str) -> None:
    schema.upgrade(cuebot_url)
    with _session(cuebot_url) as connection:
        connection.execute(text("ALTER TABLE proc DISABLE TRIGGER opencue_sched_proc_released"))
    assert _facts(cuebot_url).revision == schema.REVISION


def test_the_work_of_a_failed_migration_is_undone(cuebot_url: str) -> None:
    with _session(cuebot_url) as connection:
        connection.execute(text("CREATE TABLE opencue_sched_quarantine (somebody_elses integer)"))
    with pytest.raises(Exception, match="already exists"):
        schema.upgrade(cuebot_url)
    with _session(cuebot_url) as connection:
        assert connection.scalar(text("SELECT to_regclass('opencue_sched_fence')")) is None
        connection.execute(text("DROP TABLE opencue_sched_quarantine"))
    schema.upgrade(cuebot_url)
    assert _facts(cuebot_url).revision == schema.REVISION


def test_a_database_made_without_some_of_cuebots_indexes_gets_them(empty_database_url: str) -> None:
    schema.upgrade(empty_database_url, "0011")
    whole = _catalog(empty_database_url)
    with _session(empty_database_url) as connection:
        connection.execute(text("DROP INDEX i_limit_record_pk_limit_record, i_layerstat_int_waiting_count"))
    schema.upgrade(empty_database_url, "0012")
    assert _catalog(empty_database_url)["index"] == whole["index"]


def test_limits_become_as_cuebots_v49_has_them_and_go_back(empty_database_url: str) -> None:
    # given limits of the revision before, one of which its column says counts machines, and a layer that has it twice
    schema.upgrade(empty_database_url, "0019")
    before = _catalog(empty_database_url)
    with _session(empty_database_url) as connection:
        connection.execute(
            text(
                "INSERT INTO limit_record (pk_limit_record, str_name, int_max_value, b_host_limit)"
                " VALUES ('frames', 'arnold', 90, false), ('machines', 'houdini', 6, true)"
            )
        )
        connection.execute(
            text(
                "INSERT INTO layer_limit (pk_layer_limit, pk_layer, pk_limit_record)"
                " VALUES ('a', 'layer', 'machines'), ('b', 'layer', 'machines'), ('c', 'layer', 'frames')"
            )
        )
    # when it is upgraded
    schema.upgrade(empty_database_url)
    # then that one counts machines, and the layer has each limit once
    with _session(empty_database_url) as connection:
        types = connection.execute(text("SELECT str_name, str_type FROM limit_record ORDER BY 1")).all()
        assert [tuple(row) for row in types] == [("arnold", "FRAME"), ("houdini", "HOST")]
        bound = connection.execute(text("SELECT pk_limit_record FROM layer_limit ORDER BY 1")).scalars().all()
        assert list(bound) == ["frames", "machines"]
        assert connection.scalar(text("SELECT count(*) FROM limit_usage")) == 2
    # and what the revision added goes with it
    _alembic(empty_database_url, "downgrade", "0019")
    assert _catalog(empty_database_url) == before


def test_limits_of_one_name_are_refused_before_anything_changes(empty_database_url: str) -> None:
    # given two limits of one name, in a database of a revision that is several behind
    schema.upgrade(empty_database_url, "0011")
    with _session(empty_database_url) as connection:
        connection.execute(
            text(
                "INSERT INTO limit_record (pk_limit_record, str_name, int_max_value)"
                " VALUES ('one', 'houdini', 6), ('two', 'houdini', 8), ('three', 'arnold', 90)"
            )
        )
    before = _catalog(empty_database_url)
    # when it is upgraded, then both ids and the remedy are said, and nothing is changed
    with pytest.raises(WrongSchema, match=r"'houdini'.*\bone\b.*\btwo\b.*UPDATE limit_record"):
        schema.upgrade(empty_database_url)
    assert _catalog(empty_database_url) == before
    with _session(empty_database_url) as connection:
        assert schema.revision_of(connection) == "0011"
        connection.execute(text("UPDATE limit_record SET str_name = 'houdini-fx' WHERE pk_limit_record = 'two'"))
    schema.upgrade(empty_database_url)
    assert _facts(empty_database_url).revision == schema.REVISION


def test_limits_of_one_name_in_cuebots_own_tables_are_cuebots(cuebot_url: str) -> None:
    with _session(cuebot_url) as connection:
        connection.execute(
            text("INSERT INTO limit_record (pk_limit_record, str_name) VALUES ('one', 'houdini'), ('two', 'houdini')")
        )
    schema.upgrade(cuebot_url)
    assert _facts(cuebot_url).revision == schema.REVISION


def test_two_migrations_at_once_take_turns(empty_database_url: str) -> None:
    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(_migrate_in_a_process, empty_database_url) for _ in range(3)]:
            done.result()
    assert _facts(empty_database_url).revision == schema.REVISION


def _migrate_in_a_process(url: str) -> None:
    code = "import sys; from opencue_sched.store import schema; schema.upgrade(sys.argv[1])"
    done = warm_start.run([sys.executable, "-c", code, url], env=os.environ, cwd=_ROOT)
    assert done.returncode == 0, done.stderr


def test_a_user_who_may_not_change_the_database_is_told_what_to_do(cuebot_url: str) -> None:
    role = f"limited_{make_url(cuebot_url).database}"
    with _session(cuebot_url) as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN PASSWORD 'limited'"))
        connection.execute(text(f"GRANT ALL ON SCHEMA public TO {role}"))
        connection.execute(text(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}"))
    try:
        limited = make_url(cuebot_url).set(username=role, password="limited").render_as_string(hide_password=False)
        with pytest.raises(SchedulerError, match="owner"):
            schema.upgrade(limited)
        assert _our_names(cuebot_url) == set()
    finally:
        with _session(cuebot_url) as connection:
            connection.execute(text(f"DROP OWNED BY {role}"))
            connection.execute(text(f"DROP ROLE {role}"))


@pytest.mark.long(25)
def test_a_table_that_stays_locked_is_not_waited_for(cuebot_url: str) -> None:
    with _session(cuebot_url) as connection:
        connection.execute(text("LOCK TABLE proc IN ACCESS EXCLUSIVE MODE"))
        with pytest.raises(SchedulerError, match="lock timeout"):
            schema.upgrade(cuebot_url)
    assert _our_names(cuebot_url) == set()
    schema.upgrade(cuebot_url)
    assert _facts(cuebot_url).revision == schema.REVISION


def test_alembics_own_command_works_from_a_checkout(empty_database_url: str) -> None:
    # As a user types it; what follows is forked, and has nothing to load.
    command = [sys.executable, "-m", "alembic.config", "upgrade", "head"]
    subprocess.run(command, env=_environment(empty_database_url), cwd=_ROOT, check=True, timeout=120)
    assert f"{schema.REVISION} (head)" in _alembic(empty_database_url, "current")
    _alembic(empty_database_url, "downgrade", "base")
    assert _our_names(empty_database_url) == set()


def _alembic(url: str, *arguments: str) -> str:
    """What Alembic's own command printed."""
    command = [sys.executable, "-m", "alembic.config", *arguments]
    done = warm_start.run(command, env=_environment(url), cwd=_ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _environment(url: str) -> dict[str, str]:
    return {"OPENCUE_SCHED_DATABASE_URL": url, "PATH": "/usr/bin:/bin"}


@pytest.mark.parametrize(
    ("url", "status", "words"),
    [
        ("postgresql://a:sesame@127.0.0.1:1/b", 75, ["127.0.0.1:1/b"]),
        ("sesame", 78, ["PostgreSQL"]),
    ],
)
def test_alembics_own_command_says_in_a_line_what_is_wrong_with_the_url(
    url: str, status: int, words: list[str]
) -> None:
    command = [sys.executable, "-m", "alembic.config", "upgrade", "head"]
    done = warm_start.run(command, env=_environment(url), cwd=_ROOT)
    assert done.returncode == status, done.stderr
    (line,) = done.stderr.splitlines()
    assert not lacks(line, "OPENCUE_SCHED_DATABASE_URL", *words)
    assert "sesame" not in line


def test_migrations_shipped_inside_the_package_are_found(empty_database_url: str, tmp_path: Path) -> None:
    # As the wheel lays them out: opencue_sched/_alembic, and no alembic/ beside the package.
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(_ROOT / "opencue_sched", tmp_path / "opencue_sched", ignore=ignored)
    shutil.copytree(_ROOT / "alembic", tmp_path / "opencue_sched" / "_alembic", ignore=ignored)
    code = "import sys; sys.path.insert(0, '.'); from opencue_sched.store import schema; schema.upgrade(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, empty_database_url],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert _facts(empty_database_url).revision == schema.REVISION


def test_a_password_with_a_percent_sign_is_taken_as_it_is(empty_database_url: str) -> None:
    url = make_url(empty_database_url).update_query_dict({"application_name": "50%(x)s"})
    schema.upgrade(url.render_as_string(hide_password=False))
    assert _facts(empty_database_url).revision == schema.REVISION


def test_history_that_newer_cuebots_queue_is_drained_through_their_own_function(cuebot_url: str) -> None:
    # Given the queue, and a stand-in with the parameters and results of their function.
    with _session(cuebot_url) as connection:
        connection.execute(text("CREATE TABLE frame_history_queue (id bigserial PRIMARY KEY, pk_frame varchar(36))"))
        connection.execute(
            text(
                """
                CREATE FUNCTION frame_history_drain(p_limit int, p_wait boolean DEFAULT false,
                    p_safe boolean DEFAULT false, OUT drained int, OUT skipped int, OUT merged int) LANGUAGE sql AS $$
                    WITH gone AS (DELETE FROM frame_history_queue WHERE id IN
                        (SELECT id FROM frame_history_queue ORDER BY id LIMIT p_limit) RETURNING id)
                    SELECT CAST(count(*) AS int), 0, 0 FROM gone
                $$
                """
            )
        )
        connection.execute(
            text("INSERT INTO frame_history_queue (pk_frame) SELECT 'f' || n FROM generate_series(1, 5) n")
        )
    # When it is drained in batches, every event is counted once.
    with _session(cuebot_url) as connection:
        drained = [
            drain_frame_history(connection, events=3),
            drain_frame_history(connection, events=3, one_by_one=True),
            drain_frame_history(connection),
        ]
    assert drained == [(3, 0), (2, 0), (0, 0)]
