"""Hosts that break frames: which failures count, and which hosts are named for them."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine

from opencue_sched.embedded.farms.farm_specs import HostIds, JobIds, LayerSpec
from opencue_sched.store.failed_runs import breaking_hosts
from tests.kit.gathering import waiting_jobs
from tests.kit.limits import has_types
from tests.kit.runs import FarmView, Running, complete_frame


@pytest.fixture
def view(engine: Engine) -> FarmView:
    return FarmView(engine)


def jobs_and_hosts(view: FarmView, jobs: int = 3, frames: int = 2, **layer: Any) -> tuple[list[JobIds], list[HostIds]]:
    with view.farm() as farm:
        made = [farm.job([LayerSpec(frames=frames, **layer)]) for _ in range(jobs)]
        return made, [farm.host(name=name) for name in ("broken", "sound")]


def end(view: FarmView, job: JobIds, place: int, host: HostIds, **report: Any) -> None:
    """The frame runs on the host, and ends as the report says; with exit status 1 unless that says something else."""
    frame = job.frames[place]
    view.run_sql("UPDATE frame SET str_state = 'WAITING' WHERE pk_frame = :f AND str_state = 'DEAD'", f=frame)
    with view.farm() as farm:
        procs = farm.run([frame], host)
    view.run_sql("UPDATE frame SET ts_started = now() - interval '20 minutes' WHERE pk_frame = :f", f=frame)
    complete_frame(view.engine, Running(job, host, (frame,), tuple(procs)).report(**{"exit_status": 1, **report}))


def named(view: FarmView, *uncounted: int) -> dict[str, tuple[int, int]]:
    """The hosts that are named, with how many jobs and frames failed there."""
    with view.engine.connect() as connection:
        return {row.host: (row.jobs, row.frames) for row in breaking_hosts(connection, uncounted)}


def avoided(view: FarmView) -> dict[str, tuple[str, ...]]:
    """By the id of a waiting frame the hosts that it is kept from."""
    with view.engine.connect() as connection:
        layers = [layer for job in waiting_jobs(connection) for layer in job.layers]
    return {frame.id: frame.failed_on for layer in layers for frame in layer.frames if frame.failed_on}


def test_a_host_on_which_frames_of_three_jobs_failed_is_named(view: FarmView) -> None:
    # given frames of two jobs that failed there, one of them twice
    jobs, (broken, sound) = jobs_and_hosts(view)
    for job, place in ((jobs[0], 0), (jobs[0], 0), (jobs[0], 1), (jobs[1], 0)):
        end(view, job, place, broken)
    assert named(view) == {}

    # when one of a third does
    end(view, jobs[2], 0, broken)

    # then it is named, also while one of them runs through elsewhere
    assert named(view) == {"broken": (3, 4)}
    end(view, jobs[0], 0, sound, exit_status=0)
    assert named(view) == {"broken": (3, 4)}
    assert avoided(view) == dict.fromkeys((jobs[0].frames[1], jobs[1].frames[0], jobs[2].frames[0]), ("broken",))

    # until an hour is over, after which frames are kept from it for the rest of a day
    view.run_sql("UPDATE opencue_sched_failed_run SET ts = ts - interval '61 minutes'")
    assert named(view) == {}
    assert len(avoided(view)) == 3
    view.run_sql("UPDATE opencue_sched_failed_run SET ts = ts - interval '1 day'")
    end(view, jobs[1], 1, broken)
    assert avoided(view) == {jobs[1].frames[1]: ("broken",)}


def test_what_fails_elsewhere_too_speaks_of_the_job(view: FarmView) -> None:
    # given three jobs whose frames fail on each host that they are tried on
    jobs, (broken, sound) = jobs_and_hosts(view)
    for job in jobs:
        end(view, job, 0, broken)
        end(view, job, 1, sound)
    assert named(view) == {}

    # when a frame of each runs through elsewhere, then that one speaks of the host
    for job in jobs:
        end(view, job, 0, sound, exit_status=0)
    assert named(view) == {"broken": (3, 3)}


def test_what_runs_through_where_it_failed_does_not_speak_of_the_host(view: FarmView) -> None:
    jobs, (_, sound) = jobs_and_hosts(view)
    for job in jobs:
        end(view, job, 0, sound)
    assert set(named(view)) == {"sound"}
    for job in jobs:
        end(view, job, 0, sound, exit_status=0)
    assert named(view) == {}


@pytest.mark.parametrize(
    ("counts", "report"),
    [
        (True, {"exit_status": 1}),
        (True, {"exit_status": 127}),
        (True, {"exit_status": -1073741515}),
        (True, {"exit_status": 256}),
        (True, {"exit_status": 139}),
        (True, {"exit_status": 1, "exit_signal": 11}),
        (False, {"exit_status": 0}),
        (False, {"exit_status": 1, "exit_signal": 9}),
        (False, {"exit_status": 1, "exit_signal": 15}),
        (False, {"exit_status": 143}),
        (False, {"exit_status": 33}),
        (False, {"exit_status": 1, "exit_signal": 33}),
        (False, {"exit_status": 137}),
        (False, {"exit_status": 286}),
        (False, {"exit_status": 1, "exit_signal": 119}),
        (False, {"exit_status": 299}),
        (False, {"exit_status": 1, "silent_seconds": 600.0}),
    ],
    ids=str,
)
def test_kills_want_of_memory_and_time_outs_are_no_such_failures(
    view: FarmView, counts: bool, report: dict[str, Any]
) -> None:
    jobs, (broken, _) = jobs_and_hosts(view, frames=1)
    view.run_sql("UPDATE layer SET int_timeout_llu = 5")
    for job in jobs:
        end(view, job, 0, broken, **report)
    assert set(named(view)) == ({"broken"} if counts else set())


def test_shortages_of_licences_are_no_such_failures(view: FarmView) -> None:
    # given a limit with an exit status that says that it is short, and statuses that the settings name
    with view.farm() as farm:
        if not has_types(farm.connection):
            pytest.skip("limits have no exit status before V49")
        limit = farm.limit("houdini", 10)
    jobs, (broken, _) = jobs_and_hosts(view, frames=1)
    view.run_sql("UPDATE limit_record SET int_exit_status = 77 WHERE pk_limit_record = :limit", limit=limit)
    for job in jobs:
        end(view, job, 0, broken, exit_status=77)
    assert named(view) == {}
    for job in jobs:
        end(view, job, 0, broken, exit_status=78)
    assert named(view, 78) == {}
    assert set(named(view)) == {"broken"}
