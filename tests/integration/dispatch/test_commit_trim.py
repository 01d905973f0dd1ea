"""What the committer trims because hosts or caps are not what they were."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError

from opencue_sched.accounting import keys
from opencue_sched.accounting.keys import VertexCaps, VertexKind
from opencue_sched.dispatch.commit import by_vertex
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobSpec, LayerSpec
from opencue_sched.errors import AllocationOverBurst, CapChanging, CapExceeded, HostExhausted, HostLocked
from opencue_sched.settings import Settings
from opencue_sched.store.booking import read_caps
from tests.kit.plans import KB_PER_GB, assert_consistent, commit, plan, reasons
from tests.kit.runs import FarmView


@pytest.mark.parametrize(
    ("column", "left", "fits"),
    [
        ("int_cores_idle", 500, 2),
        ("int_mem_idle", 5 * KB_PER_GB, 2),
        ("int_gpus_idle", 1, 1),
        ("int_gpu_mem_idle", 3 * KB_PER_GB, 3),
        ("int_cores_idle", 199, 0),
    ],
)
def test_the_first_procs_of_the_plan_get_what_a_host_has_left(
    engine: Engine, settings: Settings, column: str, left: int, fits: int
) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=16, memory_gb=32, gpus=4, gpu_memory_gb=8)
        farm.job([LayerSpec(frames=4)])
        procs = plan(farm, settings, cores=2, memory_kb=2 * KB_PER_GB, gpus=1, gpu_memory_kb=KB_PER_GB)
        connection.execute(text(f"UPDATE host SET {column} = :left"), {"left": left})  # noqa: S608

    result = commit(engine, procs, settings)

    assert [c.proc_id for c in result.committed] == [p.proc_id for p in procs[:fits]]
    assert [type(error) for _, error in result.lost] == [HostExhausted] * (4 - fits)
    assert all(error.retriable and proc.host.name in str(error) for proc, error in result.lost)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM proc")) == fits
        assert connection.scalar(text("SELECT count(*) FROM frame WHERE str_state = 'RUNNING'")) == fits


def test_cores_that_were_locked_on_the_rqd_since_the_plan_get_no_frames(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        host = farm.host(cores=8)
        farm.job([LayerSpec(frames=4)])
        procs = plan(farm, settings, cores=2)
        # when 3 of the 8 cores are locked
        row = {"host": host.id}
        connection.execute(text("INSERT INTO opencue_sched_locked_cores VALUES (:host, 300)"), row)

    result = commit(engine, procs, settings)

    assert [proc.proc_id for proc in result.committed] == [proc.proc_id for proc in procs[:2]]
    assert {type(error) for _, error in result.lost} == {HostExhausted}
    # then the host's idle cores are its total less its procs all the same
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT int_cores_idle FROM host")) == 400
    assert_consistent(engine)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE host SET str_lock_state = 'LOCKED' WHERE str_name = 'b'",
        "UPDATE host SET str_lock_state = 'NIMBY_LOCKED' WHERE str_name = 'b'",
        "UPDATE host_stat SET str_state = 'DOWN' FROM host WHERE host.pk_host = host_stat.pk_host AND str_name = 'b'",
        "UPDATE host SET pk_alloc = (SELECT pk_alloc FROM alloc WHERE str_tag = 'desktop') WHERE str_name = 'b'",
    ],
)
def test_a_host_that_changed_takes_nothing(engine: Engine, settings: Settings, statement: str) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.alloc("desktop")
        for name in "ab":
            farm.host(name=name)
        farm.job([LayerSpec(frames=4)])
        procs = plan(farm, settings)
        connection.execute(text(statement))

    result = commit(engine, procs, settings)

    assert {c.host.name for c in result.committed} == {"a"}
    assert reasons(result) == ["host_exhausted"] * 2
    assert_consistent(engine)


def test_a_host_that_stays_locked_is_not_waited_for_long(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        for name in "ab":
            farm.host(name=name)
        farm.job([LayerSpec(frames=4)])
        procs = plan(farm, settings)

    with engine.begin() as other:
        other.execute(text("SELECT 1 FROM host WHERE str_name = 'a' FOR NO KEY UPDATE"))
        result = commit(engine, procs, settings)

    assert {c.host.name for c in result.committed} == {"b"}
    assert [type(error) for _, error in result.lost] == [HostLocked] * 2
    assert all(error.retriable for _, error in result.lost)
    assert_consistent(engine)


def test_a_host_whose_lock_is_gone_a_moment_later_is_booked_as_it_is_then(engine: Engine, settings: Settings) -> None:
    # given a plan for two hosts, on one of which another transaction takes all but one core
    with engine.begin() as connection:
        farm = Farm(connection)
        for name in "ab":
            farm.host(name=name, cores=2)
        farm.job([LayerSpec(frames=4)])
        procs = plan(farm, settings)
    patient = settings.accounting.model_copy(update={"commit_deadline": 1000.0})
    settings = settings.model_copy(update={"accounting": patient})
    with engine.connect() as other, ThreadPoolExecutor(1) as threads:
        other.execute(text("UPDATE host SET int_cores_idle = 100 WHERE str_name = 'a'"))

        # when that one is committed while our commit waits for the host
        committing = threads.submit(commit, engine, procs, settings)
        FarmView(engine).wait_for_waiters(1)
        other.commit()
        result = committing.result()

    # then what still fits is booked, and only the rest is lost
    assert sorted(proc.host.name for proc in result.committed) == ["a", "b", "b"]
    assert reasons(result) == ["host_exhausted"]


def test_a_locked_frame_is_not_waited_for(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        farm.job([LayerSpec(frames=3)])
        procs = plan(farm, settings)

    with engine.begin() as other:
        other.execute(text("SELECT 1 FROM frame WHERE int_number = 2 FOR NO KEY UPDATE"))
        result = commit(engine, procs, settings)

    assert [c.frame.number for c in result.committed] == [1, 3]
    assert reasons(result) == ["frame_lost"]
    assert_consistent(engine)


class CapFarm:
    """Four frames of one job in a folder, under a limit; each takes 2 cores and 1 GPU."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        with engine.begin() as connection:
            farm = Farm(connection)
            self.alloc = farm.default_alloc().id
            self.show = farm.default_show().id
            self.folder = farm.folder(farm.default_show(), "shots", max_cores=100, max_gpus=50)
            self.limit = farm.limit("nuke", 100)
            farm.host(cores=32, gpus=8)
            spec = JobSpec([LayerSpec(frames=4, limits=[self.limit])], folder_id=self.folder)
            self.job = farm.jobs([JobSpec(spec.layers, folder_id=self.folder, max_cores=100, max_gpus=50)])[0].id
            self.procs = plan(farm, settings, cores=2, gpus=1)

    def caps(self, **booked: int) -> dict[str, VertexCaps]:
        """What the ledger would have said: caps of 100 cores, 50 GPUs, 100 frames, with this much booked in all."""
        cores, gpus, frames = booked.get("cores", 8), booked.get("gpus", 4), booked.get("frames", 4)
        foreign = booked.get("foreign", 0)
        return {
            key: VertexCaps(kind, cores, gpus, **most)
            for key, kind, most in (
                (keys.subscription(self.show, self.alloc), VertexKind.SUBSCRIPTION, {"max_cores": 100_000.0}),
                (keys.folder(self.folder), VertexKind.FOLDER, {"max_cores": 100.0, "max_gpus": 50.0}),
                (keys.job(self.job), VertexKind.JOB, {"max_cores": 100.0, "max_gpus": 50.0}),
            )
        } | {
            keys.limit(self.limit): VertexCaps(
                VertexKind.LIMIT, 0, 0, frames=frames, max_frames=100.0 - foreign, foreign_frames=foreign
            )
        }


@pytest.mark.parametrize(
    ("statement", "fits", "table"),
    [
        ("UPDATE subscription SET int_burst = 500", 2, ""),
        ("UPDATE subscription SET int_burst = 0", 0, ""),
        ("DELETE FROM subscription", 0, ""),
        ("UPDATE folder_resource SET int_max_cores = 400", 2, "folder"),
        ("UPDATE folder_resource SET int_max_gpus = 3", 3, "folder"),
        ("UPDATE job_resource SET int_max_cores = 50", 0, "job"),
        ("UPDATE job_resource SET int_max_gpus = 1", 1, "job"),
        ("UPDATE limit_record SET int_max_value = 3", 3, "limit"),
        ("UPDATE limit_record SET int_max_value = NULL", 0, "limit"),
    ],
)
def test_a_cap_lowered_since_the_booking_keeps_what_fits_below_it(
    engine: Engine, settings: Settings, statement: str, fits: int, table: str
) -> None:
    farm = CapFarm(engine, settings)
    with engine.begin() as connection:
        connection.execute(text(statement))

    result = commit(engine, farm.procs, settings, farm.caps())

    assert [c.proc_id for c in result.committed] == [p.proc_id for p in farm.procs[:fits]]
    errors = [error for _, error in result.lost]
    assert len(errors) == 4 - fits
    assert not any(error.retriable for error in errors)
    if table:
        assert all(isinstance(error, CapExceeded) and table in str(error) for error in errors)
    else:
        assert all(isinstance(error, AllocationOverBurst) for error in errors)
    assert_consistent(engine)


def test_a_lowered_cap_counts_what_others_have_booked_too(engine: Engine, settings: Settings) -> None:
    farm = CapFarm(engine, settings)
    with engine.begin() as connection:
        connection.execute(text("UPDATE job_resource SET int_max_cores = 2000"))

    result = commit(engine, farm.procs, settings, farm.caps(cores=23))

    assert len(result.committed) == 2
    assert reasons(result) == ["cap_exceeded"] * 2


def test_a_cap_that_redis_heard_of_right_after_the_booking_binds_too(engine: Engine, settings: Settings) -> None:
    """The caps come in the round trip of the bookings, but after them: somebody else may have loaded them between."""
    farm = CapFarm(engine, settings)
    with engine.begin() as connection:
        connection.execute(text("UPDATE job_resource SET int_max_cores = 2000"))
    booked_under = farm.caps(cores=23)
    key = keys.job(farm.job)

    result = commit(engine, farm.procs, settings, booked_under | {key: replace(booked_under[key], max_cores=20.0)})

    assert len(result.committed) == 2
    assert reasons(result) == ["cap_exceeded"] * 2


def test_a_lowered_limit_counts_the_frames_of_unmanaged_shows(engine: Engine, settings: Settings) -> None:
    farm = CapFarm(engine, settings)
    with engine.begin() as connection:
        connection.execute(text("UPDATE limit_record SET int_max_value = 12"))

    result = commit(engine, farm.procs, settings, farm.caps(frames=4, foreign=10))

    assert len(result.committed) == 2


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT 1",
        "UPDATE job_resource SET int_max_cores = -1, int_max_gpus = 0",
        "UPDATE folder_resource SET int_max_cores = 0",
        "UPDATE subscription SET int_burst = int_burst * 2",
        "UPDATE limit_record SET int_max_value = 1000",
        "DELETE FROM limit_record",
    ],
)
def test_a_cap_that_was_kept_or_raised_stops_nothing(engine: Engine, settings: Settings, statement: str) -> None:
    farm = CapFarm(engine, settings)
    with engine.begin() as connection:
        connection.execute(text(statement))

    result = commit(engine, farm.procs, settings, farm.caps(cores=100, gpus=50, frames=100))

    assert len(result.committed) == 4


def test_a_lowered_cap_of_one_job_leaves_the_others(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=32)
        jobs = farm.jobs([JobSpec([LayerSpec(frames=2)]) for _ in range(2)])
        procs = plan(farm, settings, cores=2)
        connection.execute(text("UPDATE job_resource SET int_max_cores = 300 WHERE pk_job = :j"), {"j": jobs[0].id})
    key = keys.job(jobs[0].id)
    caps = {key: VertexCaps(VertexKind.JOB, 4, 0, max_cores=10_000)}

    result = commit(engine, procs, settings, caps)

    assert sorted(c.job.id for c in result.committed) == sorted([jobs[0].id, jobs[1].id, jobs[1].id])


CAP_CHANGES = [
    "UPDATE subscription SET int_burst = 500",
    "DELETE FROM subscription",
    "UPDATE folder_resource SET int_max_cores = 400",
    "UPDATE folder_resource SET int_max_gpus = 3",
    "UPDATE job_resource SET int_max_cores = 50",
    "UPDATE job_resource SET int_max_gpus = 1",
    "UPDATE limit_record SET int_max_value = 3",
]


@pytest.mark.parametrize("statement", CAP_CHANGES)
def test_while_somebody_changes_a_cap_nothing_is_booked_under_it(
    engine: Engine, settings: Settings, statement: str
) -> None:
    """Nor is it waited for: the transaction may be a person's."""
    farm = CapFarm(engine, settings)
    with engine.begin() as other:
        other.execute(text(statement))
        result = commit(engine, farm.procs, settings, farm.caps())
        other.rollback()
    assert [type(error) for _, error in result.lost] == [CapChanging] * 4
    assert_consistent(engine)
    assert len(commit(engine, farm.procs, settings, farm.caps()).committed) == 4


def test_a_change_of_one_jobs_cap_leaves_the_others(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection, seed=1)  # of 1,024 locks the jobs have different ones
        farm.host(cores=32)
        jobs = farm.jobs([JobSpec([LayerSpec(frames=2)]) for _ in range(2)])
        procs = plan(farm, settings, cores=2)
    with engine.begin() as other:
        other.execute(text("UPDATE job_resource SET int_max_cores = 300 WHERE pk_job = :j"), {"j": jobs[0].id})
        result = commit(engine, procs, settings)
    assert reasons(result) == ["cap_changing"] * 2
    assert {c.job.id for c in result.committed} == {jobs[1].id}


@pytest.mark.parametrize("statement", CAP_CHANGES)
def test_a_cap_changes_only_when_the_commits_that_read_it_are_over(
    engine: Engine, settings: Settings, statement: str
) -> None:
    farm = CapFarm(engine, settings)
    with engine.begin() as booking:
        assert {row.steady for row in read_caps(booking, by_vertex(farm.procs)).values()} == {True}
        with pytest.raises(OperationalError, match="lock timeout"), engine.begin() as other:
            other.execute(text("SET LOCAL lock_timeout = '20ms'"))
            other.execute(text(statement))
    with engine.begin() as other:
        other.execute(text("SET LOCAL lock_timeout = '20ms'"))
        other.execute(text(statement))


def test_a_commit_that_dies_after_it_read_the_caps_lets_them_change(engine: Engine, settings: Settings) -> None:
    farm = CapFarm(engine, settings)
    booking = engine.connect()
    read_caps(booking, by_vertex(farm.procs))
    pid = booking.connection.dbapi_connection.info.backend_pid  # type: ignore[union-attr]
    with engine.begin() as other:
        assert other.scalar(text("SELECT pg_terminate_backend(:pid, 60000)"), {"pid": pid})
        other.execute(text("SET LOCAL lock_timeout = '20ms'"))
        other.execute(text("UPDATE subscription SET int_burst = 500"))
    booking.invalidate()
    booking.close()
    assert len(commit(engine, farm.procs, settings, farm.caps()).committed) == 2, "of 5 cores, by twos"


LOCKS = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()")


def test_the_caps_of_very_many_jobs_change_at_once(engine: Engine) -> None:
    """As when a folder's default is changed: two who do so wait for each other in no circle, and neither fills the
    server's table of locks."""
    with engine.begin() as connection:
        farm = Farm(connection)
        jobs = [job.id for job in farm.jobs([JobSpec([LayerSpec(frames=1)]) for _ in range(1200)])]

    def change(half: int) -> list[int]:
        locks = []
        for cap in (1000, 2000, 3000):
            with engine.begin() as connection:
                statement = "UPDATE job_resource SET int_max_cores = :cap WHERE pk_job = ANY(:jobs)"
                connection.execute(text(statement), {"cap": cap, "jobs": jobs[half::2]})
                locks.append(int(connection.scalar(LOCKS)))
        return locks

    with ThreadPoolExecutor(2) as threads:
        for locks in threads.map(change, range(2)):
            assert all(300 < count <= 1024 for count in locks)


def test_the_caps_of_a_job_that_is_being_launched_keep_nobody_waiting(engine: Engine) -> None:
    """A launch may take long, and a lock is shared by many jobs."""
    with engine.begin() as connection:
        Farm(connection).jobs([JobSpec([LayerSpec(frames=1)], activate=False)])
        connection.execute(text("UPDATE job_resource SET int_max_cores = 4200"))
        assert connection.scalar(LOCKS) == 0
        connection.execute(text("UPDATE job SET str_state = 'PENDING'"))
        connection.execute(text("UPDATE job_resource SET int_max_cores = 4300"))
        assert connection.scalar(LOCKS) == 1


def test_what_only_counts_beside_a_cap_waits_for_no_commit(engine: Engine, settings: Settings) -> None:
    """Cuebot's counters are in the same rows; and who lifts a cap puts it back in the same transaction."""
    farm = CapFarm(engine, settings)
    with engine.begin() as booking:
        read_caps(booking, by_vertex(farm.procs))
        with engine.begin() as other:
            other.execute(text("SET LOCAL lock_timeout = '20ms'"))
            for table in ("subscription", "folder_resource", "job_resource"):
                other.execute(text(f"UPDATE {table} SET int_cores = int_cores + 100"))  # noqa: S608
            other.execute(text("SET LOCAL opencue_sched.lifts_caps = 'on'"))
            other.execute(text("UPDATE subscription SET int_burst = 2147483647"))
            other.rollback()
        with engine.begin() as other:
            other.execute(text("UPDATE job_resource SET int_cores = int_cores + 100"))
            assert {row.steady for row in read_caps(booking, by_vertex(farm.procs)).values()} == {True}
