"""Many runs that end at once: how much PostgreSQL reads for that, whenever it planned it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from sqlalchemy import Connection, Engine, text

from opencue_sched.clients.postgres import make_engine
from opencue_sched.domain.states import FrameState
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, JobSpec, LayerSpec
from opencue_sched.settings import Settings
from opencue_sched.store import release
from opencue_sched.store.frame_memory import ask_for_more
from opencue_sched.store.limit_bindings import LicenceShortage, follow_shortages
from opencue_sched.store.procs import Run, delete_procs, lock_and_read_runs
from tests.kit.statements import assert_reads_grow_with_what_is_named, rows_handled


def end(connection: Connection, named: Sequence[tuple[str, str]]) -> None:
    """What ends runs (proc id, frame id) that succeeded with less memory than they had, and writes what they used."""
    runs = lock_and_read_runs(connection, named)
    stops = [release.FrameStop(run.frame_id, run.version, FrameState.SUCCEEDED, 0, 100_000) for run in runs]
    shows, hosts = ({getattr(run, name) for run in runs} for name in ("proc_show_id", "host_id"))
    counters = release.counters_of(runs)
    stopped = release.lock_and_stop_frames(connection, stops, shows=shows, hosts=hosts, counters=counters)
    deleted = delete_procs(connection, [run.proc_id for run in runs])
    show_of = {run.frame_id: run.show_id for run in runs}
    peaks_kb = {run.layer_id: 100_000 for run in runs}
    release.record_runs(connection, deleted, [(frame, show_of[frame.id]) for frame in stopped], peaks_kb)


def fail(connection: Connection, runs: Sequence[Run]) -> None:
    """What is written of runs that got no licence, or not enough memory: here all of both."""
    short = LicenceShortage("a limit", exit_status=100, delay_minutes=5, auto_tag=False)
    follow_shortages(connection, [(run.layer_id, short) for run in runs])
    ask_for_more(connection, runs, frames_to_raise=2)


def a_hundred_jobs(engine: Engine) -> list[tuple[str, str]]:
    """Runs (proc id, frame id) of a hundred jobs, two in each of two layers, each job in a show and on a host of its
    own."""
    with engine.begin() as connection:
        farm = Farm(connection)
        hosts = farm.hosts([HostSpec()] * 100)
        jobs = farm.jobs([JobSpec([LayerSpec(frames=2)] * 2, show=farm.show()) for _ in hosts])
        return [
            run
            for job, host in zip(jobs, hosts, strict=True)
            for run in zip(farm.run(job.frames, host), job.frames, strict=True)
        ]


@pytest.mark.parametrize("one_in", [pytest.param(1, id="all"), pytest.param(10, id="one in ten")])
def test_plans_made_on_an_empty_farm_read_no_more_of_a_full_one(
    engine: Engine, settings: Settings, one_in: int
) -> None:
    # Given a connection that has planned how runs end where there was nothing, as PostgreSQL knew
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE"))
    with engine.connect() as early, make_engine(settings).connect() as late:
        end(early, [("gone", "gone")])
        early.rollback()
        # When much runs all at once, and all of it ends, or one run in ten
        runs = a_hundred_jobs(engine)[::one_in]
        # Then that connection reads no more than one that plans now, and no more than grows with how many there are
        assert_reads_grow_with_what_is_named(early, late, end, runs)


def test_what_failures_ask_for_grows_with_how_many_fail(engine: Engine) -> None:
    # Given much that runs, of which PostgreSQL has no statistics, not even how many layers there are
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE"))
    runs = a_hundred_jobs(engine)
    rows = []
    with engine.connect() as connection:
        for named in (runs[:200], runs):
            # When half of it, then all fails for want of a licence, and of memory
            failed = lock_and_read_runs(connection, named)
            with rows_handled(connection, of="") as handled:
                fail(connection, failed)
            rows.append(handled)
            connection.rollback()
    # Then no statement handles four times as many rows for twice as many runs
    assert [(half, whole) for half, whole in zip(*rows, strict=True) if whole > 100 + 3 * half] == []
