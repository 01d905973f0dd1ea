"""Undoing committed bookings whose frames do not run."""

from __future__ import annotations

import threading
from dataclasses import replace

from sqlalchemy import Engine, text

from opencue_sched.domain.plans import PlannedProc
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobSpec, LayerSpec
from opencue_sched.settings import Settings
from opencue_sched.store.release import undo_bookings
from tests.kit.gathering import counted_statements
from tests.kit.plans import assert_consistent, commit, plan


def booked(engine: Engine, settings: Settings, *, jobs: int = 1, frames: int = 3) -> list[PlannedProc]:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=64, memory_gb=64)
        farm.host(cores=64, memory_gb=64)
        farm.jobs([JobSpec([LayerSpec(frames=frames)]) for _ in range(jobs)])
        procs = plan(farm, settings, cores=2)
    return commit(engine, procs, settings).committed


def test_the_proc_goes_the_host_gets_its_share_back_and_the_frame_waits_again(
    engine: Engine, settings: Settings
) -> None:
    committed = booked(engine, settings)

    with engine.begin() as connection:
        removed = undo_bookings(connection, committed[:2])

    assert removed == {c.proc_id for c in committed[:2]}
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT * FROM frame ORDER BY int_number")).all()
        assert connection.execute(text("SELECT pk_proc FROM proc")).scalars().all() == [committed[2].proc_id]
    assert [row.str_state for row in rows] == ["WAITING", "WAITING", "RUNNING"]
    assert [row.int_exit_status for row in rows[:2]] == [299, 299]
    assert [row.int_version for row in rows[:2]] == [
        c.frame.version + 1 for c in committed[:2] if c.frame.version is not None
    ]
    assert all(row.ts_stopped is not None for row in rows[:2])
    assert_consistent(engine)


def test_a_frame_that_may_make_checkpoints_waits_again_too(engine: Engine, settings: Settings) -> None:
    """It has not run, so there is none to be copied: in CHECKPOINT it would wait five minutes for nothing."""
    committed = booked(engine, settings, frames=2)
    with engine.begin() as connection:
        connection.execute(text("UPDATE frame SET str_checkpoint_state = 'ENABLED' WHERE int_number = 1"))

        undo_bookings(connection, committed)

        rows = connection.execute(text("SELECT str_state, str_checkpoint_state FROM frame ORDER BY int_number")).all()
    assert [tuple(row) for row in rows] == [("WAITING", "DISABLED")] * 2
    assert_consistent(engine)


def test_undoing_twice_changes_nothing_more(engine: Engine, settings: Settings) -> None:
    committed = booked(engine, settings)
    with engine.begin() as connection:
        undo_bookings(connection, committed)
        before = connection.execute(text("SELECT int_version FROM frame ORDER BY pk_frame")).scalars().all()

        again = undo_bookings(connection, committed)

        after = connection.execute(text("SELECT int_version FROM frame ORDER BY pk_frame")).scalars().all()
    assert again == frozenset()
    assert before == after
    assert_consistent(engine)


def test_the_frame_can_be_booked_again_at_once(engine: Engine, settings: Settings) -> None:
    committed = booked(engine, settings)
    with engine.begin() as connection:
        undo_bookings(connection, committed)
        frames = connection.execute(text("SELECT pk_frame, int_version FROM frame")).all()
    versions = {row.pk_frame: row.int_version for row in frames}
    again = [
        replace(c, proc_id=f"again-{n}", frame=replace(c.frame, version=versions[c.frame.id]))
        for n, c in enumerate(committed)
    ]

    result = commit(engine, again, settings)

    assert len(result.committed) == 3
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT max(int_retries) FROM frame")) == 0
    assert_consistent(engine)


def test_upstream_bug_the_version_before_the_start_left_frames_running_for_ever(
    engine: Engine, settings: Settings
) -> None:
    """The guard compares the version after the start: with the one before it, nothing would be cleared."""
    stale, right = booked(engine, settings, frames=2)
    assert stale.frame.version is not None
    stale = replace(stale, frame=replace(stale.frame, version=stale.frame.version - 1))
    with engine.begin() as connection:
        undo_bookings(connection, [stale, right])
        states = {row.pk_frame: row.str_state for row in connection.execute(text("SELECT * FROM frame"))}

    assert (states[stale.frame.id], states[right.frame.id]) == ("RUNNING", "WAITING")


def test_a_frame_that_somebody_else_runs_by_now_is_left_alone(engine: Engine, settings: Settings) -> None:
    committed = booked(engine, settings, frames=1)
    frame = committed[0].frame.id
    with engine.begin() as connection:
        connection.execute(text("UPDATE proc SET pk_proc = 'somebody-else'"))

        removed = undo_bookings(connection, committed)

        state = connection.scalar(text("SELECT str_state FROM frame WHERE pk_frame = :f"), {"f": frame})
        assert connection.scalar(text("SELECT count(*) FROM proc")) == 1
    assert removed == frozenset()
    assert state == "RUNNING"
    assert_consistent(engine)


def test_a_host_never_has_more_idle_than_it_has(engine: Engine, settings: Settings) -> None:
    committed = booked(engine, settings)
    with engine.begin() as connection:
        connection.execute(text("UPDATE host SET int_cores_idle = int_cores - 100, int_mem_idle = int_mem"))

        undo_bookings(connection, committed)

        over = "SELECT count(*) FROM host WHERE int_cores_idle <> int_cores OR int_mem_idle <> int_mem"
        assert connection.scalar(text(over)) == 0


def test_what_the_proc_holds_now_is_given_back(engine: Engine, settings: Settings) -> None:
    """Memory may have been raised since the booking, by a host report."""
    committed = booked(engine, settings, frames=1)
    with engine.begin() as connection:
        connection.execute(text("UPDATE proc SET int_mem_reserved = int_mem_reserved * 2"))

        undo_bookings(connection, committed)
    assert_consistent(engine)


def test_statements_do_not_grow_with_the_bookings(engine: Engine, settings: Settings) -> None:
    committed = booked(engine, settings, jobs=3, frames=10)
    counts = []
    with engine.begin() as connection:
        for part in (committed[:1], committed[1:]):
            with counted_statements(engine) as statements:
                undo_bookings(connection, part)
            counts.append(len(statements))

    assert counts[0] == counts[1]
    assert_consistent(engine)


def test_two_callers_undo_each_booking_once(engine: Engine, settings: Settings) -> None:
    committed = booked(engine, settings, jobs=4, frames=10)
    removed: list[frozenset[str]] = []

    def work(part: list[PlannedProc]) -> None:
        with engine.begin() as connection:
            removed.append(undo_bookings(connection, part))

    threads = [threading.Thread(target=work, args=(part,)) for part in (committed, committed[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sum(map(len, removed)) == 40
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM proc")) == 0
    assert_consistent(engine)
