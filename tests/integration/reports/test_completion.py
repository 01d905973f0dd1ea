"""Completions through the real path: what becomes of the frame, the proc, the host, the layer and the job."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, text
from structlog.testing import capture_logs

from opencue_sched.clients.postgres import OURS
from opencue_sched.domain.states import FrameState
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.jobs.control import JobControl
from opencue_sched.reports.completion import Releaser
from opencue_sched.reports.run_ends import CompletedFrame, RunVerdict
from opencue_sched.rqd.kill import Fate
from opencue_sched.settings import Release
from opencue_sched.store.release import FrameStop, stop_frames
from tests.kit.counted import Counted
from tests.kit.runs import FarmView, RecordedChanges, RecordedLedger, ScriptedKiller, complete_frame, start
from tests.kit.statements import listening


@pytest.mark.parametrize(
    ("report", "layer", "job", "state"),
    [
        ({"exit_status": 0}, {}, {}, "SUCCEEDED"),
        ({"exit_status": 1}, {}, {}, "WAITING"),
        ({"exit_status": 1}, {}, {"max_retries": 0}, "DEAD"),
        ({"exit_status": 1}, {}, {"autoeat": True}, "EATEN"),
        ({"exit_status": 286}, {}, {"max_retries": 0}, "WAITING"),
        ({"exit_status": 1, "exit_signal": 119}, {}, {"max_retries": 1}, "WAITING"),
        ({"exit_status": 256}, {}, {"max_retries": 1}, "WAITING"),
        ({"exit_status": 1, "exit_signal": 15, "nimby_locked": True}, {}, {"max_retries": 0}, "WAITING"),
        ({"exit_status": 1}, {"timeout": 10, "ran_seconds": 601}, {}, "DEAD"),
        ({"exit_status": 1}, {"timeout": 11, "ran_seconds": 601}, {}, "WAITING"),
        ({"exit_status": 1, "silent_seconds": 300}, {"timeout_llu": 5, "ran_seconds": 301}, {}, "DEAD"),
        ({"exit_status": 1, "silent_seconds": 300}, {"timeout_llu": 5, "ran_seconds": 200}, {}, "WAITING"),
        ({"exit_status": 1}, {"ran_seconds": 43_201}, {}, "DEAD"),
        ({"exit_status": 33}, {}, {"max_retries": 0}, "WAITING"),
        ({"exit_status": 1, "exit_signal": 33}, {}, {"max_retries": 0}, "WAITING"),
    ],
)
def test_each_state_decision_is_written(
    engine: Engine, view: FarmView, report: dict[str, int], layer: dict[str, int], job: dict[str, int], state: str
) -> None:
    # given a running frame of a layer and job with these rules
    fields = {**layer}
    ran_seconds = fields.pop("ran_seconds", 0)
    run = start(view, LayerSpec(frames=2, **fields), **job)
    view.run_sql("UPDATE frame SET ts_started = clock_timestamp() - make_interval(secs => :ran)", ran=ran_seconds)
    version = view.frame(run.frames[0]).int_version

    # when its process ends like this
    outcome = complete_frame(engine, run.report(**report))

    # then the frame is in the state the rules say, its proc is gone and its host has everything back
    assert (outcome.verdict, outcome.state) == (RunVerdict.APPLIED, FrameState(state))
    frame = view.frame(run.frames[0])
    assert frame.str_state == state
    assert frame.int_exit_status == report["exit_status"]
    assert frame.int_mem_max_used == 500_000
    assert frame.int_version == version + 1
    assert (frame.ts_stopped - frame.ts_updated).total_seconds() == 1, "stamped a second ahead, as Cuebot does"
    assert view.procs() == []
    view.assert_consistent()


def test_a_completion_releases_the_ledger_and_tells_the_host_caches_after_the_commit(
    engine: Engine, view: FarmView, ledger: RecordedLedger, changes: RecordedChanges
) -> None:
    class Looks(RecordedLedger):
        def release(self, proc_ids: Sequence[str]) -> int:
            assert view.procs() == [], "told before the commit"
            return ledger.release(proc_ids)

    run = start(view)
    assert complete_frame(engine, run.report(), ledger=Looks(), changes=changes).verdict is RunVerdict.APPLIED
    assert ledger.released == list(run.procs)
    assert changes.published == [run.host.id]


def test_a_failing_redis_does_not_undo_a_completion(engine: Engine, view: FarmView) -> None:
    # given a ledger that cannot be reached
    class Broken(RecordedLedger):
        def release(self, proc_ids: object) -> int:
            raise ConnectionError("redis is away")

    run = start(view)
    counts = Counted()

    # when a frame completes
    (outcome,) = Releaser(engine, ledger=Broken(), count=counts).end([run.report()])

    # then it is completed all the same, and it is known that the ledger was not told
    assert outcome.verdict is RunVerdict.APPLIED
    assert view.procs() == []
    assert counts["ledger_release_failed"] == 1


def test_usage_and_peak_memory_are_counted_once(engine: Engine, view: FarmView) -> None:
    # given four frames on 2 cores and a GPU each that started 1000, 500, 2000 and 600 s ago, in two transactions
    run = start(view, LayerSpec(frames=5, optimize=False), running=4, gpus=1)
    for frame, seconds in zip(run.frames, (1000, 500, 2000, 600), strict=True):
        ago = "UPDATE frame SET ts_started = now() - :s * interval '1 second' WHERE pk_frame = :f"
        view.run_sql(ago, s=seconds, f=frame)

    # when three succeed and one fails, the last one alone
    Releaser(engine).end(
        [
            run.report(0, max_rss_kb=700_000),
            run.report(1, max_rss_kb=100),
            run.report(2, exit_status=1, max_rss_kb=900_000),
        ]
    )
    complete_frame(engine, run.report(3, max_rss_kb=800_000))

    # then layer, job and show have each run once, the longest and the shortest success, and the highest peak
    def about(value: int, seconds: int) -> bool:
        return seconds <= value <= seconds + 200

    for table, key, value in (("layer", "pk_layer", run.job.layers[0].id), ("job", "pk_job", run.job.id)):
        usage = view.one(f"SELECT * FROM {table}_usage WHERE {key} = :id", id=value)  # noqa: S608
        assert (usage.int_frame_success_count, usage.int_frame_fail_count) == (3, 1)
        assert about(usage.int_core_time_success, 4200)
        assert about(usage.int_core_time_fail, 4000)
        assert about(usage.int_gpu_time_success, 2100)
        assert about(usage.int_gpu_time_fail, 2000)
        assert about(usage.int_clock_time_success, 2100)
        assert about(usage.int_clock_time_fail, 2000)
        assert about(usage.int_clock_time_high, 1000)
        assert table == "job" or about(usage.int_clock_time_low, 500)
        memory = view.one(f"SELECT * FROM {table}_mem WHERE {key} = :id", id=value)  # noqa: S608
        assert memory.int_max_rss == 900_000
    show = view.one("SELECT * FROM show_stats WHERE pk_show = :show", show=run.job.show.id)
    assert (show.int_frame_success_count, show.int_frame_fail_count) == (3, 1)
    first = view.frame(run.frames[0])
    assert about(first.int_total_past_core_time, 2000)
    assert about(first.int_total_past_gpu_time, 1000)
    view.assert_consistent()


def test_times_that_no_longer_fit_their_columns_stay_at_the_most_these_hold(engine: Engine, view: FarmView) -> None:
    # given a frame, a layer and a job that have used nearly as much as four bytes count
    run = start(view, gpus=1)
    nearly = 2_147_483_647 - 50
    view.run_sql("UPDATE frame SET ts_started = now() - interval '100 seconds' WHERE str_state = 'RUNNING'")
    view.run_sql("UPDATE frame SET int_total_past_core_time = :n, int_total_past_gpu_time = :n", n=nearly)
    for table in ("layer_usage", "job_usage"):
        view.run_sql(f"UPDATE {table} SET int_clock_time_success = :n", n=nearly)  # noqa: S608

    assert complete_frame(engine, run.report()).state is FrameState.SUCCEEDED

    frame = view.frame(run.frames[0])
    assert (frame.int_total_past_core_time, frame.int_total_past_gpu_time) == (2_147_483_647,) * 2
    for table in ("layer_usage", "job_usage"):
        assert view.one(f"SELECT int_clock_time_success AS seconds FROM {table}").seconds == 2_147_483_647  # noqa: S608


def test_a_frame_is_stopped_as_it_was_read_or_not_at_all(engine: Engine, view: FarmView) -> None:
    """What was read is locked, so this is the second fence; it is there for whoever changes a frame without a lock."""
    run = start(view)
    version = view.frame(run.frames[0]).int_version
    stop = FrameStop(run.frames[0], version - 1, FrameState.SUCCEEDED, 0)
    with engine.begin() as connection:
        assert stop_frames(connection, [stop]) == []
        assert [frame.id for frame in stop_frames(connection, [replace(stop, version=version)])] == [stop.frame_id]
        stopped = view_version(connection, stop.frame_id)
        assert stop_frames(connection, [replace(stop, version=stopped)]) == []


def view_version(connection: Connection, frame_id: str) -> int:
    query = text("SELECT int_version FROM frame WHERE pk_frame = :f")
    return int(connection.execute(query, {"f": frame_id}).scalar_one())


LOCK_ORDER = ("frame", "proc", "show", "host", "layer_stat", "job_stat")


@pytest.mark.parametrize("number", range(len(LOCK_ORDER)))
def test_locks_are_taken_in_one_order_before_anything_is_written(engine: Engine, view: FarmView, number: int) -> None:
    """A schema whose triggers count row by row deadlocks else; and who owns a show stays so until the end."""
    run = start(view, LayerSpec(frames=1), LayerSpec(frames=1), running=1)
    with view.farm() as farm:
        farm.layer_on_layer((run.job, 1), (run.job, 0))
    rows = {
        "show": ("pk_show", run.job.show.id),
        "frame": ("pk_frame", run.frames[0]),
        "proc": ("pk_proc", run.procs[0]),
        "host": ("pk_host", run.host.id),
        "layer_stat": ("pk_layer", run.job.layers[1].id),
        "job_stat": ("pk_job", run.job.id),
    }
    view.run_sql(
        "CREATE SEQUENCE written; CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS"
        " $$BEGIN PERFORM nextval('written'); RETURN NULL; END$$"
    )
    for table in LOCK_ORDER:
        view.run_sql(
            f"CREATE TRIGGER note BEFORE INSERT OR UPDATE OR DELETE ON {table} FOR EACH STATEMENT"
            " EXECUTE FUNCTION note()"
        )

    def is_locked(table: str) -> bool:
        column, row_id = rows[table]
        query = f"SELECT 1 FROM {table} WHERE {column} = :id FOR NO KEY UPDATE SKIP LOCKED"  # noqa: S608
        return not view.rows(query, id=row_id)

    # given a session that has one of the rows
    with engine.connect() as other, ThreadPoolExecutor(1) as threads:
        column, row_id = rows[LOCK_ORDER[number]]
        query = text(f"SELECT 1 FROM {LOCK_ORDER[number]} WHERE {column} = :id FOR NO KEY UPDATE")  # noqa: S608
        other.execute(query, {"id": row_id})
        # when a frame is completed
        ended = threads.submit(complete_frame, engine, run.report())
        view.wait_for_waiters(1)
        # then it has all rows that come before that one, and none that comes after it, and nothing is written
        locked, written = [is_locked(table) for table in LOCK_ORDER], view.one("SELECT is_called FROM written")
        other.rollback()
        assert ended.result(30).verdict is RunVerdict.APPLIED
    assert locked == [place <= number for place in range(len(LOCK_ORDER))]
    assert not written.is_called


def test_a_local_proc_is_in_no_accounting_table_and_none_of_the_ledgers(
    engine: Engine, view: FarmView, ledger: RecordedLedger
) -> None:
    # given a frame that Cuebot dispatched onto an artist's own machine
    run = start(view)
    view.run_sql("UPDATE proc SET b_local = true")
    view.run_sql("UPDATE subscription SET int_burst = 10000, int_cores = 300")

    complete_frame(engine, run.report(), ledger=ledger)

    subscription = "SELECT int_cores FROM subscription WHERE pk_show = :show"
    assert view.one(subscription, show=run.job.show.id).int_cores == 300
    assert ledger.released == []
    view.assert_consistent()


def test_a_duplicate_report_changes_nothing(engine: Engine, view: FarmView, ledger: RecordedLedger) -> None:
    # given a completed frame
    run = start(view)
    complete_frame(engine, run.report(), ledger=ledger)
    before = view.frame(run.frames[0])

    # when the same report arrives again, alone and twice in one transaction
    again = complete_frame(engine, run.report(), ledger=ledger)
    both = Releaser(engine, ledger=ledger).end([run.report(), run.report(exit_status=1)])

    # then nothing changes
    assert [outcome.verdict for outcome in (again, *both)] == [RunVerdict.STALE] * 3
    assert view.frame(run.frames[0]) == before
    assert ledger.released == list(run.procs)
    view.assert_consistent()


def test_two_reports_of_one_run_in_one_transaction_count_once(engine: Engine, view: FarmView) -> None:
    run = start(view)
    outcomes = Releaser(engine).end([run.report(), run.report(exit_status=1)])
    assert [outcome.verdict for outcome in outcomes] == [RunVerdict.APPLIED, RunVerdict.STALE]
    assert view.frame(run.frames[0]).str_state == "SUCCEEDED"
    view.assert_consistent()


def test_a_late_report_does_not_stop_the_run_that_followed(engine: Engine, view: FarmView) -> None:
    # given a frame whose first run was lost and which runs again elsewhere
    run = start(view)
    view.run_sql("DELETE FROM proc")
    view.run_sql("UPDATE host SET int_cores_idle = int_cores, int_mem_idle = int_mem")
    view.run_sql("UPDATE frame SET str_state = 'WAITING', int_version = int_version + 1 WHERE str_state = 'RUNNING'")
    with view.farm() as farm:
        (second,) = farm.run([run.frames[0]], run.host)

    # when the first run's report arrives, with a success
    outcome = complete_frame(engine, run.report())

    # then the second run goes on
    assert outcome.verdict is RunVerdict.SUPERSEDED
    assert view.frame(run.frames[0]).str_state == "RUNNING"
    assert view.procs() == [second]
    view.assert_consistent()


def test_a_report_of_a_proc_that_moved_on_changes_nothing(engine: Engine, view: FarmView) -> None:
    # given a proc that has been given its job's next frame (Cuebot reuses procs)
    run = start(view)
    view.run_sql("UPDATE frame SET str_state = 'WAITING' WHERE pk_frame = :frame", frame=run.frames[0])
    view.run_sql("UPDATE frame SET str_state = 'RUNNING' WHERE pk_frame = :frame", frame=run.job.frames[1])
    view.run_sql("UPDATE proc SET pk_frame = :frame", frame=run.job.frames[1])

    outcome = complete_frame(engine, run.report())

    assert outcome.verdict is RunVerdict.SUPERSEDED
    assert view.procs() == list(run.procs)
    assert view.states(run.job.frames) == ["WAITING", "RUNNING"]


def test_a_proc_whose_frame_was_taken_off_it_is_released(engine: Engine, view: FarmView) -> None:
    # given a frame that was eaten by hand while its process ran on
    run = start(view)
    view.run_sql("UPDATE proc SET pk_frame = NULL")
    view.run_sql("UPDATE frame SET str_state = 'EATEN' WHERE pk_frame = :frame", frame=run.frames[0])

    # when the killed process reports its end
    outcome = complete_frame(engine, run.report(exit_status=1, exit_signal=9))

    # then the frame stays as it is and the proc is released
    assert outcome.verdict is RunVerdict.RELEASED
    assert view.states(run.frames) == ["EATEN"]
    assert view.procs() == []
    view.assert_consistent()


def test_the_end_of_an_orphan_frame_is_not_lost(engine: Engine, view: FarmView) -> None:
    # given a frame that runs although its proc was deleted
    run = start(view)
    view.run_sql("DELETE FROM proc")
    view.run_sql("UPDATE host SET int_cores_idle = int_cores, int_mem_idle = int_mem")

    # when a report comes from another host, then from its own
    elsewhere = CompletedFrame(run.procs[0], run.frames[0], "elsewhere", 0)
    assert complete_frame(engine, elsewhere).verdict is RunVerdict.SUPERSEDED
    outcome = complete_frame(engine, run.report())

    # then only the second counts
    assert (outcome.verdict, outcome.state) == (RunVerdict.ORPHAN_APPLIED, FrameState.SUCCEEDED)
    view.assert_consistent()


def test_a_report_nobody_knows_is_answered_and_ignored(engine: Engine, view: FarmView) -> None:
    run = start(view)
    unknown = CompletedFrame("no-such-proc", "no-such-frame", run.host.name, 0)
    assert complete_frame(engine, unknown).verdict is RunVerdict.UNKNOWN
    assert view.procs() == list(run.procs)


def test_the_end_of_a_run_counts_whichever_host_it_ran_on(engine: Engine, view: FarmView) -> None:
    # given two runs, of which one was started where the name of its host leads by mistake
    run = start(view, running=2)
    astray = replace(run.report(), host_name="another.studio.example")
    at_home = replace(run.report(1), host_name=f"{run.host.name}.studio.example")
    # when both end
    with capture_logs() as logs:
        for report in (astray, at_home):
            assert complete_frame(engine, report).verdict is RunVerdict.APPLIED
    # then both frames are rendered, and both names of the first are told
    assert (view.states(run.frames), view.procs()) == (["SUCCEEDED"] * 2, [])
    view.assert_consistent()
    told = [(line["log_level"], line["booked_on"], line["reported_by"]) for line in logs if "booked_on" in line]
    assert told == [("warning", run.host.name, "another.studio.example")]


def test_the_history_of_a_finished_job_includes_its_last_run(engine: Engine, view: FarmView) -> None:
    # given a job whose two frames have run for a thousand seconds each
    run = start(view, LayerSpec(frames=2, optimize=False), running=2)
    view.run_sql("UPDATE frame SET ts_started = now() - interval '1000 seconds'")

    # when one ends after the other
    for place in range(2):
        complete_frame(engine, run.report(place, max_rss_kb=1000 + place))

    # then what both took is in the history of the job and of the layer
    assert view.job_state(run.job) == "FINISHED"
    for table, usage, memory in (("job", "job_usage", "job_mem"), ("layer", "layer_usage", "layer_mem")):
        past = view.one(f"SELECT * FROM {table}_history WHERE pk_job = :job", job=run.job.id)  # noqa: S608
        both = f"SELECT * FROM {usage} JOIN {memory} USING (pk_job) WHERE pk_job = :job"  # noqa: S608
        used = view.one(both, job=run.job.id)
        assert past.int_core_time_success == used.int_core_time_success >= 4000
        assert past.int_max_rss == used.int_max_rss == 1001


def test_the_history_of_a_killed_job_includes_the_runs_that_end_with_it(engine: Engine, view: FarmView) -> None:
    # given a job with a frame that has run for a thousand seconds
    run = start(view, LayerSpec(frames=2, optimize=False))
    view.run_sql("UPDATE frame SET ts_started = now() - interval '1000 seconds' WHERE str_state = 'RUNNING'")

    # when it is killed, and its frame ends by that
    JobControl(Releaser(engine), ScriptedKiller(Fate.UNREACHABLE)).kill_job(run.job.id, reason="a test")
    assert view.job_state(run.job) == "FINISHED"
    complete_frame(engine, run.report(exit_status=1, exit_signal=9))

    # then what it took is in the history of the job and of the layer
    for table in ("job_history", "layer_history"):
        past = view.one(f"SELECT * FROM {table} WHERE pk_job = :job", job=run.job.id)  # noqa: S608
        assert past.int_core_time_fail >= 2000


def test_the_history_includes_a_run_that_ends_while_its_job_is_killed(engine: Engine, view: FarmView) -> None:
    # given a job with a frame that has run for a thousand seconds
    run = start(view, LayerSpec(frames=2, optimize=False))
    view.run_sql("UPDATE frame SET ts_started = now() - interval '1000 seconds' WHERE str_state = 'RUNNING'")
    impatient = create_engine(engine.url, connect_args={"application_name": OURS, "options": "-c lock_timeout=1ms"})
    control = JobControl(Releaser(impatient), ScriptedKiller(Fate.UNREACHABLE))
    killed: list[bool] = []

    def kill(*_: object) -> None:
        if not killed:
            killed.append(control.kill_job(run.job.id, reason="a test").finished)

    # when it is killed while the frame's end has read what runs, and has not locked the job's counters
    with listening(engine, "after_cursor_execute", kill):
        complete_frame(engine, run.report(exit_status=1, exit_signal=9))
    impatient.dispose()

    # then what it took is in the history of the job and of the layer
    assert (killed, view.job_state(run.job)) == ([True], "FINISHED")
    for table in ("job_history", "layer_history"):
        past = view.one(f"SELECT * FROM {table} WHERE pk_job = :job", job=run.job.id)  # noqa: S608
        assert past.int_core_time_fail >= 2000


def test_an_exit_status_too_wide_for_the_history_is_still_recorded(engine: Engine, view: FarmView) -> None:
    # given an exit status as Windows gives them, which frame_history (smallint) cannot hold
    run = start(view)
    outcome = complete_frame(engine, run.report(exit_status=-1073741819))
    assert outcome.state is FrameState.WAITING
    assert view.frame(run.frames[0]).int_exit_status == -32_768


def test_a_report_the_database_refuses_does_not_take_the_others_with_it(engine: Engine, view: FarmView) -> None:
    # given two running frames, one of which the database refuses to stop
    run = start(view, running=2)
    view.run_sql(
        f"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.pk_frame = '{run.frames[0]}'"
        " THEN RAISE EXCEPTION 'bad row'; END IF; RETURN NEW; END $$"
    )
    view.run_sql("CREATE TRIGGER refuse BEFORE UPDATE ON frame FOR EACH ROW EXECUTE FUNCTION refuse()")

    # when both complete together
    refused, applied = Releaser(engine).end([run.report(0), run.report(1)])

    # then one is refused and says so, the other is applied
    assert (refused.verdict, "bad row" in str(refused.error)) == (RunVerdict.REFUSED, True)
    assert applied.verdict is RunVerdict.APPLIED
    assert view.states(run.frames) == ["RUNNING", "SUCCEEDED"]
    view.assert_consistent()


def test_memory_grown_since_booking_goes_back_to_the_host(engine: Engine, view: FarmView) -> None:
    # given a proc whose memory reservation grew after it was booked (the trigger takes it from the host)
    run = start(view, memory_gb=2)
    view.run_sql("UPDATE proc SET int_mem_reserved = int_mem_reserved + 1048576")
    view.assert_consistent()

    complete_frame(engine, run.report())

    host = view.host(run.host)
    assert host.int_mem_idle == host.int_mem
    view.assert_consistent()


def test_host_idle_never_passes_its_total(engine: Engine, view: FarmView) -> None:
    # given a host whose idle was set too high by somebody
    run = start(view, gpus=1)
    view.run_sql(
        "UPDATE host SET int_cores_idle = int_cores, int_mem_idle = int_mem, int_gpus_idle = int_gpus,"
        " int_gpu_mem_idle = int_gpu_mem"
    )
    complete_frame(engine, run.report())
    view.assert_consistent()


@pytest.mark.parametrize(("overridden", "known", "memory_gb"), [(True, True, 6), (False, True, 3), (False, False, 4)])
def test_a_memory_failure_raises_the_layer_and_switches_its_optimizer_off(
    engine: Engine, view: FarmView, overridden: bool, known: bool, memory_gb: int
) -> None:
    # given a frame with 2 GB reserved, of a service that asks for 1 GB more after a memory failure, or for 4 GB in this
    # show, or of one that nobody knows
    run = start(view, LayerSpec(frames=2, services="renderer-x,shell"), memory_gb=2)
    columns = "str_name, b_threadable, int_cores_min, int_mem_min, str_tags, int_min_memory_increase"
    values = "'renderer-x', true, 100, 1, 'general'"
    if known:
        view.run_sql(f"INSERT INTO service (pk_service, {columns}) VALUES ('s1', {values}, 1048576)")  # noqa: S608
    if overridden:
        view.run_sql(
            f"INSERT INTO show_service (pk_show_service, pk_show, {columns})"  # noqa: S608
            f" VALUES ('s2', :show, {values}, 4194304)",
            show=run.job.show.id,
        )

    complete_frame(engine, run.report(exit_status=33), frame_memory=False)

    layer = view.one("SELECT * FROM layer")
    assert layer.int_mem_min == memory_gb * 1048576
    assert layer.b_optimize is False


def test_a_success_lowers_the_memory_of_a_layer_that_allows_it(engine: Engine, view: FarmView) -> None:
    # given a layer of 4 GB whose frame used 600,000 KB
    run = start(view, LayerSpec(frames=3, memory_gb=4), running=2)
    complete_frame(engine, run.report(0, max_rss_kb=600_000))
    assert view.one("SELECT * FROM layer").int_mem_min == 600_000 + 262_144

    # when the next frame used less, the highest peak still counts
    complete_frame(engine, run.report(1, max_rss_kb=100))
    assert view.one("SELECT * FROM layer").int_mem_min == 600_000 + 262_144


def test_a_memory_failure_never_lowers_the_memory_of_a_layer(engine: Engine, view: FarmView) -> None:
    # nor does a success that is reported with it
    run = start(view, LayerSpec(frames=2, memory_gb=8), running=2, memory_gb=2)
    Releaser(engine, Release(frame_memory=False)).end(
        [run.report(0, max_rss_kb=600_000), run.report(1, exit_status=33)]
    )
    assert view.one("SELECT * FROM layer").int_mem_min == 8 * 1048576


@pytest.mark.parametrize(
    ("used_kb", "optimize", "exit_status"),
    [
        pytest.param(600_000, False, 0, id="not allowed"),
        pytest.param(0, True, 0, id="nothing measured"),
        pytest.param(4 * 1048576 - 1000, True, 0, id="within the margin"),
        pytest.param(5 * 1048576, True, 0, id="more than it asks for"),
        pytest.param(600_000, True, 1, id="no success"),
    ],
)
def test_a_run_leaves_the_memory_of_a_layer_alone(
    engine: Engine, view: FarmView, used_kb: int, optimize: bool, exit_status: int
) -> None:
    run = start(view, LayerSpec(frames=2, memory_gb=4))
    view.run_sql("UPDATE layer SET b_optimize = :optimize", optimize=optimize)
    complete_frame(engine, run.report(0, max_rss_kb=used_kb, exit_status=exit_status))
    assert view.one("SELECT * FROM layer").int_mem_min == 4 * 1048576


def test_an_earlier_memory_failure_does_not_make_every_failure_one(engine: Engine, view: FarmView) -> None:
    # given a frame without retries left whose run before this one died of memory
    run = start(view, max_retries=0)
    view.run_sql("UPDATE frame SET int_exit_status = 33")
    outcome = complete_frame(engine, run.report(exit_status=1))
    assert outcome.state is FrameState.DEAD


@pytest.mark.parametrize("managed", [True, False])
def test_the_five_tables_follow_for_unmanaged_shows_only(
    engine: Engine, view: FarmView, ledger: RecordedLedger, managed: bool
) -> None:
    # given a running frame of 2 cores that somebody counted in the five tables
    run = start(view, gpus=1)
    view.run_sql("UPDATE show SET b_scheduler_managed = :managed", managed=managed)
    show, job = run.job.show, run.job
    tables = {
        "subscription": ("pk_show", show.id),
        "layer_resource": ("pk_layer", job.layers[0].id),
        "job_resource": ("pk_job", job.id),
        "folder_resource": ("pk_folder", job.folder_id),
        "point": ("pk_show", show.id),
    }
    view.run_sql("UPDATE subscription SET int_burst = 100000")
    for table, (key, value) in tables.items():
        view.run_sql(f"UPDATE {table} SET int_cores = 500, int_gpus = 3 WHERE {key} = :value", value=value)  # noqa: S608
    # and in one of them less than it holds
    view.run_sql("UPDATE folder_resource SET int_cores = 100, int_gpus = 0 WHERE pk_folder = :f", f=job.folder_id)

    # when it completes
    complete_frame(engine, run.report(), ledger=ledger)

    # then the tables are lowered where nobody else recomputes them, and the ledger elsewhere
    left = {
        table: tuple(view.one(f"SELECT int_cores, int_gpus FROM {table} WHERE {key} = :value", value=value))  # noqa: S608
        for table, (key, value) in tables.items()
    }
    expected = dict.fromkeys(tables, (500, 3) if managed else (300, 2))
    assert left == {**expected, "folder_resource": (100, 0) if managed else (0, 0)}
    assert ledger.released == (list(run.procs) if managed else [])


@pytest.mark.parametrize("managed", [True, False])
def test_the_number_of_statements_does_not_grow_with_the_batch(engine: Engine, view: FarmView, managed: bool) -> None:
    # given a job of many running frames
    run = start(view, LayerSpec(frames=31), running=30, cores=0.5, memory_gb=1)
    view.run_sql("UPDATE show SET b_scheduler_managed = :managed", managed=managed)
    statements: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *arguments: statements.append(arguments[2]))

    # when one completes, then all the others together
    Releaser(engine).end([run.report(0)])
    alone = len(statements)
    statements.clear()
    Releaser(engine).end([run.report(index) for index in range(1, 30)])

    # then both take the same few statements
    assert len(statements) == alone <= 25
    assert view.states(run.frames) == ["SUCCEEDED"] * 30
    view.assert_consistent()
