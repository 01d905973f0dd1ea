"""The privileges without which no process starts: each is needed, and it does not matter how a user has it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from opencue_proto import report_pb2
from sqlalchemy import Engine
from sqlalchemy.exc import ProgrammingError

from opencue_sched.clients.postgres import ask, make_engine
from opencue_sched.coordination.keys import LeaderKeys
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.errors import StoreUnusable
from opencue_sched.reports.completion import Releaser
from opencue_sched.reports.host_reports import HostReports, StatusReport
from opencue_sched.settings import Settings
from opencue_sched.store.fences import PersistentFences
from opencue_sched.store.privileges import (
    CHANGED,
    CHANGES,
    WRITES_OF_BEATS,
    WRITES_OF_REPORT_SERVICES,
    WRITES_OF_WORKERS,
    Writes,
    check_privileges,
)
from tests.kit.database_users import as_user, database_user, grant_what_doctor_asks_for, run_all
from tests.kit.plans import commit, plan
from tests.kit.reported_hosts import render_host
from tests.kit.runs import FarmView, ScriptedKiller, complete_frame, start

BEAT = LeaderKeys("cue", "beat").name
ALL_WRITES = {"worker": WRITES_OF_WORKERS, "beat": WRITES_OF_BEATS, "report service": WRITES_OF_REPORT_SERVICES}


@pytest.fixture
def user(engine: Engine) -> Iterator[str]:
    """A user that owns nothing and may nothing."""
    with database_user(engine) as name:
        yield name


@contextmanager
def engine_of(user: str, settings: Settings) -> Iterator[Engine]:
    engine = make_engine(as_user(settings, user))
    try:
        yield engine
    finally:
        engine.dispose()


def assert_each_is_needed(
    writes: Writes, does: Callable[[Engine], bool], user: str, engine: Engine, settings: Settings
) -> None:
    """Without any one of ``writes`` the user is refused what ``does`` does, and is told before; with all it does it."""
    with engine_of(user, settings) as limited:
        for privilege, names in writes.items():
            for name in names:
                run_all(engine, f"REVOKE {privilege} ON {name} FROM {user}")
                assert not does(limited), f"works without {privilege} on {name}"
                with pytest.raises(StoreUnusable, match=rf"allowed: {privilege} on {name};"):
                    ask(limited, check_privileges, writes)
                run_all(engine, f"GRANT {privilege} ON {name} TO {user}")
        ask(limited, check_privileges, writes)
        assert does(limited)


def test_no_booking_is_made_without_a_privilege_that_a_worker_is_refused_for(
    user: str, engine: Engine, settings: Settings
) -> None:
    # given frames that wait, and a user that may what doctor asks for
    grant_what_doctor_asks_for(engine, user)
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        farm.job([LayerSpec(frames=2)])
        procs = plan(farm, settings)

    # when it books, less one privilege each time, then nothing is booked
    def book(limited: Engine) -> bool:
        return bool(commit(limited, procs, settings).committed)

    assert_each_is_needed(WRITES_OF_WORKERS, book, user, engine, settings)


def test_no_beat_leads_without_a_privilege_that_a_beat_is_refused_for(
    user: str, engine: Engine, settings: Settings
) -> None:
    grant_what_doctor_asks_for(engine, user)

    def lead(limited: Engine) -> bool:
        try:
            return PersistentFences(limited).claim(BEAT, 1)
        except ProgrammingError:
            return False

    assert_each_is_needed(WRITES_OF_BEATS, lead, user, engine, settings)


def test_no_report_is_taken_without_a_privilege_that_a_report_service_is_refused_for(
    user: str, engine: Engine, settings: Settings
) -> None:
    # given a frame that runs, and a user that may what doctor asks for
    grant_what_doctor_asks_for(engine, user)
    run = start(FarmView(engine), LayerSpec(frames=1))
    named = report_pb2.HostReport(host=render_host(name=run.host.name))

    # when its host reports and the frame ends, less one privilege each time, then one of the two is refused
    def take_reports(limited: Engine) -> bool:
        reports = HostReports(Releaser(limited, settings.release, None, None), ScriptedKiller())
        try:
            (taken,) = reports.statuses([StatusReport(named, time.monotonic())])
            return taken.error is None and complete_frame(limited, run.report()).error is None
        except ProgrammingError:
            return False

    assert_each_is_needed(WRITES_OF_REPORT_SERVICES, take_reports, user, engine, settings)


@pytest.mark.parametrize("process", ALL_WRITES)
def test_what_a_start_needs_is_among_what_doctor_asks_for(process: str) -> None:
    for privilege, names in ALL_WRITES[process].items():
        assert privilege in CHANGES
        assert set(names) <= set(CHANGED)


MAY = "SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public"


@pytest.mark.parametrize(
    "given",
    [
        ["GRANT {may} TO {user}"],
        ["ALTER ROLE {user} SUPERUSER"],
        ["GRANT {may} TO {group}", "GRANT {group} TO {user}"],
        ["GRANT {owner} TO {user}"],
        ["GRANT {may} TO PUBLIC"],
    ],
    ids=["granted", "superuser", "member of a group", "member of the owner", "granted to all"],
)
def test_it_does_not_matter_how_a_user_has_its_privileges(
    given: list[str], user: str, engine: Engine, settings: Settings
) -> None:
    with database_user(engine) as group:
        words = {"may": MAY, "user": user, "group": group, "owner": engine.url.username}
        run_all(engine, *(statement.format(**words) for statement in given))
        with engine_of(user, settings) as limited:
            for writes in ALL_WRITES.values():
                ask(limited, check_privileges, writes)


def test_the_owner_is_not_refused(engine: Engine) -> None:
    for writes in ALL_WRITES.values():
        ask(engine, check_privileges, writes)


def test_a_beat_that_leads_by_privileges_on_single_columns_is_not_refused(
    user: str, engine: Engine, settings: Settings
) -> None:
    granted = "SELECT, INSERT (name, fence), UPDATE (fence)"
    run_all(engine, f"GRANT {granted} ON opencue_sched_fence TO {user}")
    with engine_of(user, settings) as limited:
        assert PersistentFences(limited).claim(BEAT, 1)
        ask(limited, check_privileges, WRITES_OF_BEATS)


def test_the_statement_that_is_to_be_run_names_every_schema_that_has_one_of_the_tables(
    user: str, engine: Engine, settings: Settings
) -> None:
    # given a user that may write nothing, and a table of ours in a schema of its own
    run_all(
        engine,
        "CREATE SCHEMA farm",
        "ALTER TABLE opencue_sched_hold SET SCHEMA farm",
        f"GRANT USAGE ON SCHEMA farm TO {user}",
        f"ALTER ROLE {user} SET search_path = farm, public",
    )
    with engine_of(user, settings) as limited:
        # when a worker starts
        with pytest.raises(StoreUnusable) as refused:
            ask(limited, check_privileges, WRITES_OF_WORKERS)

        # then what it says to run is all that it needs
        statement = str(refused.value).partition(", GRANT ")[2].partition(" (")[0]
        run_all(engine, f"GRANT {statement}")
        ask(limited, check_privileges, WRITES_OF_WORKERS)


def test_a_name_that_needs_quotes_has_them_in_the_statement_that_is_to_be_run(engine: Engine) -> None:
    run_all(engine, 'CREATE ROLE "Farm user"')
    try:
        with engine.begin() as connection:
            connection.exec_driver_sql('SET LOCAL ROLE "Farm user"')
            with pytest.raises(StoreUnusable, match='IN SCHEMA public TO "Farm user" '):
                check_privileges(connection, WRITES_OF_BEATS)
    finally:
        run_all(engine, 'DROP ROLE "Farm user"')
