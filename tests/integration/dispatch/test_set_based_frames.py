"""Bookings that write counters and history at once write what Cuebot's triggers write row by row, whatever happens."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import Connection, Engine, create_engine, text

from opencue_sched.clients.postgres import make_engine
from opencue_sched.dispatch.commit import CommitResult, commit_plan
from opencue_sched.domain.plans import PlannedProc
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, JobSpec, LayerSpec
from opencue_sched.settings import Settings
from opencue_sched.store.schema import SchemaFacts, check_schema
from opencue_sched.store.set_based_frames import COUNTS, HISTORY, MARKER
from tests.kit.database_users import as_user, database_user, grant_what_doctor_asks_for
from tests.kit.databases import TEST_SESSIONS, Databases
from tests.kit.plans import assert_consistent, plan, reasons
from tests.kit.polling import eventually
from tests.kit.row_triggers import count_row_by_row, definition, leave_to_bookings
from tests.kit.sessions import count_deadlocks, end_sessions
from tests.kit.statements import listening

HISTORY_OFF = text("INSERT INTO config (pk_config, str_key) VALUES ('off', 'DISABLE_HISTORY')")
HISTORY_ON = text("DELETE FROM config WHERE str_key = 'DISABLE_HISTORY'")
_GATE = 4711
"""Advisory lock behind which a commit waits in the middle of its UPDATE."""
_STATEMENTS = 7
"""How many statements a booking sends before its COMMIT, unless it takes any back."""

_IDS_OF_A_COPY = ("pk_frame_history", "pk_layer_stat", "pk_job_stat", "pk_host_stat")
_TABLES = ("frame", "proc", "host", "layer_stat", "job_stat", "frame_history")


def planned(engine: Engine, settings: Settings, *, jobs: int = 2) -> list[PlannedProc]:
    """A plan of all frames of a small farm."""
    with engine.begin() as connection:
        farm = Farm(connection, seed=7)
        farm.hosts([HostSpec(cores=64, memory_gb=256) for _ in range(3)])
        farm.jobs([JobSpec([LayerSpec(frames=4), LayerSpec(frames=3)]) for _ in range(jobs)])
        return plan(farm, settings)


def rows(engine: Engine) -> dict[str, list[str]]:
    """Every row of the tables that a booking writes. Of times only whether there is one: those of two runs differ."""
    found: dict[str, list[str]] = {}
    with engine.connect() as connection:
        for table in _TABLES:
            values = connection.execute(text(f"SELECT to_jsonb(t) FROM {table} t")).scalars()  # noqa: S608 - ours
            found[table] = sorted(
                str(
                    {
                        name: value is not None if name.startswith(("ts_", "int_ts_")) and value != 0 else value
                        for name, value in sorted(row.items())
                        if name not in _IDS_OF_A_COPY
                    }
                )
                for row in values
            )
    return found


def assert_counted_and_recorded(engine: Engine, running: int) -> None:
    """Each running frame is counted once and has one open run in history, with the times of the frame."""
    assert_consistent(engine)
    checks = {
        "runs": "SELECT count(*) FROM frame_history WHERE int_ts_stopped = 0",
        "running": "SELECT count(*) FROM frame WHERE str_state = 'RUNNING'",
        "alike": "SELECT count(*) FROM frame f JOIN frame_history h USING (pk_frame)"
        " JOIN host ON host.str_name = f.str_host JOIN layer_stat s ON s.pk_layer = f.pk_layer"
        " WHERE f.str_state = 'RUNNING' AND h.int_ts_started = epoch(f.ts_started) AND h.str_host = f.str_host"
        " AND h.pk_alloc = host.pk_alloc AND h.int_cores = f.int_cores AND s.ts_started IS NOT NULL",
    }
    with engine.connect() as connection:
        counted = {name: connection.scalar(text(statement)) for name, statement in checks.items()}
    assert counted == dict.fromkeys(checks, running)


def assert_no_marker(engine: Engine) -> None:
    """No session that was given back still has the marker."""
    lent = [engine.connect() for _ in range(engine.pool.checkedin() or 1)]  # type: ignore[attr-defined]
    try:
        for connection in lent:
            assert connection.scalar(text("SELECT current_setting(:name, true)"), {"name": MARKER}) in ("", None)
    finally:
        for connection in lent:
            connection.close()


@contextmanager
def before_statement(engine: Engine, number: int, do: Callable[[Any], None]) -> Iterator[None]:
    """Do something, once, just before the statement of that number is sent, or COMMIT where so many were sent."""
    sent = count()

    def look(connection: Any, *_: object) -> None:
        if next(sent) == number:
            do(connection)

    with listening(engine, "before_cursor_execute", look), listening(engine, "commit", lambda each: look(each)):
        yield


def leave_to_bookings_but_put_back(engine: Engine, triggers: Collection[str]) -> SchemaFacts:
    """Switch to set-based frames, after which somebody puts the functions of these triggers back; the facts with which
    a worker books that has not noticed."""
    with engine.begin() as connection:
        count_row_by_row(connection)
        cuebots = [definition(connection, trigger) for trigger in triggers]
    facts = leave_to_bookings(engine)
    with engine.begin() as connection:
        for function in cuebots:
            connection.connection.cursor().execute(function)
    return facts


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Bookings that are committed however long a busy machine takes."""
    patient = settings.accounting.model_copy(update={"commit_deadline": 40.0})
    return settings.model_copy(update={"accounting": patient})


@pytest.fixture
def elsewhere(database_url: str) -> Iterator[Engine]:
    """Sessions of somebody else in the same database."""
    engine = create_engine(database_url)
    yield engine
    engine.dispose()


@pytest.fixture
def second(databases: Databases, settings: Settings) -> Iterator[Engine]:
    """Another migrated database of this test's own."""
    url = databases.take()
    engine = make_engine(settings.model_copy(update={"database_url": SecretStr(url)}), application_name=TEST_SESSIONS)
    yield engine
    engine.dispose()
    databases.give_back(url)


# The same plans both ways


def _random_farm(connection: Connection, seed: int) -> Farm:
    """Jobs with several layers, of frames that never ran, ran before, or checkpoint; some made without history."""
    draw = random.Random(seed)
    farm = Farm(connection, seed=seed)
    farm.hosts([HostSpec(name=name, cores=64, memory_gb=256) for name in ("short", "h" * 45, "another")])
    history = draw.choice(("on", "off", "made without"))
    for number in range(draw.randint(2, 4)):
        if history == "made without" and number == 1:
            connection.execute(HISTORY_OFF)
        farm.job([LayerSpec(frames=draw.randint(1, 5)) for _ in range(draw.randint(1, 3))])
        if history == "made without" and number == 1:
            connection.execute(HISTORY_ON)
    if history == "off":
        connection.execute(HISTORY_OFF)
    frames = connection.execute(text("SELECT pk_frame FROM frame ORDER BY pk_frame")).scalars().all()
    for frame in frames:
        connection.execute(
            text(
                "UPDATE frame SET int_exit_status = :status, int_retries = :retries, str_checkpoint_state = :checkpoint"
                " WHERE pk_frame = :frame"
            ),
            {
                "frame": frame,
                "status": draw.choice((-1, 0, 1, 299, 256)),
                "retries": draw.randint(0, 2),
                "checkpoint": draw.choice(("DISABLED", "DISABLED", "ENABLED", "COPYING")),
            },
        )
    return farm


def _ends(connection: Connection, seed: int) -> None:
    """Some running frames end as a Cuebot ends them: done, dead, or waiting (or checkpointed) again."""
    draw = random.Random(seed)
    running = "SELECT pk_frame, pk_proc FROM frame JOIN proc USING (pk_frame) ORDER BY pk_frame"
    for frame, proc in connection.execute(text(running)).all():
        if draw.random() < 0.5:
            state, status = draw.choice((("SUCCEEDED", 0), ("DEAD", 1), ("WAITING", 1), ("WAITING", 299)))
            _end(connection, frame, proc, state, status)


def _end(connection: Connection, frame: str, proc: str, state: str, status: int) -> None:
    connection.execute(
        text(
            "UPDATE frame SET str_state = :state, int_exit_status = :status, ts_stopped = now() + interval '1 second',"
            " int_version = int_version + 1 WHERE pk_frame = :frame"
        ),
        {"frame": frame, "state": state, "status": status},
    )
    gone = text(
        "DELETE FROM proc WHERE pk_proc = :proc RETURNING pk_host, int_cores_reserved AS cores, int_mem_reserved AS mem"
    )
    released = connection.execute(gone, {"proc": proc}).one()
    connection.execute(
        text(
            "UPDATE host SET int_cores_idle = int_cores_idle + :cores, int_mem_idle = int_mem_idle + :mem"
            " WHERE pk_host = :pk_host"
        ),
        released._asdict(),
    )


@pytest.mark.parametrize("seed", range(12))
def test_the_same_plans_write_the_same_rows_both_ways(
    engine: Engine, second: Engine, settings: Settings, seed: int
) -> None:
    # given two copies of a farm, on one of which bookings write at once
    farms = {}
    for copy in (engine, second):
        with copy.begin() as connection:
            count_row_by_row(connection)
            farms[copy] = replace(check_schema(connection), set_based_frames=False)
            _random_farm(connection, seed)
    farms[second] = leave_to_bookings(second)
    # when the same plans are committed to both, and frames end in between
    for turn in range(3):
        with engine.begin() as connection:
            procs = plan(Farm(connection), settings)
        draw = random.Random(seed + turn)
        share = draw.sample(procs, k=(len(procs) + 1) // 2)
        if draw.random() < 0.3 and share:  # a name that frame has room for, and frame_history not
            share[0] = replace(share[0], host=replace(share[0].host, name="h" * 70))
        results = [commit_plan(copy, share, {}, settings, facts=facts) for copy, facts in farms.items()]
        # then the same is committed, and lost for the same reasons, and every row is alike
        assert [proc.proc_id for proc in results[0].committed] == [proc.proc_id for proc in results[1].committed]
        assert reasons(results[0]) == reasons(results[1])
        assert results[0].quarantined.keys() == results[1].quarantined.keys()
        versions = [[proc.frame.version for proc in result.committed] for result in results]
        assert versions[0] == versions[1]
        assert rows(engine) == rows(second)
        for copy in farms:
            assert_consistent(copy)
            with copy.begin() as connection:
                connection.execute(text("DELETE FROM opencue_sched_quarantine"))
                _ends(connection, seed + turn)
        assert rows(engine) == rows(second)
    assert_no_marker(second)


# Whatever the functions say when the booking comes


def _book(engine: Engine, procs: Sequence[PlannedProc], settings: Settings, facts: SchemaFacts) -> CommitResult:
    result = commit_plan(engine, procs, {}, settings, facts=facts)
    assert_no_marker(engine)
    return result


@pytest.mark.parametrize("patched", [(), (COUNTS,), (HISTORY,), (COUNTS, HISTORY)])
def test_with_none_one_or_both_functions_changed_all_is_counted_once(
    engine: Engine, settings: Settings, patched: tuple[str, ...]
) -> None:
    facts = leave_to_bookings_but_put_back(engine, {COUNTS, HISTORY} - set(patched))
    procs = planned(engine, settings)
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE SEQUENCE written; CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS"
            " $$BEGIN PERFORM nextval('written'); RETURN NULL; END$$;"
            " CREATE TRIGGER z_note AFTER UPDATE ON job_stat FOR EACH ROW EXECUTE FUNCTION note()"
        )

    result = _book(engine, procs, settings, facts)

    assert len(result.committed) == len(procs) == 14
    assert_counted_and_recorded(engine, running=14)
    # and each job's counters are written once a plan, or once a frame, and again after what was taken back
    writes = {(): 14, (COUNTS,): 14, (HISTORY,): 14 + 14, (COUNTS, HISTORY): 2}
    first = (
        "SELECT count(*) FROM layer_stat s"
        " WHERE ts_started = ALL (SELECT ts_started FROM frame f WHERE f.pk_layer = s.pk_layer)"
    )
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT last_value FROM written")) == writes[patched]
        assert connection.scalar(text(first)) == 4


@pytest.mark.parametrize("trigger", [COUNTS, HISTORY])
@pytest.mark.parametrize("number", range(_STATEMENTS + 1))
def test_a_function_put_back_between_two_statements_costs_no_count(
    engine: Engine, elsewhere: Engine, settings: Settings, trigger: str, number: int
) -> None:
    with engine.begin() as connection:
        count_row_by_row(connection)
        cuebots = definition(connection, trigger)
    facts = leave_to_bookings(engine)
    procs = planned(engine, settings)
    done: list[int] = []

    def put_back(_: Any) -> None:
        with elsewhere.begin() as other:
            other.connection.cursor().execute(cuebots)
        done.append(number)

    with before_statement(engine, number, put_back):
        result = _book(engine, procs, settings, facts)

    assert done == [number]
    assert len(result.committed) == len(procs)
    assert_counted_and_recorded(engine, running=len(procs))


@pytest.mark.parametrize("trigger", [COUNTS, HISTORY])
@pytest.mark.parametrize("when", ["BEFORE UPDATE ON frame FOR EACH STATEMENT", "AFTER UPDATE ON frame FOR EACH ROW"])
def test_a_function_put_back_in_the_middle_of_the_update_costs_no_count(
    engine: Engine, elsewhere: Engine, settings: Settings, trigger: str, when: str
) -> None:
    # given a site's own trigger that waits for a lock in the middle of the UPDATE
    with engine.begin() as connection:
        count_row_by_row(connection)
        cuebots = definition(connection, trigger)
    facts = leave_to_bookings(engine)
    procs = planned(engine, settings)
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE SEQUENCE calls; CREATE FUNCTION gate() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN"
            " IF TG_LEVEL = 'STATEMENT' OR nextval('calls') = 5 THEN"
            f" PERFORM pg_advisory_xact_lock_shared({_GATE}); END IF; RETURN NULL; END$$;"
            f" CREATE TRIGGER a_gate {when} EXECUTE FUNCTION gate()"
        )
    waits = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = :gate AND NOT granted")
    results: list[CommitResult] = []
    with elsewhere.execution_options(isolation_level="AUTOCOMMIT").connect() as other:
        other.execute(text(f"SELECT pg_advisory_lock({_GATE})"))
        booking = threading.Thread(target=lambda: results.append(_book(engine, procs, settings, facts)))
        booking.start()
        # when somebody puts the function back while it waits
        eventually(lambda: other.scalar(waits, {"gate": _GATE}) == 1, what="a commit in its UPDATE")
        other.connection.cursor().execute(cuebots)
        other.execute(text(f"SELECT pg_advisory_unlock({_GATE})"))
        booking.join()
    # then everything is counted and recorded once
    assert len(results[0].committed) == len(procs)
    assert_counted_and_recorded(engine, running=len(procs))


def test_frames_that_a_sites_trigger_starts_in_turn_are_left_to_cuebots_functions(
    engine: Engine, settings: Settings
) -> None:
    facts = leave_to_bookings(engine)
    *procs, kept = planned(engine, settings)
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE FUNCTION follow() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN"
            " UPDATE frame SET str_state = 'RUNNING', ts_started = now() WHERE pk_frame = TG_ARGV[0]"
            " AND str_state = 'WAITING'; RETURN NULL; END$$;"
        )
        connection.exec_driver_sql(
            "CREATE TRIGGER z_follow AFTER UPDATE ON frame FOR EACH ROW"
            f" WHEN (NEW.pk_frame = '{procs[0].frame.id}') EXECUTE FUNCTION follow('{kept.frame.id}')"
        )
    result = _book(engine, procs, settings, facts)
    assert len(result.committed) == len(procs)
    with engine.connect() as connection:
        counted = "SELECT sum(int_running_count) FROM {}"
        for table in ("layer_stat", "job_stat"):
            assert connection.scalar(text(counted.format(table))) == len(procs) + 1


# Sessions that die, and locks that are waited for


_KILLED = [((), number) for number in range(_STATEMENTS + 1)]
# After the savepoint: before what was written is taken back, before it is done again, and before COMMIT.
_KILLED += [((trigger,), number) for trigger in (COUNTS, HISTORY) for number in range(_STATEMENTS, _STATEMENTS + 3)]


@pytest.mark.parametrize(("put_back", "number"), _KILLED)
def test_a_session_killed_after_any_statement_leaves_nothing(
    engine: Engine, elsewhere: Engine, settings: Settings, put_back: tuple[str, ...], number: int
) -> None:
    facts = leave_to_bookings_but_put_back(engine, put_back)
    procs = planned(engine, settings)
    before = rows(engine)
    killed: list[int] = []

    def kill(connection: Any) -> None:
        end_sessions(elsewhere, [connection.connection.driver_connection.info.backend_pid])
        killed.append(number)

    with before_statement(engine, number, kill):
        result = commit_plan(engine, procs, {}, settings, facts=facts)

    assert killed == [number]
    assert result.committed == []
    assert rows(engine) == before
    # and the next one does all
    assert len(_book(engine, procs, settings, facts).committed) == len(procs)
    assert_counted_and_recorded(engine, running=len(procs))


@pytest.mark.parametrize(
    "step", ["UPDATE ON frame", "UPDATE ON layer_stat", "UPDATE ON job_stat", "INSERT ON frame_history"]
)
def test_a_session_that_dies_within_the_message_leaves_nothing(engine: Engine, settings: Settings, step: str) -> None:
    facts = leave_to_bookings(engine)
    procs = planned(engine, settings)
    before = rows(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN"
            " PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END$$;"
            f" CREATE TRIGGER z_die AFTER {step} FOR EACH STATEMENT EXECUTE FUNCTION die()"
        )

    result = commit_plan(engine, procs, {}, settings, facts=facts)

    assert result.committed == []
    assert rows(engine) == before
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP FUNCTION die() CASCADE")
    assert len(_book(engine, procs, settings, facts).committed) == len(procs)
    assert_counted_and_recorded(engine, running=len(procs))


def test_frames_whose_counters_stay_locked_are_lost_and_the_others_start(
    engine: Engine, elsewhere: Engine, settings: Settings
) -> None:
    facts = leave_to_bookings(engine)
    procs = planned(engine, settings)
    locked = procs[0].layer.id
    with elsewhere.begin() as other:
        other.execute(text("SELECT 1 FROM layer_stat WHERE pk_layer = :layer FOR UPDATE"), {"layer": locked})
        result = _book(engine, procs, settings, facts)
    assert {proc.layer.id for proc, _ in result.lost} == {locked}
    assert len(result.committed) == sum(proc.layer.id != locked for proc in procs) > 0
    assert_counted_and_recorded(engine, running=len(result.committed))


def test_beside_two_workers_and_a_cuebot_the_counters_stay_right(
    engine: Engine, elsewhere: Engine, settings: Settings
) -> None:
    facts = leave_to_bookings(engine)
    procs = planned(engine, settings, jobs=12)
    shares = [procs[0::3], procs[1::3]]
    theirs = [proc.frame.id for proc in procs[2::3]]
    over = threading.Event()
    failures: list[BaseException] = []

    def work(share: list[PlannedProc]) -> None:
        for start in range(0, len(share), 5):
            pending = share[start : start + 5]
            while pending:
                result = commit_plan(engine, pending, {}, settings, facts=facts)
                pending = [proc for proc, error in result.lost if error.retriable]

    def cuebot() -> None:
        """Starts and ends frames of the same layers, one in a transaction, each a few times."""
        set_state = text("UPDATE frame SET str_state = :state, int_version = int_version + 1 WHERE pk_frame = :frame")
        turns = 0
        try:
            while turns < len(theirs) or not over.is_set():
                for state in ("RUNNING", "WAITING"):
                    with elsewhere.begin() as other:
                        other.execute(set_state, {"state": state, "frame": theirs[turns % len(theirs)]})
                turns += 1
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(share,)) for share in shares]
    beside = threading.Thread(target=cuebot)
    for thread in (beside, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    over.set()
    beside.join()

    assert failures == []
    assert_counted_and_recorded(engine, running=sum(map(len, shares)))
    assert_no_marker(engine)
    assert count_deadlocks(engine, elsewhere) == 0


def test_a_database_user_that_owns_nothing_books_so(engine: Engine, settings: Settings) -> None:
    facts = leave_to_bookings(engine)
    procs = planned(engine, settings)
    with database_user(engine) as user:
        grant_what_doctor_asks_for(engine, user)
        limited = make_engine(as_user(settings, user))
        result = _book(limited, procs, settings, facts)
        limited.dispose()
    assert len(result.committed) == len(procs)
    assert_counted_and_recorded(engine, running=len(procs))


def test_a_marker_that_somebody_leaves_on_a_session_leaves_nothing_out(engine: Engine, settings: Settings) -> None:
    leave_to_bookings(engine)
    procs = planned(engine, settings)
    with engine.connect() as connection:
        connection.exec_driver_sql(f"SELECT set_config('{MARKER}', CAST(pg_current_xact_id() AS text), false)")
        connection.commit()
        connection.execute(
            text("UPDATE frame SET str_state = 'RUNNING', ts_started = now() WHERE pk_frame = :frame"),
            {"frame": procs[0].frame.id},
        )
        connection.commit()
        connection.exec_driver_sql(f"RESET {MARKER}")
        connection.commit()
        assert connection.scalar(text("SELECT sum(int_running_count) FROM job_stat")) == 1
        assert connection.scalar(text("SELECT count(*) FROM frame_history")) == 1
