"""Finished jobs that move to the history tables: which, what goes with them, and that nobody waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import OperationalError

from opencue_sched.clients.postgres import OURS
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostIds, JobIds, LayerSpec
from opencue_sched.errors import InvalidInput
from opencue_sched.jobs.control import JobControl
from opencue_sched.reports.completion import Releaser
from opencue_sched.reports.finished_jobs import FRAMES_PER_PORTION, Moved, move_finished_jobs
from opencue_sched.reports.run_ends import RunVerdict
from opencue_sched.rqd.kill import RqdKiller
from opencue_sched.settings import Release, Rqd
from opencue_sched.store import history
from tests.kit.runs import FarmView, Running, complete_frame
from tests.kit.statements import listening, rows_read

pytestmark = pytest.mark.without_cuebot("it moves the jobs of its database to the history tables itself")

HOUR = 3600.0
AFTER = 72 * HOUR
FINISHED_JOBS = 20_000
IMPATIENT = "-c lock_timeout=1ms"


@pytest.fixture
def view(engine: Engine) -> FarmView:
    view = FarmView(engine)
    upgraded(view, hours_ago=25)
    return view


def upgraded(view: FarmView, *, hours_ago: float) -> None:
    view.run_sql(
        "UPDATE task_lock SET ts_lastrun = localtimestamp - make_interval(secs => :s)"
        " WHERE str_name = 'LOCK_HISTORICAL_TRANSFER'",
        s=hours_ago * HOUR,
    )


def run_out(view: FarmView, job: JobIds, host: HostIds, *, hours_ago: float) -> None:
    """Each frame of a job renders and ends; then the job has been finished for so many hours."""
    with view.farm() as farm:
        procs = farm.run(job.frames, host)
    for proc, frame in zip(procs, job.frames, strict=True):
        complete_frame(view.engine, Running(job, host, (frame,), (proc,)).report())
    assert view.job_state(job) == "FINISHED"
    age(view, job, hours_ago=hours_ago)


def age(view: FarmView, job: JobIds, *, hours_ago: float) -> None:
    view.run_sql(
        "UPDATE job SET str_state = 'FINISHED', str_visible_name = NULL,"
        " ts_stopped = now() - make_interval(secs => :s) WHERE pk_job = :job",
        job=job.id,
        s=hours_ago * HOUR,
    )
    view.run_sql(
        "UPDATE job_history SET int_ts_stopped = epoch(job.ts_stopped) FROM job"
        " WHERE job.pk_job = :job AND job_history.pk_job = :job",
        job=job.id,
    )


def finished_job(farm: Farm, frames: int, **spec: Any) -> JobIds:
    """A job whose every frame is SUCCEEDED, without any run of it."""
    job = farm.job([LayerSpec(frames=frames)], **spec)
    farm.connection.execute(
        text("UPDATE frame SET str_state = 'SUCCEEDED', int_exit_status = 0 WHERE pk_job = :job"), {"job": job.id}
    )
    return job


def there(view: FarmView, *jobs: JobIds) -> list[bool]:
    return [bool(view.rows("SELECT FROM job WHERE pk_job = :job", job=job.id)) for job in jobs]


def figures(engine: Engine) -> list[Any]:
    """What `show report` and `job list --since` are made of."""
    with engine.connect() as connection:
        runs = [history.runs_by(connection, by, [0]) for by in ("show", "user", "day")]
        return [*runs, sorted(history.finished_jobs(connection, 1, most=1000))]


@contextmanager
def before_each_commit(engine: Engine, call: Any) -> Iterator[None]:
    def committing(connection: Connection) -> None:
        call(connection)

    with listening(engine, "commit", committing):
        yield


def test_a_job_moves_after_its_time_and_the_figures_stay_the_same(view: FarmView, engine: Engine) -> None:
    # given jobs that finished before and after the time is over, and one that runs
    with view.farm() as farm:
        old, young, live = (farm.job([LayerSpec(frames=3), LayerSpec(frames=2)]) for _ in range(3))
        host = farm.host(cores=64, memory_gb=256)
    run_out(view, old, host, hours_ago=73)
    run_out(view, young, host, hours_ago=71)
    before = figures(engine)

    # when
    moved = move_finished_jobs(engine, AFTER)

    # then the first has gone, with all that was its own, and what is told of the past is what it was
    assert moved == Moved(jobs=1, frames=5, portions=1)
    assert there(view, old, young, live) == [False, True, True]
    assert figures(engine) == before
    for table in ("frame", "layer", "job_stat", "job_resource", "job_usage", "job_mem", "layer_stat"):
        assert not view.rows(f"SELECT FROM {table} WHERE pk_job = :job", job=old.id), table
    kept = view.one("SELECT * FROM job_history WHERE pk_job = :job", job=old.id)
    assert (kept.b_archived, kept.int_frame_count, kept.int_succeeded_count) == (True, 5, 5)
    assert len(view.rows("SELECT FROM layer_history WHERE pk_job = :job AND b_archived", job=old.id)) == 2
    assert move_finished_jobs(engine, AFTER) == Moved()


def test_what_refers_to_a_job_goes_or_stays_as_by_cuebots_transfer(view: FarmView, engine: Engine) -> None:
    # given a job with comments, a limit, dependencies met and on it, and what we remember of its frames
    with view.farm() as farm:
        limit = farm.limit("houdini", 5)
        first = finished_job(farm, 2)
        job = farm.job([LayerSpec(frames=2, limits=[limit])], env={"A": "b"})
        after = farm.job([LayerSpec(frames=2)])
        farm.frame_by_frame((job, 0), (first, 0))
        farm.frame_by_frame((after, 0), (job, 0))
        for sql in (
            "UPDATE depend SET b_active = false",
            "UPDATE frame SET int_depend_count = 0",
            "INSERT INTO comments (pk_comment, pk_job, str_user, str_subject, str_message)"
            " VALUES ('c', :job, 'ann', 's', 'm')",
            "INSERT INTO frame_state_display_overrides (pk_frame_override, pk_frame, str_frame_state,"
            " str_override_text, str_rgb) VALUES ('o', :frame, 'SUCCEEDED', 'ok', '0')",
        ):
            farm.connection.execute(text(sql), {"job": job.id, "frame": job.frames[0]})
    age(view, job, hours_ago=100)

    # when it moves
    assert move_finished_jobs(engine, AFTER).jobs == 1

    # then its rows are gone, and only its
    for table in ("comments", "depend", "frame_state_display_overrides", "job_env", "layer_limit"):
        assert not view.rows(f"SELECT FROM {table}"), table
    assert there(view, first, job, after) == [True, False, True]
    assert len(view.rows("SELECT FROM limit_record WHERE pk_limit_record = :limit", limit=limit)) == 1


@pytest.mark.parametrize("keeps", ["a job waits for it", "it has a proc", "it is a job's post job"])
def test_a_job_that_something_still_needs_stays(view: FarmView, engine: Engine, keeps: str) -> None:
    with view.farm() as farm:
        job, other = farm.job([LayerSpec(frames=2)]), farm.job([LayerSpec(frames=2)])
        if keeps == "a job waits for it":
            farm.layer_on_layer((other, 0), (job, 0))
        elif keeps == "it has a proc":
            farm.run(job.frames[:1], farm.host())
        else:
            post = "INSERT INTO job_post (pk_job_post, pk_job, pk_post_job) VALUES ('p', :job, :post)"
            farm.connection.execute(text(post), {"job": other.id, "post": job.id})
    age(view, job, hours_ago=100)

    assert move_finished_jobs(engine, AFTER) == Moved()

    # until it does not any more
    for sql in ("UPDATE depend SET b_active = false", "DELETE FROM proc", "DELETE FROM job_post"):
        view.run_sql(sql)
    assert move_finished_jobs(engine, AFTER).jobs == 1


def test_a_large_job_goes_in_portions_and_a_process_may_end_between_any_two(view: FarmView, engine: Engine) -> None:
    # given
    with view.farm() as farm:
        large, *small = finished_job(farm, 2 * FRAMES_PER_PORTION + 100), finished_job(farm, 1), finished_job(farm, 1)
    for place, job in enumerate((large, *small)):
        age(view, job, hours_ago=100 - place)
    before = figures(engine)
    sizes: list[int] = []

    def portion() -> Moved:
        """What a process does that ends after one portion."""
        answers = iter((False, True))
        return move_finished_jobs(engine, AFTER, stopping=lambda: next(answers))

    # when process after process ends
    while (moved := portion()).portions:
        sizes.append(moved.frames)
        assert figures(engine) == before

        # then a job that is there in part is not opened again
        if 1 in sizes or not there(view, large)[0]:
            continue
        left = view.rows("SELECT pk_frame FROM frame WHERE pk_job = :job LIMIT 1", job=large.id)
        control = JobControl(Releaser(engine, Release()), RqdKiller(Rqd()))  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match="history"):
            control.retry_frames([left[0].pk_frame], reason="a person")

    # then each frame went once, in portions
    assert sizes == [FRAMES_PER_PORTION, FRAMES_PER_PORTION, 100, 2]
    assert there(view, large, *small) == [False] * 3
    view.assert_consistent()


def test_no_completion_and_no_booking_waits_for_a_portion(view: FarmView, engine: Engine) -> None:
    # given a farm at work, with sessions that refuse to wait for anybody, and a large job that is over
    with view.farm() as farm:
        large = finished_job(farm, FRAMES_PER_PORTION + 1)
        live = farm.job([LayerSpec(frames=4)], show=large.show)
        host = farm.host()
        procs = farm.run(live.frames[:2], host)
    age(view, large, hours_ago=100)
    ends = [Running(live, host, (frame,), (proc,)).report() for frame, proc in zip(live.frames, procs, strict=False)]
    impatient = create_engine(engine.url, connect_args={"application_name": f"{OURS}-impatient", "options": IMPATIENT})
    locks: set[tuple[str, str]] = set()
    outcomes = []

    def at_work(connection: Connection) -> None:
        held = "SELECT locktype, mode FROM pg_locks WHERE pid = pg_backend_pid() AND granted"
        locks.update(tuple(row) for row in connection.execute(text(held)))
        if ends:
            outcomes.append(complete_frame(impatient, ends.pop()).verdict)
            with impatient.begin() as booking:
                Farm(booking).run([live.frames[2 + len(ends)]], host)

    # when, while each portion holds its locks, a frame ends and another starts
    with before_each_commit(engine, at_work):
        moved = move_finished_jobs(engine, AFTER)
    impatient.dispose()

    # then none of them had to wait, and the portions have no lock but on rows
    assert (moved.jobs, outcomes) == (1, [RunVerdict.APPLIED] * 2)
    assert {mode for kind, mode in locks if kind == "relation"} <= {
        "AccessShareLock",
        "RowShareLock",
        "RowExclusiveLock",
    }
    assert {kind for kind, _ in locks} <= {"relation", "virtualxid", "transactionid"}


def test_a_portion_waits_for_nobody_either(view: FarmView, engine: Engine) -> None:
    # given two jobs that are over, and a person who holds a frame of one and the counters of a third
    with view.farm() as farm:
        held, free, counted = (finished_job(farm, 2) for _ in range(3))
    for job in (held, free, counted):
        age(view, job, hours_ago=100)

    # when
    with engine.begin() as person:
        person.execute(text("SELECT FROM frame WHERE pk_frame = :f FOR UPDATE"), {"f": held.frames[0]})
        person.execute(text("SELECT FROM job_stat WHERE pk_job = :job FOR UPDATE"), {"job": counted.id})
        moved = move_finished_jobs(engine, AFTER)

    # then the other one moves, and these once nobody holds them
    assert (moved.jobs, moved.refused) == (1, 1)
    assert there(view, held, free, counted) == [True, False, True]
    assert move_finished_jobs(engine, AFTER).jobs == 2


def test_a_job_that_the_database_refuses_to_delete_keeps_no_other(view: FarmView, engine: Engine) -> None:
    # given a table of the studio's own that names one of five jobs
    with view.farm() as farm:
        jobs = [finished_job(farm, 2) for _ in range(5)]
    view.run_sql("CREATE TABLE invoice (pk_job varchar(36) REFERENCES job (pk_job))")
    view.run_sql("INSERT INTO invoice VALUES (:job)", job=jobs[1].id)
    for place, job in enumerate(jobs):
        age(view, job, hours_ago=100 - place)

    # then the others move, and it does once nothing names it
    moved = move_finished_jobs(engine, AFTER)
    assert (moved.jobs, moved.frames, moved.refused) == (4, 8, 1)
    view.run_sql("DROP TABLE invoice")
    assert move_finished_jobs(engine, AFTER).jobs == 1


def test_a_portion_reads_no_more_however_many_jobs_are_over(view: FarmView, engine: Engine) -> None:
    # given thousands of jobs that are over
    with view.farm() as farm:
        live = farm.job([LayerSpec(frames=1)])
    copy_as_finished(view, live, FINISHED_JOBS)

    # when three portions of them move
    answers = iter((False, False, False, True))
    with rows_read(engine) as read:
        moved = move_finished_jobs(engine, AFTER, stopping=lambda: next(answers), pause=lambda _seconds: None)

    # then none of the portions has read them all
    assert (moved.portions, len(read)) == (3, 3)
    assert moved.jobs > 100
    assert max(read) < FINISHED_JOBS


def copy_as_finished(view: FarmView, job: JobIds, jobs: int) -> None:
    """So many bare jobs like this one, without layers, that finished long ago."""
    columns = [
        row.attname
        for row in view.rows(
            "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass('job') AND attnum > 0 AND NOT attisdropped"
        )
    ]
    values = {
        "pk_job": "'copy' || n",
        "str_visible_name": "NULL",
        "str_state": "'FINISHED'",
        "ts_stopped": "now() - interval '100 days'",
    }
    selected = ", ".join(values.get(column, column) for column in columns)
    with view.engine.begin() as connection:
        for sql in (
            "SET LOCAL session_replication_role = replica",
            f"INSERT INTO job ({', '.join(columns)}) SELECT {selected} FROM job, generate_series(1, :jobs) n"  # noqa: S608
            " WHERE pk_job = :job",
            "INSERT INTO job_stat (pk_job_stat, pk_job)"
            " SELECT 'copy' || n, 'copy' || n FROM generate_series(1, :jobs) n",
            "ANALYZE job, job_stat",
        ):
            connection.execute(text(sql), {"job": job.id, "jobs": jobs})


def test_the_first_portion_is_a_day_after_the_upgrade_or_later(view: FarmView, engine: Engine) -> None:
    with view.farm() as farm:
        job = finished_job(farm, 1)
    age(view, job, hours_ago=1000)
    for hours, moves in ((0, False), (23.5, False), (24.5, True)):
        upgraded(view, hours_ago=hours)
        assert move_finished_jobs(engine, AFTER).jobs == moves


def test_trouble_of_the_database_ends_a_run(view: FarmView, engine: Engine) -> None:
    with view.farm() as farm:
        job = finished_job(farm, 1)
    age(view, job, hours_ago=100)

    def broken(connection: Connection) -> None:
        connection.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    with before_each_commit(engine, partial(broken)), pytest.raises(OperationalError):
        move_finished_jobs(engine, AFTER)
    assert move_finished_jobs(engine, AFTER).jobs == 1
