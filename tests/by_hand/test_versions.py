"""A fleet in the middle of an upgrade: processes of an older commit and of this checkout work on one farm.

Run by ``make test-versions``; the older commit is taken out of git.
"""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from opencue_sched.domain.shards import HOSTS_PER_SHARD
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.embedded.rqds.simulated_host import Behaviour
from opencue_sched.embedded.servers.fleet import Fleet
from opencue_sched.embedded.servers.processes import GuardedProcess, free_port
from tests.e2e.fleets import NONE_IS_LOST, fleet_on
from tests.kit.limits import set_type

ROOT = Path(__file__).resolve().parents[2]
OLDER = "8569fbfe"
CELERY = ("-m", "celery", "-A", "opencue_sched")
WORKER = (*CELERY, "worker", "--hostname", "older@localhost", "--without-mingle", "--without-gossip")
BEAT = (*CELERY, "beat", "--schedule", "beat-schedule")
REPORT_SERVICE = ("-c", "from opencue_sched.cli import main; main()", "report-service")
DISPATCHED = "scheduler_frames_dispatched_total{"
# So many hosts are divided between two workers. Each frame takes a host, and the caps let more frames run than one of
# the workers has hosts.
HOSTS, CORES = 2 * HOSTS_PER_SHARD, 2
FRAMES = 200
BURST, FOLDER_CAP, JOB_CAP, LICENCES, SEATS = 200, 180, 80, 15, 10
BOOKED_BY_EACH = 100
TAKING_A_WHILE = Behaviour(run_seconds=(1.0, 3.0))

# What each cap allows, and what procs hold of it: cores in centicores, and of a limit frames, or machines.
HELD_OF_CAPS = text(
    """
    WITH procs AS (
        SELECT p.*, j.pk_folder, h.pk_alloc FROM proc p JOIN job j USING (pk_job) JOIN host h USING (pk_host)
    ), held AS (
        SELECT 'subscription' AS cap, s.int_burst AS allowed, (
            SELECT sum(int_cores_reserved) FROM procs p WHERE p.pk_show = s.pk_show AND p.pk_alloc = s.pk_alloc) AS held
          FROM subscription s
        UNION ALL
        SELECT 'folder', f.int_max_cores, (SELECT sum(int_cores_reserved) FROM procs p WHERE p.pk_folder = f.pk_folder)
          FROM folder_resource f WHERE f.int_max_cores > 0
        UNION ALL
        SELECT 'job', r.int_max_cores, (SELECT sum(int_cores_reserved) FROM procs p WHERE p.pk_job = r.pk_job)
          FROM job_resource r WHERE r.int_max_cores > 0
        UNION ALL
        SELECT 'limit', l.int_max_value, (
            SELECT count(*) FROM procs p
             WHERE p.pk_layer IN (SELECT pk_layer FROM layer_limit ll WHERE ll.pk_limit_record = l.pk_limit_record))
          FROM limit_record l WHERE l.str_type = 'FRAME'
        UNION ALL
        SELECT 'seats', l.int_max_value, (
            SELECT count(DISTINCT pk_host) FROM procs p
             WHERE p.pk_layer IN (SELECT pk_layer FROM layer_limit ll WHERE ll.pk_limit_record = l.pk_limit_record))
          FROM limit_record l WHERE l.str_type = 'HOST'
    )
    SELECT cap, allowed, held FROM held WHERE held > 0
    """
)


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the older commit."""
    directory = tmp_path_factory.mktemp("older")
    archive = subprocess.run(["git", "archive", OLDER], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "--extract"], cwd=directory, input=archive.stdout, check=True)
    return directory


@pytest.mark.parametrize("beat_and_service", ["of this checkout", "of the older commit"])
def test_an_older_worker_and_a_new_one_book_on_one_farm(
    beat_and_service, older, settings, engine, redis_client, tmp_path
):
    # given a farm on which a worker of each version runs, and a beat and a report service of one of them
    with engine.begin() as connection:
        Farm(connection).default_show()
    ports = {"new": free_port(), "older": free_port()}
    options = {"hosts": HOSTS, "cores": CORES, "workers": 0, "behaviour": TAKING_A_WHILE, "environment": NONE_IS_LOST}
    with fleet_on(settings, engine, redis_client, tmp_path, **options) as farm:
        fleet = farm.fleet
        fleet.worker("new", OPENCUE_SCHED_QUEUE__METRICS_PORT=str(ports["new"]))
        metrics = {"OPENCUE_SCHED_QUEUE__METRICS_PORT": str(ports["older"]), "OPENCUE_SCHED_INSTANCE": "older"}
        start_older(fleet, older, "older", *WORKER, **metrics)
        if beat_and_service == "of the older commit":
            for name in ("beat", "report-service"):
                fleet.stop(name)
            start_older(fleet, older, "beat", *BEAT)
            start_older(fleet, older, "report-service", *REPORT_SERVICE)
        farm.wait_for("metrics of both workers", lambda: all(dispatched(port) is not None for port in ports.values()))

        # when work arrives of which the caps let only a part run at a time
        jobs = plant(engine)
        most: dict[str, tuple[int, int]] = {}

        def ended() -> bool:
            with engine.connect() as connection:
                for cap, allowed, held in connection.execute(HELD_OF_CAPS):
                    most[cap] = max(most.get(cap, (0, 0)), (int(held), int(allowed)))
            return all(farm.finished(job) for job in jobs)

        farm.wait_for("the end of all jobs", ended)

        # then both workers have booked, up to the cap of the licence and beyond none, and each frame ran once
        booked = {name: dispatched(port) for name, port in ports.items()}
        assert all(held <= allowed for held, allowed in most.values()), most
        assert most["limit"] == (LICENCES, LICENCES)
        assert most["seats"][0] > SEATS / 2
        assert min(count or 0 for count in booked.values()) >= BOOKED_BY_EACH, booked
        assert farm.scalar("SELECT count(*) FROM frame WHERE str_state = 'SUCCEEDED'") == FRAMES * len(jobs)
        assert len(farm.farm.runs()) == FRAMES * len(jobs)
        assert not farm.farm.violations()
        farm.assert_audit()


def plant(engine: Engine) -> list[str]:
    """Ids of four jobs, each held back by a cap of its own and all by those of their show. The last is under a limit of
    machines, of which each takes two of its frames: a worker that knows no such limit counts frames."""
    with engine.begin() as connection:
        farm = Farm(connection)
        show = farm.show("capped", folder_max_cores=FOLDER_CAP)
        farm.subscription(show, farm.default_alloc(), size=BURST)
        licence, seats = farm.limit("licence", LICENCES), farm.limit("seats", SEATS)
        set_type(connection, seats, "HOST")
        return [
            farm.job([LayerSpec(frames=FRAMES, cores=CORES)], show=show, os=None, max_cores=JOB_CAP).id,
            farm.job([LayerSpec(frames=FRAMES, cores=CORES)], show=show, os=None, max_cores=JOB_CAP).id,
            farm.job([LayerSpec(frames=FRAMES, cores=CORES, limits=[licence])], show=show, os=None).id,
            farm.job([LayerSpec(frames=FRAMES, cores=CORES / 2, limits=[seats])], show=show, os=None).id,
        ]


def start_older(fleet: Fleet, older: Path, name: str, *words: str, **environment: str) -> None:
    """Start a process of the older commit. It belongs to the fleet and stops with it."""
    process = GuardedProcess(
        [sys.executable, *words],
        log=fleet.log(f"{name}-of-{OLDER}"),
        cwd=older,
        env={**fleet.environment, "PYTHONPATH": str(older), **environment},
    )
    fleet.processes[name] = process.start()


def dispatched(port: int) -> float | None:
    """Frames that a worker has booked and launched, by its metrics; None while it has none."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return None
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(DISPATCHED))
