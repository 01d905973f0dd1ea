"""Whose rows a fleet's upkeep touches: beside a Cuebot those of managed shows, and those of the fleet's facility."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine, text
from structlog.testing import capture_logs

from opencue_sched.coordination.keys import events_lease, move_lease, reap_lease
from opencue_sched.coordination.leader import exclusive
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobIds, LayerSpec
from opencue_sched.settings import Events, Settings
from opencue_sched.store.failed_runs import breaking_hosts
from opencue_sched.store.schema import Origin
from opencue_sched.worker.process import Process
from tasks import maintenance
from tests.kit.limits import has_types
from tests.kit.runs import FarmView
from tests.kit.tasks import run_task


@pytest.fixture
def view(engine: Engine) -> FarmView:
    return FarmView(engine)


@pytest.fixture
def start(settings: Settings) -> Iterator[Callable[..., Process]]:
    """``start(origin, facility)``: a process of the fleet of that facility, on a database made by ``origin``."""
    made: list[Process] = []

    def start(origin: Origin, facility: str | None = None) -> Process:
        scheduler = settings.scheduler.model_copy(update={"facility": facility})
        release = settings.release.model_copy(update={"host_down_after": 0.5})
        app = Celery("upkeep", broker="memory://", set_as_current=False)
        process = Process(settings.model_copy(update={"scheduler": scheduler, "release": release}), app)
        process.facts = replace(process.facts, origin=origin)
        made.append(process)
        return process

    yield start
    for process in made:
        process.close()
        process.app.close()


@dataclass(frozen=True)
class Mess:
    """A silent host, a proc of five minutes ago without a frame, a job whose frames are over, one that waits for it and
    one with a frame that runs on no proc."""

    host_id: str
    over: JobIds
    waits: JobIds
    stuck: JobIds

    def put_right(self, view: FarmView) -> list[bool]:
        """Of each of them, whether it has been."""
        silent = view.rows("SELECT FROM host_stat WHERE pk_host = :h AND str_state = 'UP'", h=self.host_id)
        procs = view.rows("SELECT FROM proc WHERE pk_host = :h", h=self.host_id)
        rest = [view.states(frames) == ["WAITING"] * 2 for frames in (self.waits.frames, self.stuck.frames)]
        return [not silent, not procs, view.job_state(self.over) == "FINISHED", *rest]


def mess(farm: Farm, *, managed: bool = True, facility: str = "local") -> Mess:
    show = farm.show(managed=managed)
    place: dict[str, Any] = {"show": show, "facility_id": farm.facility(facility)}
    host = farm.host(alloc=farm.alloc(facility=facility), ping_age=600)
    over, waits, stuck = (farm.job([LayerSpec(frames=2)], **place) for _ in range(3))
    (proc,) = farm.run([farm.job(**place).frames[0]], host)
    farm.job_on_job(waits, over)
    named = {"proc": proc, "over": over.id, "orphan": stuck.frames[1]}
    for sql in (
        "UPDATE proc SET pk_frame = NULL, ts_ping = now() - interval '5 minutes' WHERE pk_proc = :proc",
        "UPDATE frame SET str_state = 'SUCCEEDED' WHERE pk_job = :over",
        "UPDATE job SET ts_started = now() - interval '5 minutes' WHERE pk_job = :over",
        "UPDATE frame SET str_state = 'RUNNING', ts_updated = now() - interval '6 minutes' WHERE pk_frame = :orphan",
    ):
        farm.connection.execute(text(sql), named)
    return Mess(host.id, over, waits, stuck)


def upkeep(process: Process) -> None:
    """Everything beat has a fleet do, until nothing is left of it."""
    assert run_task(maintenance.reap, process)["reaped"]
    run_task(maintenance.recover_depends, process)
    run_task(maintenance.recover_depends, process)


@pytest.mark.parametrize("origin", ["cuebot", "opencue-sched"])
def test_beside_a_cuebot_the_upkeep_of_unmanaged_shows_is_cuebots(
    start: Callable[..., Process], view: FarmView, origin: Origin
) -> None:
    # given the same mess in a managed show and in one that was never handed over
    with view.farm() as farm:
        ours, theirs = mess(farm), mess(farm, managed=False)

    # when a fleet has passed over it
    upkeep(start(origin))

    # then it has put right what is its own; hosts belong to no show
    assert ours.put_right(view) == [True] * 5
    assert theirs.put_right(view) == [True, *[origin == "opencue-sched"] * 4]


def test_a_fleet_of_one_facility_leaves_the_others_alone(
    start: Callable[..., Process], view: FarmView, settings: Settings
) -> None:
    # given the same mess in two facilities, and a reap under way in the fleet of the other
    with view.farm() as farm:
        here, there = mess(farm), mess(farm, facility="far")
    far, near = start("opencue-sched", "far"), start("opencue-sched", "local")
    run_task(maintenance.recover_depends, far)
    assert there.put_right(view) == [False, False, True, True, False]
    with exclusive(far.client, reap_lease(settings.coordination.namespace, "far"), seconds=60.0):
        assert not run_task(maintenance.reap, far)["reaped"]

        # when the fleet of this one passes, then it puts right what is in its own
        upkeep(near)
    assert here.put_right(view) == [True] * 5
    assert there.put_right(view) == [False, False, True, True, False]

    # and the other one the rest
    upkeep(far)
    assert there.put_right(view) == [True] * 5


@pytest.mark.parametrize(
    ("origin", "after", "moves"), [("cuebot", 60, 0), ("opencue-sched", 0, 0), ("opencue-sched", 60, 1)]
)
def test_finished_jobs_are_moved_where_there_is_no_cuebot_unless_it_is_switched_off(
    start: Callable[..., Process], view: FarmView, settings: Settings, origin: Origin, after: float, moves: int
) -> None:
    # given a job that finished long ago, and an upgrade of long ago
    with view.farm() as farm:
        job = farm.job()
    view.run_sql("UPDATE job SET str_state = 'FINISHED', ts_stopped = now() - interval '9 days'")
    view.run_sql("UPDATE task_lock SET ts_lastrun = ts_lastrun - interval '9 days'")
    process = start(origin)
    release = process.settings.release.model_copy(update={"move_finished_jobs_after": after})
    process.settings = process.settings.model_copy(update={"release": release})

    # when its tick comes while another process is at it, and then again
    with exclusive(process.client, move_lease(settings.coordination.namespace, None), seconds=60.0):
        assert not run_task(maintenance.move_finished_jobs, process)["moves"]
    moved = run_task(maintenance.move_finished_jobs, process)

    # then
    assert (moved["moves"], moved.get("jobs", 0)) == (bool(moves), moves)
    assert bool(view.rows("SELECT FROM job WHERE pk_job = :job", job=job.id)) == (not moves)


def test_events_of_jobs_are_sent_by_one_process_at_a_time_and_not_beside_a_cuebot(
    start: Callable[..., Process], settings: Settings, view: FarmView
) -> None:
    def send(process: Process) -> dict[str, Any]:
        process.settings = process.settings.model_copy(update={"events": Events(command=("true",))})
        return run_task(maintenance.send_events, process)

    # given a Cuebot, which has mails, then nothing is sent, nor is any event written from then on
    assert send(start("cuebot")) == {"sending": False}
    assert view.rows("SELECT FROM opencue_sched_receiver") == []
    # given none, and another process that sends, then this one does not
    ours = start("opencue-sched")
    with exclusive(ours.client, events_lease(settings.coordination.namespace, None), seconds=60.0):
        assert send(ours) == {"sending": False}
    assert send(ours) == {"sending": True, "sent": 0, "failed": 0, "dropped": 0}
    assert len(view.rows("SELECT FROM opencue_sched_receiver")) == 1


@pytest.mark.parametrize("origin", ["cuebot", "opencue-sched"])
def test_beside_a_cuebot_hosts_that_break_frames_are_known_by_the_history(
    start: Callable[..., Process], view: FarmView, origin: Origin
) -> None:
    # given frames that a Cuebot has ended: on each of some hosts one of three jobs
    reports = {
        "broken": {"status": 1},
        "crashing": {"status": 139},
        "killed": {"status": 137},
        "starved": {"status": 33},
        "short": {"status": 77},
        "late": {"status": 1, "ran": 90},
        "over": {"status": 1, "job": "FINISHED"},
        "sound": {"status": 0},
    }
    with view.engine.connect() as connection:
        licences = has_types(connection)
    if not licences:
        del reports["short"]  # before V49 no exit status says that a frame got no licence
    with view.farm() as farm:
        limit = farm.limit("houdini", 10)
        hosts = {name: farm.host(name=name) for name in reports}
        jobs = {name: [farm.job([LayerSpec(frames=1)]) for _ in range(3)] for name in reports}
        for name, host in hosts.items():
            farm.run([job.frames[0] for job in jobs[name]], host, cores=1, memory_gb=1)
    if licences:
        view.run_sql("UPDATE limit_record SET int_exit_status = 77 WHERE pk_limit_record = :limit", limit=limit)
    for name, report in reports.items():
        ids = [job.id for job in jobs[name]]
        view.run_sql(
            "UPDATE frame_history SET int_ts_started = int_ts_started - :ran WHERE pk_job = ANY(:jobs)",
            ran=report.get("ran", 5),
            jobs=ids,
        )
        view.run_sql("DELETE FROM proc WHERE pk_job = ANY(:jobs)", jobs=ids)
        view.run_sql(
            "UPDATE frame SET str_state = 'DEAD', int_exit_status = :status WHERE pk_job = ANY(:jobs)",
            status=report["status"],
            jobs=ids,
        )
        state = report.get("job", "PENDING")
        view.run_sql("UPDATE job SET str_state = :state WHERE pk_job = ANY(:jobs)", state=state, jobs=ids)

    # when a fleet looks, then those that break frames are named, beside a Cuebot
    process = start(origin)
    upkeep(process)
    upkeep(process)
    with view.engine.connect() as connection:
        named = {row.host: (row.jobs, row.frames) for row in breaking_hosts(connection, ())}
    assert named == ({"broken": (3, 3), "crashing": (3, 3)} if origin == "cuebot" else {})

    # and what is old is not known for ever
    view.run_sql("UPDATE opencue_sched_failed_run SET ts = ts - interval '2 hours'")
    view.run_sql("UPDATE frame_history SET int_ts_stopped = int_ts_stopped - 7200, int_ts_started = 0")
    upkeep(process)
    with view.engine.connect() as connection:
        assert not breaking_hosts(connection, ())


def test_failures_that_cannot_be_noted_keep_no_history_from_being_drained(
    start: Callable[..., Process], view: FarmView
) -> None:
    # given a mess, and a frame that failed, beside a Cuebot that queues its history, without the table of failures
    with view.farm() as farm:
        ours, job = mess(farm), farm.job([LayerSpec(frames=1)])
        farm.run(job.frames, farm.host())
    view.run_sql("DELETE FROM proc WHERE pk_job = :job", job=job.id)
    view.run_sql("UPDATE frame SET str_state = 'DEAD', int_exit_status = 1 WHERE pk_job = :job", job=job.id)
    process = start("cuebot")
    process.facts = replace(process.facts, has_frame_history_queue=True)
    view.run_sql(
        "CREATE FUNCTION frame_history_drain(p_limit int, p_wait boolean, p_safe boolean, OUT drained int,"
        " OUT skipped int) LANGUAGE sql AS 'SELECT 7, 0'"
    )
    view.run_sql("ALTER TABLE opencue_sched_failed_run RENAME TO gone")

    # when a fleet reaps
    with capture_logs() as logs:
        summary = run_task(maintenance.reap, process)

    # then all else is done, and the failure told
    figures = {"reaped": True, "hosts_down": 1, "history_events": 7, "early_failures": 0}
    assert summary.items() >= figures.items()
    assert "early_failures_not_noted" in [entry["event"] for entry in logs]
    assert ours.put_right(view)[0]
