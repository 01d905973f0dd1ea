"""What host reports say of many running frames: how much PostgreSQL reads for that, whenever it planned it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Connection, Engine, text

from opencue_sched.clients.postgres import make_engine
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, JobSpec, LayerSpec
from opencue_sched.settings import Settings
from opencue_sched.store.reported_runs import Usage, read_reported, update_runs
from opencue_sched.store.reports import find_hosts, update_statuses
from tests.kit.statements import assert_reads_grow_with_what_is_named

ENOUGH_KB = 1 << 30


STATUS = dict.fromkeys(
    ("total_mem", "free_mem", "total_swap", "free_swap", "total_mcp", "free_mcp", "total_gpu_mem", "free_gpu_mem"), 1
) | {"load": 1, "boot_time": 1, "os": "linux"}


class Run(NamedTuple):
    """A run and its host, by their ids, and the name of the host."""

    proc: str
    frame: str
    layer: str
    job: str
    host: str
    host_name: str


def report(connection: Connection, runs: Sequence[Run]) -> None:
    """All that reports of hosts send whose runs have more memory than before."""
    hosts = {run.host: run.host_name for run in runs}
    find_hosts(connection, [(f"{name}.example.com", name) for name in hosts.values()])
    update_statuses(connection, dict.fromkeys(hosts, STATUS))
    read_reported(connection, [(run.proc, run.frame, run.host) for run in runs])
    usage = [Usage(*run[:4], ENOUGH_KB, *[100_000] * 10) for run in runs]
    update_runs(connection, usage, frames_to_raise=3)


def test_plans_made_on_an_empty_farm_read_no_more_of_a_full_one(engine: Engine, settings: Settings) -> None:
    # Given a connection that has planned what a report sends where there was nothing, as PostgreSQL knew
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE"))
    with engine.connect() as early, make_engine(settings).connect() as late:
        report(early, [Run(*["gone"] * 6)])
        early.rollback()
        # When much runs all at once: a hundred jobs, each on a host of its own
        with engine.begin() as connection:
            farm = Farm(connection)
            hosts = farm.hosts([HostSpec()] * 100)
            jobs = farm.jobs([JobSpec([LayerSpec(frames=4)] * 2)] * 100)
            runs = [
                Run(proc, frame, layer.id, job.id, host.id, host.name)
                for job, host in zip(jobs, hosts, strict=True)
                for layer in job.layers
                for proc, frame in zip(farm.run(layer.frames, host), layer.frames, strict=True)
            ]
        # Then that connection reads no more than one that plans now, and no more than grows with how many there are
        assert_reads_grow_with_what_is_named(early, late, report, runs)
