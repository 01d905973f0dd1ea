"""``opencue-sched migrate --set-based-frames``, and what doctor says of it."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, text

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.store.set_based_frames import COUNTS, HISTORY, read_frames_way, switch_off
from tests.kit.catalog import Catalog, read_catalog
from tests.kit.command import Cli
from tests.kit.row_triggers import count_row_by_row, definition


def catalog(engine: Engine) -> Catalog:
    with engine.connect() as connection:
        return read_catalog(connection)


def test_migrate_refuses_where_the_functions_are_ours(cli: Cli, engine: Engine) -> None:
    with engine.connect() as connection:
        if connection.scalar(text("SELECT origin FROM opencue_sched_origin")) == "cuebot":
            pytest.skip("for a schema of ours")
    before = catalog(engine)
    ran = cli("migrate", "--set-based-frames")
    assert (ran.status, ran.out) == (1, "")
    assert "Cuebot's functions were left as they are" in ran.err
    assert catalog(engine) == before
    assert "row by row" not in cli("doctor").out


def test_doctor_says_that_and_why_cuebots_triggers_write(cli: Cli, engine: Engine) -> None:
    """On a schema of Cuebot's shape whose texts are not known."""
    with engine.begin() as connection:
        Farm(connection).default_show()
        count_row_by_row(connection)
        theirs = definition(connection, COUNTS).replace("RETURN NULL", "PERFORM 1; RETURN NULL")
        connection.connection.cursor().execute(theirs)
        connection.execute(text("UPDATE opencue_sched_origin SET origin = 'cuebot'"))
    told = cli("doctor").out
    assert "row by row" in told
    assert f"the text of trigger__{COUNTS} is none that this program knows" in told


def test_a_cuebots_database_goes_the_whole_way_and_back(cli: Cli, engine: Engine) -> None:
    with engine.begin() as connection:
        if read_frames_way(connection).obstacles:
            pytest.skip("for the functions that Cuebot's migrations make")
        switch_off(connection)
        Farm(connection).default_show()
    cuebots = catalog(engine)
    # when it is switched on
    ran = cli("migrate", "--set-based-frames")
    assert ran.status == 0
    assert "bookings write counters and history once a plan" in ran.out
    assert "bookings write counters and history of their frames once a plan" in cli("doctor").out
    # then a plain migrate keeps it, and one function that was put back is told
    assert cli("migrate").status == 0
    with engine.begin() as connection:
        assert read_frames_way(connection).on
        name = f"trigger__{HISTORY}()"
        connection.connection.cursor().execute(cuebots["function"][name])
    assert "somebody has put a function back" in cli("doctor").out
    # and --down takes back that alone
    assert cli("migrate", "--set-based-frames").status == 0
    assert cli("migrate", "--set-based-frames", "--down").status == 0
    assert catalog(engine) == cuebots
    assert cli("doctor").out.count("`opencue-sched migrate --set-based-frames` is not in force") == 1
    # and a plain --down takes it back as well
    assert cli("migrate", "--set-based-frames").status == 0
    assert cli("migrate", "--down", "--yes").status == 0
    assert catalog(engine) == cuebots
