"""``opencue-sched migrate --set-based-frames``, and what doctor says of it."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, text

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.store.set_based_frames import COUNTS, HISTORY, read_frames_way, switch_off, switch_on
from tests.kit.catalog import Catalog, read_catalog
from tests.kit.command import Cli
from tests.kit.row_triggers import KnownTexts, count_row_by_row, definition
from tests.kit.wording import lacks


def offers(cli: Cli) -> list[str]:
    """The lines in which doctor names the command that switches it on."""
    return [line for line in cli("doctor").out.splitlines() if "`opencue-sched migrate --set-based-frames`" in line]


def catalog(engine: Engine) -> Catalog:
    with engine.connect() as connection:
        return read_catalog(connection)


@pytest.mark.without_cuebot("its functions are those that can be switched")
def test_migrate_refuses_where_the_functions_are_ours(cli: Cli, engine: Engine) -> None:
    before = catalog(engine)
    ran = cli("migrate", "--set-based-frames")
    assert (ran.status, ran.out) == (1, "")
    assert "functions" in ran.err
    assert catalog(engine) == before
    assert "--set-based-frames" not in cli("doctor").out


@pytest.fixture
def known(engine: Engine) -> KnownTexts:
    """The texts of the functions of this test's database, which is as a Cuebot's."""
    with engine.begin() as connection:
        Farm(connection).default_show()
        connection.execute(text("UPDATE opencue_sched_origin SET origin = 'cuebot'"))
        return count_row_by_row(connection)


@pytest.mark.parametrize("trigger", [COUNTS, HISTORY])
def test_doctor_says_which_text_is_not_known(cli: Cli, engine: Engine, known: KnownTexts, trigger: str) -> None:
    with engine.begin() as connection:
        theirs = definition(connection, trigger).replace("RETURN NULL", "PERFORM 1; RETURN NULL")
        connection.connection.cursor().execute(theirs)
    told = cli("doctor").out
    assert f"trigger__{trigger}" in told


@pytest.mark.usefixtures("known")
def test_a_queue_of_history_is_left_and_doctor_says_so(cli: Cli, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE frame_history_queue (pk_frame text)"))
    before = catalog(engine)["function"]
    ran = cli("migrate", "--set-based-frames")
    assert ran.status == 1
    assert not lacks(ran.err, "queue", "history")
    assert catalog(engine)["function"] == before
    (told,) = [line for line in cli("doctor").out.splitlines() if "history" in line]
    assert "queue" in told
    assert offers(cli) == []


def test_a_plain_migrate_keeps_the_choice_and_both_ways_down_put_cuebots_functions_back(
    cli: Cli, engine: Engine, known: KnownTexts
) -> None:
    cuebots = catalog(engine)
    with engine.begin() as connection:
        switch_on(connection, known)
    set_based = catalog(engine)
    assert set_based != cuebots
    # when somebody migrates as ever, then nothing changes
    assert cli("migrate").status == 0
    assert catalog(engine) == set_based
    # and its own way back changes the two functions alone
    assert cli("migrate", "--set-based-frames", "--down").status == 0
    assert catalog(engine) == cuebots
    # and a plain --down puts them back, and leaves what a Cuebot has
    with engine.begin() as connection:
        switch_on(connection, known)
    assert cli("migrate", "--down", "--yes").status == 0
    left = catalog(engine)
    for name in (f"trigger__{COUNTS}()", f"trigger__{HISTORY}()"):
        assert left["function"][name] == cuebots["function"][name]
    assert {"frame", "host", "proc"} <= left["table"].keys()


def test_a_cuebots_database_goes_the_whole_way_and_back(cli: Cli, engine: Engine) -> None:
    with engine.begin() as connection:
        if read_frames_way(connection).obstacles:
            pytest.skip("for the functions that Cuebot's migrations make")
        switch_off(connection)
        Farm(connection).default_show()
    cuebots = catalog(engine)
    assert len(offers(cli)) == 1
    # when it is switched on
    ran = cli("migrate", "--set-based-frames")
    assert ran.status == 0
    assert not lacks(ran.out, "counters", "history")
    assert offers(cli) == []
    # then a plain migrate keeps it, and when one function was put back, the other one is told
    assert cli("migrate").status == 0
    with engine.begin() as connection:
        assert read_frames_way(connection).on
        name = f"trigger__{HISTORY}()"
        connection.connection.cursor().execute(cuebots["function"][name])
    told = cli("doctor").out
    assert (f"trigger__{COUNTS}" in told, f"trigger__{HISTORY}" in told) == (True, False)
    assert len(offers(cli)) == 1
    # and --down takes back that alone
    assert cli("migrate", "--set-based-frames").status == 0
    assert cli("migrate", "--set-based-frames", "--down").status == 0
    assert catalog(engine) == cuebots
    assert len(offers(cli)) == 1
    # and a plain --down takes it back as well
    assert cli("migrate", "--set-based-frames").status == 0
    assert cli("migrate", "--down", "--yes").status == 0
    assert catalog(engine) == cuebots
