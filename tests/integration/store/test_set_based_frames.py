"""Switching to counters and history that bookings write at once, and back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, text

from opencue_sched.errors import SchedulerError
from opencue_sched.store.set_based_frames import COUNTS, HISTORY, read_frames_way, switch_off, switch_on
from tests.kit.catalog import Catalog, read_catalog
from tests.kit.row_triggers import KnownTexts, count_row_by_row, definition


@pytest.fixture
def known(engine: Engine) -> KnownTexts:
    """The texts of this database's functions, which are of Cuebot's shape."""
    with engine.begin() as connection:
        return count_row_by_row(connection)


def catalog(engine: Engine) -> Catalog:
    with engine.connect() as connection:
        return read_catalog(connection)


def functions_of(engine: Engine) -> dict[str, str]:
    with engine.connect() as connection:
        return {trigger: definition(connection, trigger) for trigger in (COUNTS, HISTORY)}


def test_both_functions_get_an_early_return_and_lose_it_again(engine: Engine, known: KnownTexts) -> None:
    before = catalog(engine)
    with engine.begin() as connection:
        assert not read_frames_way(connection, known).on
        # when it is switched on, twice
        for _ in range(2):
            switch_on(connection, known)
            assert read_frames_way(connection, known).on
    # then nothing else has changed
    after = catalog(engine)
    changed = {name for name in before["function"] if after["function"][name] != before["function"][name]}
    assert changed == {f"trigger__{trigger}()" for trigger in (COUNTS, HISTORY)}
    assert {kind for kind in before if before[kind] != after[kind]} == {"function"}
    # and back again nothing at all, also when there is nothing to take back
    with engine.begin() as connection:
        assert len(switch_off(connection)) == 2
        assert switch_off(connection) == ()
    assert catalog(engine) == before


@pytest.mark.parametrize("trigger", [COUNTS, HISTORY])
def test_a_text_that_is_not_known_is_left_as_it_is(engine: Engine, known: KnownTexts, trigger: str) -> None:
    with engine.begin() as connection:
        theirs = definition(connection, trigger).replace("RETURN NULL", "PERFORM 100 % 7; RETURN NULL")
        connection.connection.cursor().execute(theirs)
    before = functions_of(engine)
    with engine.begin() as connection, pytest.raises(SchedulerError, match=f"trigger__{trigger} "):
        switch_on(connection, known)
    assert functions_of(engine) == before


def test_a_text_that_somebody_changed_later_is_not_trusted_and_keeps_the_change(
    engine: Engine, known: KnownTexts
) -> None:
    theirs = "PERFORM 100 % 7; RETURN NULL;\nEND"
    with engine.begin() as connection:
        switch_on(connection, known)
        changed = definition(connection, COUNTS)
        end = changed.rindex("RETURN NULL")
        connection.connection.cursor().execute(changed[:end] + theirs + changed[changed.rindex("END") + 3 :])
        way = read_frames_way(connection, known)
        assert (way.on, len(way.changed), len(way.obstacles)) == (False, 2, 1)
        switch_off(connection)
        assert theirs in definition(connection, COUNTS)
        assert read_frames_way(connection, known).changed == ()


def test_a_function_that_was_put_back_is_noticed(engine: Engine, known: KnownTexts) -> None:
    with engine.begin() as connection:
        cuebots = definition(connection, HISTORY)
        switch_on(connection, known)
        connection.connection.cursor().execute(cuebots)
        way = read_frames_way(connection, known)
    assert (way.on, way.changed, way.obstacles) == (False, (f"trigger__{COUNTS}",), ())


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        (f"ALTER TABLE frame DISABLE TRIGGER {HISTORY}", HISTORY),
        (f"DROP TRIGGER {COUNTS} ON frame", COUNTS),
        ("CREATE TABLE IF NOT EXISTS frame_history_queue (pk_frame text)", "history"),
    ],
)
def test_what_stands_in_the_way_is_named(engine: Engine, known: KnownTexts, statement: str, why: str) -> None:
    with engine.begin() as connection:
        connection.execute(text(statement))
        before = read_catalog(connection)
        with pytest.raises(SchedulerError, match=why):
            switch_on(connection, known)
        assert read_catalog(connection) == before


def test_it_waits_for_nobody_who_has_the_table(engine: Engine, known: KnownTexts) -> None:
    with engine.begin() as other, engine.begin() as connection:
        other.execute(text("LOCK TABLE frame IN ACCESS EXCLUSIVE MODE"))
        connection.execute(text("SET LOCAL lock_timeout = '1s'"))
        switch_on(connection, known)
        assert len(switch_off(connection)) == 2


@pytest.fixture
def owner(engine: Engine) -> Iterator[str]:
    """An ordinary role that owns all tables and functions of this test's database."""
    name = "opencue_sched_test_owner_" + engine.url.database[-12:]  # type: ignore[index]
    everything = f"""
        DO $$DECLARE each record; BEGIN
            FOR each IN SELECT oid::regclass AS name FROM pg_class
                        WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'v') LOOP
                EXECUTE format('ALTER TABLE %s OWNER TO {name}', each.name);
            END LOOP;
            FOR each IN SELECT oid::regprocedure AS name FROM pg_proc
                        WHERE pronamespace = 'public'::regnamespace AND prokind = 'f' AND probin IS NULL LOOP
                EXECUTE format('ALTER FUNCTION %s OWNER TO {name}', each.name);
            END LOOP;
        END$$"""  # noqa: S608 - a name of the test's
    with engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE ROLE {name} NOSUPERUSER")
        connection.exec_driver_sql(f"GRANT USAGE, CREATE ON SCHEMA public TO {name}")
        connection.connection.cursor().execute(everything)
    yield name
    with engine.begin() as connection:
        connection.exec_driver_sql(f"REASSIGN OWNED BY {name} TO CURRENT_USER; DROP OWNED BY {name}; DROP ROLE {name}")


def test_an_ordinary_owner_of_the_tables_may_do_it(engine: Engine, known: KnownTexts, owner: str) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql(f"SET SESSION AUTHORIZATION {owner}")
        switch_on(connection, known)
        assert read_frames_way(connection, known).on
        switch_off(connection)
        assert not read_frames_way(connection, known).changed
