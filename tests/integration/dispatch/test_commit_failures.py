"""Errors of the database: who is blamed, who is not, and what is in doubt."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, text

from opencue_sched.dispatch.commit import commit_plan
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobSpec, LayerSpec
from opencue_sched.errors import DatabaseFailure, HostExhausted
from opencue_sched.settings import Settings
from opencue_sched.store.schema import check_schema
from tests.kit.gathering import counted_statements, waiting_jobs
from tests.kit.plans import assert_consistent, commit, plan, reasons
from tests.kit.sessions import await_end, count_deadlocks, end_sessions
from tests.kit.statements import listening, naming

HISTORY_OFF = text("INSERT INTO config (pk_config, str_key) VALUES ('off', 'DISABLE_HISTORY')")
HISTORY_ON = text("DELETE FROM config WHERE str_key = 'DISABLE_HISTORY'")


WAIT_AT_ROWS_FOR_ANY_TIME = """
    CREATE FUNCTION wait_for_any_time() RETURNS trigger LANGUAGE plpgsql AS
    $$BEGIN PERFORM set_config('lock_timeout', '0', true); RETURN NULL; END$$;
    CREATE TRIGGER wait_for_any_time BEFORE INSERT ON proc
    FOR EACH STATEMENT EXECUTE FUNCTION wait_for_any_time()"""
"""SQL of a trigger after which only the bound of the whole statement ends a wait for locked rows."""


def fail_for(job_id: str, raising: str) -> str:
    """SQL of a trigger that raises when a frame of the job is started."""
    return f"""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
        $$BEGIN IF NEW.pk_job = '{job_id}' AND NEW.str_state = 'RUNNING' THEN {raising}; END IF; RETURN NEW; END$$;
        CREATE TRIGGER a_refuse BEFORE UPDATE ON frame FOR EACH ROW EXECUTE FUNCTION refuse()"""


def count_transactions(connection: Connection) -> None:
    """From now on the database counts the transactions that insert procs, in sequences: those no rollback undoes."""
    connection.exec_driver_sql(
        """
        CREATE SEQUENCE transactions;
        CREATE SEQUENCE newest_transaction;
        CREATE FUNCTION count_transaction() RETURNS trigger LANGUAGE plpgsql AS $$
        DECLARE
            mine bigint := CAST(CAST(pg_current_xact_id() AS text) AS bigint);
        BEGIN
            IF mine <> (SELECT last_value FROM newest_transaction) THEN
                PERFORM setval('newest_transaction', mine), nextval('transactions');
            END IF;
            RETURN NULL;
        END$$;
        CREATE TRIGGER count_transaction BEFORE INSERT ON proc
        FOR EACH STATEMENT EXECUTE FUNCTION count_transaction()"""
    )


def transactions(engine: Engine) -> int:
    """How many transactions have inserted procs since `count_transactions`, also those that were rolled back."""
    with engine.connect() as connection:
        found = text("SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM transactions")
        return int(connection.execute(found).scalar_one())


def with_deadline(settings: Settings, seconds: float) -> Settings:
    accounting = settings.accounting.model_copy(update={"commit_deadline": seconds})
    return settings.model_copy(update={"accounting": accounting})


@pytest.mark.parametrize("jobs", [1, 2, 7])
def test_one_job_whose_rows_fail_is_found_and_quarantined_and_the_others_run(
    engine: Engine, settings: Settings, jobs: int
) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=64, memory_gb=64)
        specs = [JobSpec([LayerSpec(frames=2), LayerSpec()], priority=200 - number) for number in range(jobs)]
        ids = farm.jobs(specs)
        bad = ids[jobs // 2]
        procs = plan(farm, settings)
        connection.exec_driver_sql(fail_for(bad.id, "RAISE EXCEPTION 'frame 17 of the job is beyond repair'"))

    result = commit(engine, procs, settings)

    assert {c.job.id for c in result.committed} == {job.id for job in ids} - {bad.id}
    assert len(result.committed) == 3 * (jobs - 1)
    assert reasons(result) == ["database_failure"] * 3
    assert result.quarantined.keys() == {bad.id}
    assert "beyond repair" in result.quarantined[bad.id]
    assert_consistent(engine)
    with engine.begin() as connection:
        (stored,) = connection.execute(text("SELECT * FROM opencue_sched_quarantine")).all()
        assert stored.pk_job == bad.id
        seconds = (stored.until - stored.ts).total_seconds()
        assert seconds == pytest.approx(settings.queue.job_back_off_duration, abs=2)
        until = {job.id: job.quarantined_until for job in waiting_jobs(connection)}
        assert until == {bad.id: pytest.approx(stored.until.timestamp(), abs=0.01)}


def test_a_job_made_while_history_was_off_stops_nobody_else(engine: Engine, settings: Settings) -> None:
    """On a schema of Cuebot's its missing history rows make every batch with it fail on a foreign key."""
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=64, memory_gb=64)
        good = farm.jobs([JobSpec([LayerSpec(frames=2)]) for _ in range(3)])
        connection.execute(HISTORY_OFF)
        bad = farm.job([LayerSpec(frames=2)])
        connection.execute(HISTORY_ON)
        procs = plan(farm, settings)
        fails = check_schema(connection).origin == "cuebot"

    result = commit(engine, procs, settings)

    committed = {c.job.id for c in result.committed}
    assert committed == {job.id for job in good} | (set() if fails else {bad.id})
    assert result.quarantined.keys() == ({bad.id} if fails else set())
    assert all("23503" in reason for reason in result.quarantined.values())
    assert_consistent(engine)


def test_a_serialization_failure_is_repeated(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        job = farm.job([LayerSpec(frames=3)])
        procs = plan(farm, settings)
        count_transactions(connection)
        connection.execute(text("CREATE SEQUENCE attempts"))
        raising = "IF nextval('attempts') <= 2 THEN RAISE EXCEPTION 'try again' USING ERRCODE = '40001'; END IF"
        connection.exec_driver_sql(fail_for(job.id, raising))

    result = commit(engine, procs, settings)

    assert (len(result.committed), transactions(engine)) == (3, 3)
    assert result.quarantined == {}


def test_failures_that_repeat_end_at_the_deadline_without_blame(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        job = farm.job()
        procs = plan(farm, settings)
        count_transactions(connection)
        connection.exec_driver_sql(fail_for(job.id, "RAISE EXCEPTION 'deadlock' USING ERRCODE = '40P01'"))

    result = commit(engine, procs, with_deadline(settings, 2.0))

    assert reasons(result) == ["database_failure"]
    assert transactions(engine) > 2
    assert result.quarantined == {}


def test_the_host_triggers_refusal_blames_the_host(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        job = farm.job()
        procs = plan(farm, settings)
        raising = "RAISE EXCEPTION 'unable to allocate additional core units'"
        connection.exec_driver_sql(fail_for(job.id, raising))

    result = commit(engine, procs, settings)

    assert [type(error) for _, error in result.lost] == [HostExhausted]
    assert result.quarantined == {}


@pytest.mark.parametrize(("bound", "refusal"), [("lock", "55P03"), ("statement", "57014")])
def test_jobs_whose_counters_stay_locked_are_left_out_without_blame(
    engine: Engine, settings: Settings, bound: str, refusal: str
) -> None:
    # given eight jobs, and others who hold the counters of three: too long for the wait at one row (lock) or for the
    # waits at one row after another together (statement)
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=64, memory_gb=64)
        jobs = farm.jobs([JobSpec([LayerSpec(frames=2)]) for _ in range(8)])
        procs = plan(farm, settings)
        count_transactions(connection)
        if bound == "statement":
            connection.exec_driver_sql(WAIT_AT_ROWS_FOR_ANY_TIME)
    assert len(procs) == 16
    held = {jobs[0].id, jobs[3].id, jobs[7].id}
    refusals: list[str] = []

    with engine.begin() as other:
        other.execute(text("SELECT 1 FROM job_stat WHERE pk_job = ANY(:j) FOR UPDATE"), {"j": [jobs[0].id, jobs[3].id]})
        layer = jobs[7].layers[0].id
        other.execute(text("SELECT 1 FROM layer_stat WHERE pk_layer = :l FOR UPDATE"), {"l": layer})
        with listening(engine, "handle_error", lambda error: refusals.append(error.original_exception.pgcode)):
            result = commit(engine, procs, with_deadline(settings, 20.0))

    # then that bound alone ended the wait, and every other job is booked all the same, in one transaction, without
    # cutting the plan in halves
    assert refusals == [refusal]
    assert {c.job.id for c in result.committed} == {job.id for job in jobs} - held
    assert reasons(result) == ["database_failure"] * 6
    assert {proc.job.id for proc, _ in result.lost} == held
    assert (transactions(engine), result.quarantined) == (1, {})
    assert_consistent(engine)


def test_a_column_that_is_missing_blames_no_job(engine: Engine, settings: Settings) -> None:
    # given a column that is gone, of the table which is written last
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        farm.jobs([JobSpec([LayerSpec()]) for _ in range(3)])
        procs = plan(farm, settings)
        count_transactions(connection)
        connection.execute(text("ALTER TABLE frame RENAME COLUMN int_gpu_mem_reserved TO renamed"))

    result = commit(engine, procs, settings)

    # then nothing is tried again, in halves or whole
    assert reasons(result) == ["database_failure"] * 3
    assert (result.quarantined, transactions(engine)) == ({}, 1)


def test_a_database_that_does_not_answer_loses_the_plan_for_certain(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        farm.job([LayerSpec(frames=2)])
        procs = plan(farm, settings)
        facts = check_schema(connection)
    nowhere = create_engine("postgresql+psycopg2://nobody@127.0.0.1:1/none", connect_args={"connect_timeout": 1})

    result = commit_plan(nowhere, procs, {}, settings, facts=facts)

    nowhere.dispose()
    assert reasons(result) == ["database_failure"] * 2
    assert not any(error.outcome_unknown for _, error in result.lost if isinstance(error, DatabaseFailure))
    assert result.unknown == []


def test_a_booking_that_is_too_old_is_not_sent_at_all(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        farm.job()
        procs = plan(farm, settings)
        facts = check_schema(connection)

    with counted_statements(engine) as statements:
        late = time.monotonic() - 0.6 * settings.accounting.commit_deadline
        result = commit_plan(engine, procs, {}, settings, facts=facts, booked_at=late)

    assert statements == []
    assert reasons(result) == ["database_failure"]


def test_a_commit_that_would_come_too_late_is_not_sent(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        job = farm.job()
        procs = plan(farm, settings)
        facts = check_schema(connection)
        connection.execute(text("CREATE SEQUENCE started"))
        connection.exec_driver_sql(fail_for(job.id, "PERFORM nextval('started')"))

    def clock() -> float:
        with engine.connect() as other:
            return 9.0 if other.scalar(text("SELECT is_called FROM started")) else 0.0

    result = commit_plan(engine, procs, {}, settings, facts=facts, clock=clock)

    assert clock() == 9.0, "the last statement was sent"
    assert result.committed == []
    assert reasons(result) == ["database_failure"]
    assert_consistent(engine)


@pytest.fixture
def before_commit(engine: Engine) -> Any:
    """Calls something with the server process id just before each COMMIT is sent."""
    hooks: list[Callable[[int], None]] = []

    def fire(connection: Any) -> None:
        pid = connection.connection.driver_connection.info.backend_pid
        while hooks:
            hooks.pop()(pid)

    event.listen(engine, "commit", fire)
    yield hooks.append
    event.remove(engine, "commit", fire)


def test_a_client_that_pauses_before_commit_is_refused_by_the_server(
    engine: Engine, settings: Settings, database_url: str, before_commit: Any
) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        farm.job([LayerSpec(frames=2)])
        procs = plan(farm, settings)
        facts = check_schema(connection)
    other = create_engine(database_url)
    before_commit(lambda pid: await_end(other, [pid]))

    result = commit_plan(engine, procs, {}, with_deadline(settings, 6.0), facts=facts)

    other.dispose()
    assert result.committed == result.lost == []
    assert len(result.unknown) == 2
    assert_consistent(engine)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM proc")) == 0


def test_a_connection_lost_during_commit_leaves_the_outcome_in_doubt(
    engine: Engine, settings: Settings, database_url: str, before_commit: Any
) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        farm.job([LayerSpec(frames=2)])
        procs = plan(farm, settings)
        facts = check_schema(connection)
    other = create_engine(database_url, isolation_level="AUTOCOMMIT")

    def kill(pid: int) -> None:
        end_sessions(other, [pid])

    before_commit(kill)
    result = commit_plan(engine, procs, {}, settings, facts=facts)

    other.dispose()
    assert result.committed == result.lost == []
    assert [proc.proc_id for proc, _ in result.unknown] == [p.proc_id for p in procs]
    assert all(error.outcome_unknown for _, error in result.unknown)
    again = commit_plan(engine, procs, {}, settings, facts=facts)
    assert len(again.committed) == 2


def test_a_connection_lost_before_commit_is_a_certain_loss(
    engine: Engine, settings: Settings, database_url: str
) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        job = farm.job()
        procs = plan(farm, settings)
        raising = "PERFORM pg_terminate_backend(pg_backend_pid())"
        connection.exec_driver_sql(fail_for(job.id, raising))

    result = commit(engine, procs, settings)

    assert reasons(result) == ["database_failure"]
    assert result.unknown == []
    assert_consistent(engine)


def test_the_server_bounds_the_transaction(engine: Engine, settings: Settings) -> None:
    seen: dict[str, str] = {}
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        farm.job()
        procs = plan(farm, settings)
        version = connection.dialect.server_version_info or (0,)

    def read(connection: Any, *_: Any) -> None:
        cursor = connection.connection.driver_connection.cursor()
        names = ["statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"]
        for name in names + (["transaction_timeout"] if version[0] >= 17 else []):
            cursor.execute("SELECT setting, unit FROM pg_settings WHERE name = %s", (name,))
            setting, unit = cursor.fetchone()
            assert unit == "ms"
            seen[name] = setting
        cursor.close()

    event.listen(engine, "commit", read)
    result = commit(engine, procs, settings)
    event.remove(engine, "commit", read)

    deadline_ms = settings.accounting.commit_deadline * 1000
    assert len(result.committed) == 1
    assert len(seen) >= 3
    assert all(0 < int(value) < deadline_ms for value in seen.values())
    assert int(seen["idle_in_transaction_session_timeout"]) + 0.8 * deadline_ms < deadline_ms


def test_three_committers_on_the_same_jobs_never_deadlock(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        for _ in range(30):
            farm.host(cores=64, memory_gb=256)
        farm.jobs([JobSpec([LayerSpec(frames=15)] * 3) for _ in range(10)])
        procs = plan(farm, settings)
        facts = check_schema(connection)
    shares = [[procs[i] for i in range(len(procs)) if (i * 7) % 3 == n] for n in range(3)]
    results = []

    def work(share: list[Any]) -> None:
        for start in range(0, len(share), 24):
            pending = share[start : start + 24]
            while pending:
                result = commit_plan(engine, pending, {}, settings, facts=facts)
                results.append(result)
                pending = [proc for proc, error in result.lost if error.retriable]

    threads = [threading.Thread(target=work, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sum(len(result.committed) for result in results) == len(procs) == 450
    assert count_deadlocks(engine) == 0
    assert_consistent(engine)


def test_a_frame_that_is_given_a_proc_under_our_lock_keeps_that_one(engine: Engine, settings: Settings) -> None:
    """By somebody who does not lock frames."""
    with engine.begin() as connection:
        farm = Farm(connection)
        host = farm.host(cores=8)
        farm.job([LayerSpec(frames=2)])
        procs = plan(farm, settings, cores=2)
    theirs = text(
        "INSERT INTO proc (pk_proc, pk_host, pk_show, pk_job, pk_layer, pk_frame, int_cores_reserved, int_mem_reserved,"
        " int_mem_pre_reserved, int_mem_used) SELECT 'theirs', :host, pk_show, pk_job, pk_layer, pk_frame, 100, 1, 1, 1"
        " FROM frame JOIN job USING (pk_job) WHERE int_number = 1"
    )

    def interfere() -> None:
        with engine.begin() as other:
            other.execute(theirs, {"host": host.id})

    # when the procs are about to be inserted
    with listening(engine, "before_cursor_execute", naming(procs[0].proc_id, interfere)):
        result = commit(engine, procs, settings)

    assert [c.frame.number for c in result.committed] == [2]
    assert reasons(result) == ["frame_lost"]
    assert result.quarantined == {}
    with engine.connect() as connection:
        assert set(connection.execute(text("SELECT pk_proc FROM proc")).scalars()) == {"theirs", procs[1].proc_id}
        assert connection.scalar(text("SELECT int_cores_idle FROM host")) == 600


def test_committers_of_one_plan_start_each_frame_once(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        for _ in range(6):
            farm.host(cores=64, memory_gb=256)
        farm.jobs([JobSpec([LayerSpec(frames=10)]) for _ in range(4)])
        plans = [plan(farm, settings) for _ in range(3)]
        facts = check_schema(connection)
    results = []

    def work(procs: list[Any]) -> None:
        results.append(commit_plan(engine, procs, {}, settings, facts=facts))

    threads = [threading.Thread(target=work, args=(procs,)) for procs in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    started = [c.frame.id for result in results for c in result.committed]
    assert len(started) == len(set(started)) > 0
    assert sum(len(result.lost) for result in results) == 120 - len(started)
    assert_consistent(engine)


def test_secrets_never_reach_a_reason(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        farm.job()
        procs = plan(farm, settings)
        facts = check_schema(connection)
    url = "postgresql+psycopg2://nobody:hunter2@127.0.0.1:1/none"
    nowhere = create_engine(url, connect_args={"connect_timeout": 1})

    result = commit_plan(nowhere, procs, {}, settings, facts=facts)

    nowhere.dispose()
    assert "hunter2" not in str(result.lost[0][1])
