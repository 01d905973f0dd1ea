"""The whole release path: simulated RQDs, the real report service, ledger, change log and database."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis
from opencue_proto import rqd_pb2
from sqlalchemy import Engine
from structlog.testing import capture_logs

from opencue_sched.accounting.bootstrap import ensure_bootstrapped
from opencue_sched.accounting.caps import make_ledger
from opencue_sched.accounting.epoch import guarded_redis
from opencue_sched.accounting.keys import Booking
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.coordination.change_log import HostChanges
from opencue_sched.domain.caps import Vertices
from opencue_sched.embedded.farms.farm_specs import HostIds, JobIds, LayerSpec
from opencue_sched.embedded.rqds.simulated_host import HostSpec
from opencue_sched.embedded.rqds.simulated_rqd import SimulatedFarm
from opencue_sched.jobs.control import JobControl
from opencue_sched.reports.completion import Releaser
from opencue_sched.reports.reaper import reap
from opencue_sched.reports.service import ReportService
from opencue_sched.rqd.channels import RqdChannels
from opencue_sched.rqd.kill import Fate, RqdKiller
from opencue_sched.settings import Accounting, Release, Rqd, Settings
from opencue_sched.store.lost_runs import UpkeepScope
from tests.kit.counted import Counted
from tests.kit.forced import force
from tests.kit.polling import eventually
from tests.kit.runs import FarmView


class LateKiller:
    """The real killer, given its connections once the simulated hosts have addresses."""

    def __init__(self) -> None:
        self.real: RqdKiller | None = None

    def answers(self, host_name: str, seconds: float) -> bool:
        assert self.real is not None
        return self.real.answers(host_name, seconds)

    def ask(self, host_name: str, frame_id: str, reason: str) -> bool:
        assert self.real is not None
        return self.real.ask(host_name, frame_id, reason)

    def stop(self, host_name: str, frame_id: str, proc_id: str, reason: str) -> Fate:
        assert self.real is not None
        return self.real.stop(host_name, frame_id, proc_id, reason)

    def confirm_gone(self, host_name: str, frame_id: str, proc_id: str) -> Fate:
        assert self.real is not None
        return self.real.confirm_gone(host_name, frame_id, proc_id)


@dataclass
class Site:
    """A farm of two simulated hosts that report to a service of ours, and a scheduler's side of it."""

    view: FarmView
    service: ReportService
    rqds: SimulatedFarm
    channels: RqdChannels
    killer: LateKiller
    ledger: Ledger
    changes: HostChanges
    client: redis.Redis
    hosts: dict[str, HostIds] = field(default_factory=dict)

    def job(self, frames: int, **fields: Any) -> JobIds:
        with self.view.farm() as farm:
            return farm.job([LayerSpec(frames=frames, tags="general")], **fields)

    def launch(self, job: JobIds, frames: Sequence[str], host_name: str) -> list[str]:
        """Book frames in the ledger and PostgreSQL, and launch them, as a pass would."""
        host = self.hosts[host_name]
        with self.view.farm() as farm:
            procs = farm.run(frames, host, cores=1, memory_gb=0.5)
        vertices = Vertices(job.show.id, host.alloc_id, job.folder_id, job.id, job.layers[0].id, job.show.dept_id)
        bookings = [Booking(proc, vertices, 1) for proc in procs]
        force(self.ledger, bookings)
        self.ledger.settle(bookings)
        for proc, frame in zip(procs, frames, strict=True):
            run = rqd_pb2.RunFrame(
                resource_id=proc, frame_id=frame, job_id=job.id, layer_id=job.layers[0].id, num_cores=100, command="x"
            )
            request = rqd_pb2.RqdStaticLaunchFrameRequest(run_frame=run)
            self.channels.stub(host_name).LaunchFrame(request, timeout=60)
        return procs

    def booked(self) -> set[str]:
        return {record.proc_id for record in self.ledger.records()}

    def report(self, host_name: str) -> None:
        """Send a status report and wait until it was handled."""
        before = self.service.count["host_report"]
        assert self.rqds.report_now(host_name)
        eventually(lambda: self.service.count["host_report"] > before)


@pytest.fixture
def site(settings: Settings, engine: Engine, view: FarmView, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    release = settings.release.model_copy(update={"port": 0, "lost_completion_grace": 0.3})
    settings = settings.model_copy(update={"release": release})
    with contextlib.ExitStack() as stack:
        client = guarded_redis(settings.redis_dsn, settings)
        stack.callback(client.close)
        ledger = make_ledger(engine, client, owner="test", accounting=Accounting())
        ensure_bootstrapped(engine, ledger, wait_age=0.1)
        changes = HostChanges(client, "cue")
        with view.farm() as farm:
            farm.alloc()
        killer = LateKiller()
        service = ReportService(settings, Releaser(engine, release, ledger, changes, Counted()), killer)
        service.start()
        stack.callback(service.stop)
        names = ("sim1", "sim2")
        rqds = SimulatedFarm(
            [HostSpec(name, cores=8, memory_kb=16 * 1024 * 1024, tags=("general",)) for name in names],
            report_address=f"127.0.0.1:{service.port}",
            report_seconds=(3600.0, 3600.0),
        )
        stack.enter_context(rqds)
        rqds.behave(hang_ratio=1.0)
        channels = stack.enter_context(RqdChannels(Rqd(addresses=rqds.addresses, timeout=3.0)))
        killer.real = RqdKiller(channels)
        eventually(lambda: service.count["boot_report"] == 2)
        site = Site(view, service, rqds, channels, killer, ledger, changes, client)
        for row in view.rows("SELECT pk_host, str_name, pk_alloc FROM host"):
            site.hosts[row.str_name] = HostIds(row.pk_host, row.str_name, row.pk_alloc)
        yield site


def test_a_job_renders_to_its_end(site: Site) -> None:
    # given a job whose frames run on both hosts
    job = site.job(4)
    site.launch(job, job.frames[:2], "sim1")
    site.launch(job, job.frames[2:], "sim2")
    cursor, _ = site.changes.since(None)

    # when their processes end, one of them badly and again well
    site.rqds.finish("sim1", job.frames[0], exit_status=1)
    eventually(lambda: site.view.states(job.frames[:1]) == ["WAITING"])
    site.launch(job, job.frames[:1], "sim2")
    for host, frame in (("sim2", 0), ("sim1", 1), ("sim2", 2), ("sim2", 3)):
        site.rqds.finish(host, job.frames[frame])

    # then the job is finished, everything was given back, and the host caches were told
    eventually(lambda: site.view.job_state(job) == "FINISHED")
    eventually(lambda: not site.booked())
    assert site.view.states(job.frames) == ["SUCCEEDED"] * 4
    eventually(lambda: set(site.changes.since(cursor)[1] or ()) >= {host.id for host in site.hosts.values()})
    assert site.client.hget(f"acct:job:{job.id}", "int_cores") == "0"
    site.view.assert_consistent()


@pytest.mark.parametrize("beside_cuebot", [False, True])
def test_completions_that_never_came_or_went_to_a_killed_cuebot_free_the_cores(
    site: Site, engine: Engine, beside_cuebot: bool
) -> None:
    # given three frames of which two have ended while nobody heard it, and a host that has reported twice since
    site.rqds.behave(completions_lost=True)
    job = site.job(3)
    site.launch(job, job.frames, "sim1")
    for frame in job.frames[:2]:
        site.rqds.finish("sim1", frame)
    eventually(lambda: len(site.rqds.running()) == 1)
    site.view.run_sql("UPDATE proc SET ts_ping = now() - interval '40 s', ts_dispatched = now() - interval '60 s'")

    # when a worker reaps
    killer, scope = RqdKiller(site.channels), UpkeepScope(beside_cuebot=beside_cuebot)
    report = reap(Releaser(engine, Release(), ledger=site.ledger), killer, scope=scope)

    # then those two wait again, and the one that runs does so undisturbed
    assert (report.frames_waiting, report.deferred) == (2, 0)
    assert site.view.states(job.frames) == ["WAITING", "WAITING", "RUNNING"]
    assert len(site.booked()) == len(site.rqds.running()) == 1
    site.view.assert_consistent()


def test_a_process_without_a_proc_is_dead_within_two_reports(site: Site) -> None:
    # given a process whose proc was deleted by somebody
    job = site.job(1)
    site.launch(job, job.frames, "sim1")
    site.view.run_sql("DELETE FROM proc")
    site.view.run_sql("UPDATE frame SET str_state = 'WAITING', ts_updated = now() - interval '5 s'")
    site.report("sim1")
    eventually(lambda: not site.rqds.running())


def test_a_crashed_host_loses_its_frames_to_others(site: Site, engine: Engine, settings: Settings) -> None:
    # given a host that lost power
    job = site.job(2)
    site.launch(job, job.frames, "sim1")
    site.rqds.crash("sim1")
    site.view.run_sql(
        "UPDATE host_stat SET ts_ping = now() - interval '5 s' WHERE pk_host = :h", h=site.hosts["sim1"].id
    )
    release = settings.release.model_copy(update={"host_down_after": 1.0})

    # when the reaper passes
    report = reap(Releaser(engine, release, ledger=site.ledger, changes=site.changes), site.killer)

    # then its frames wait for another one
    assert report.hosts_down == (site.hosts["sim1"].id,)
    assert report.frames_waiting == 2
    assert site.booked() == set()
    site.view.assert_consistent()

    # and when it is back, it is UP and bookable
    site.rqds.restart("sim1")
    eventually(lambda: site.view.host(site.hosts["sim1"]).str_state == "UP")
    assert site.view.host(site.hosts["sim1"]).int_cores_idle == 800


def test_killing_a_job_ends_its_processes(site: Site, engine: Engine) -> None:
    job = site.job(4)
    site.launch(job, job.frames[:2], "sim1")
    site.launch(job, job.frames[2:], "sim2")
    control = JobControl(Releaser(engine, Release(), site.ledger, site.changes), site.killer)
    killed = control.kill_job(job.id, reason="test")
    assert killed.finished
    assert killed.deferred == ()
    assert site.rqds.running() == {}
    assert site.view.procs() == []
    eventually(lambda: not site.booked())
    site.view.assert_consistent()


class _SlowToConfirm(LateKiller):
    """An RQD killer whose answer comes after the completion of the frame was applied."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.real = site.killer.real

    def stop(self, host_name: str, frame_id: str, proc_id: str, reason: str) -> Fate:
        fate = self._site.killer.stop(host_name, frame_id, proc_id, reason)
        eventually(lambda: proc_id not in self._site.view.procs())
        return fate


def test_frames_whose_completions_come_before_the_confirmation_were_stopped_all_the_same(
    site: Site, engine: Engine
) -> None:
    # given RQDs that report a killed frame at once
    job = site.job(6)
    site.launch(job, job.frames[:3], "sim1")
    site.launch(job, job.frames[3:], "sim2")
    control = JobControl(Releaser(engine, Release(), site.ledger, site.changes), _SlowToConfirm(site))

    # when the job is killed
    with capture_logs() as logs:
        killed = control.kill_job(job.id, reason="test")

    # then its frames count as stopped, and nobody is warned of what is as it should be
    assert sorted(killed.changed) == sorted(job.frames)
    assert killed.deferred == ()
    ended = [entry for entry in logs if entry["event"] == "lost_run_ended"]
    assert {(entry["verdict"], entry["log_level"]) for entry in ended} == {("stale", "info")}
    site.view.assert_consistent()


def test_a_frame_that_does_not_die_keeps_its_proc(site: Site, engine: Engine) -> None:
    # given a host that takes longer to kill than we wait
    job = site.job(1)
    site.launch(job, job.frames, "sim1")
    site.rqds.behave(kill_seconds=600.0)
    control = JobControl(Releaser(engine, Release(), site.ledger), site.killer)
    assert control.retry_frames(job.frames, reason="test").deferred == job.frames
    assert site.view.states(job.frames) == ["RUNNING"]
    assert len(site.booked()) == 1
