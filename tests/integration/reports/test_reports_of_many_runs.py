"""What host reports say of many running frames: how much PostgreSQL reads for that, whenever it planned it."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, Engine, text

from opencue_sched.clients.postgres import make_engine
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobSpec, LayerSpec
from opencue_sched.settings import Settings
from opencue_sched.store.reported_runs import Usage, read_reported, update_runs
from tests.kit.statements import assert_reads_grow_with_what_is_named

ENOUGH_KB = 1 << 30


def report(connection: Connection, runs: Sequence[tuple[str, str, str, str, str]]) -> None:
    """All that a report of runs sends whose memory has grown: of each its proc, frame, layer, job and host."""
    read_reported(connection, [(proc, frame, host) for proc, frame, _, _, host in runs])
    usage = [Usage(*run[:4], ENOUGH_KB, *[100_000] * 10) for run in runs]
    update_runs(connection, usage, frames_to_raise=3)


def test_plans_made_on_an_empty_farm_read_no_more_of_a_full_one(engine: Engine, settings: Settings) -> None:
    # Given a connection that has planned what a report sends where there was nothing, as PostgreSQL knew
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE"))
    with engine.connect() as early, make_engine(settings).connect() as late:
        report(early, [("gone", "gone", "gone", "gone", "gone")])
        early.rollback()
        # When much runs all at once
        with engine.begin() as connection:
            farm = Farm(connection)
            host = farm.host(cores=512, memory_gb=1024)
            jobs = farm.jobs([JobSpec([LayerSpec(frames=4)] * 5) for _ in range(20)])
            running = [(frame, layer.id, job.id) for job in jobs for layer in job.layers for frame in layer.frames]
            procs = farm.run([frame for frame, _, _ in running], host)
        runs = [(proc, *of, host.id) for proc, of in zip(procs, running, strict=True)]
        # Then that connection reads no more than one that plans now, and no more than grows with how many there are
        assert_reads_grow_with_what_is_named(early, late, report, runs)
