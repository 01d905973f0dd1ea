"""What follows a launch, on real PostgreSQL and Redis, with simulated hosts."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
import redis
from sqlalchemy import Engine, text
from structlog.testing import capture_logs

from opencue_sched.accounting import keys
from opencue_sched.accounting.caps import make_ledger
from opencue_sched.accounting.epoch import Epoch, guarded_redis
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.dispatch.commit import commit_plan
from opencue_sched.dispatch.settle import SettleReport, booking_of, settle
from opencue_sched.domain.caps import Vertices
from opencue_sched.domain.frame_command import LaunchDetails
from opencue_sched.domain.hosts import Host, Resources
from opencue_sched.domain.plans import PlannedProc
from opencue_sched.domain.states import ThreadMode
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostIds, LayerSpec
from opencue_sched.embedded.rqds.simulated_host import Answer
from opencue_sched.embedded.rqds.simulated_rqd import SimulatedFarm
from opencue_sched.rqd.channels import RqdChannels
from opencue_sched.rqd.kill import RunningFrameRef, Whereabouts, look
from opencue_sched.rqd.launch import LaunchOutcome, LaunchRequest, launch_all, launch_requests
from opencue_sched.settings import Accounting, Settings
from opencue_sched.store.booking import fetch_launch_details
from opencue_sched.store.schema import check_schema
from tests.kit.gathering import counted_statements, waiting_jobs
from tests.kit.polling import eventually

CORES, MEMORY_KB = 2, 1024 * 1024


@dataclass
class Booked:
    """Frames of one job that are booked and committed, one per simulated host, but not launched."""

    committed: list[PlannedProc]
    details: LaunchDetails
    hosts: dict[str, HostIds]
    ledger: Ledger
    engine: Engine
    settings: Settings

    def requests(self, procs: Sequence[PlannedProc]) -> tuple[list[LaunchRequest], list[LaunchOutcome]]:
        return launch_requests(procs, self.details, self.settings)

    def launch_and_settle(self, channels: RqdChannels) -> SettleReport:
        requests, failed = self.requests(self.committed)
        assert not failed
        outcomes = launch_all(channels, requests)
        return settle(self.engine, self.ledger, channels, self.committed, outcomes)

    def on(self, host_name: str) -> PlannedProc:
        (found,) = (it for it in self.committed if it.host.name == host_name)
        return found

    def frame(self, committed: PlannedProc) -> tuple[str, int, str | None, int]:
        """State, exit status, proc id, idle centicores of the host."""
        statement = text(
            """
            SELECT frame.str_state, frame.int_exit_status, proc.pk_proc, host.int_cores_idle
              FROM frame JOIN host ON host.pk_host = :host LEFT JOIN proc ON proc.pk_frame = frame.pk_frame
             WHERE frame.pk_frame = :frame
            """
        )
        ids = {"frame": committed.frame.id, "host": committed.host.id}
        with self.engine.connect() as connection:
            row = connection.execute(statement, ids).one()
        return row[0], row[1], row[2], row[3]

    def booked_cores(self) -> int:
        """The subscription's counter in Redis."""
        vertices = self.committed[0].vertices
        value: Any = self.ledger.client.hget(keys.subscription(vertices.show_id, vertices.alloc_id), "int_cores")
        return int(value)

    def states(self) -> dict[str, str]:
        """proc id -> ledger state."""
        return {record.proc_id: record.state.name for record in self.ledger.records()}


@pytest.fixture
def booked(engine: Engine, settings: Settings, farm: SimulatedFarm) -> Iterator[Booked]:
    client = guarded_redis(settings.redis_dsn, settings)
    ledger = make_ledger(engine, client, owner="test", accounting=Accounting())
    info: Any = client.info("server")
    client.set(keys.EPOCH, Epoch.new(info["run_id"]).text)
    with engine.begin() as connection:
        rows = Farm(connection, seed=1)
        alloc = rows.default_alloc()
        hosts = {name: rows.host(name=name, cores=8, memory_gb=16) for name in farm.addresses}
        rows.job([LayerSpec(frames=len(hosts), cores=CORES)])
    with engine.connect() as connection:
        facts = check_schema(connection)
        (job,) = waiting_jobs(connection, facts)
    (layer,) = job.layers
    vertices = Vertices(job.show_id, alloc.id, job.folder_id, job.id, layer.id, job.dept_id)
    plan = [
        PlannedProc(str(uuid.uuid4()), job, layer, frame, _host(ids), Resources(CORES, MEMORY_KB), vertices)
        for frame, ids in zip(layer.frames, hosts.values(), strict=True)
    ]
    answers = ledger.book([booking_of(planned) for planned in plan])
    assert answers.accepted == {planned.proc_id for planned in plan}
    # PostgreSQL has all the time that a slow machine may need, also between two statements
    patient = settings.accounting.model_copy(update={"commit_deadline": 60.0})
    result = commit_plan(engine, plan, answers.caps, settings.model_copy(update={"accounting": patient}), facts=facts)
    assert len(result.committed) == len(plan), result
    with engine.connect() as connection:
        details = fetch_launch_details(connection, {job.id}, {layer.id})
    try:
        yield Booked(result.committed, details, hosts, ledger, engine, settings)
    finally:
        client.close()


def _host(ids: HostIds) -> Host:
    return Host(
        id=ids.id,
        name=ids.name,
        facility_id="",
        alloc_id=ids.alloc_id,
        tags=frozenset({"general"}),
        os_names=("linux",),
        thread_mode=ThreadMode.AUTO,
        total_centicores=800,
        idle_centicores=800,
        total_memory_kb=16 * 1024 * 1024,
        idle_memory_kb=16 * 1024 * 1024,
    )


def test_what_runs_is_confirmed(booked: Booked, channels: RqdChannels, farm: SimulatedFarm) -> None:
    with counted_statements(booked.engine) as statements:
        report = booked.launch_and_settle(channels)

    assert statements == []
    assert list(report.launched) == booked.committed
    assert (report.compensated, report.left_unknown) == ((), ())
    assert set(booked.states().values()) == {"CONFIRMED"}
    assert booked.booked_cores() == CORES * 3
    assert len(farm.running()) == 3


def test_what_certainly_failed_is_undone_everywhere(booked: Booked, channels: RqdChannels, farm: SimulatedFarm) -> None:
    # given one host without power and one that refuses
    farm.crash("sim0001")
    farm.behave("sim0002", refusal="Not launching, rqd HardwareState is not Up")

    # when the launches are settled
    report = booked.launch_and_settle(channels)

    # then their frames wait again, their hosts are whole, and their cores are free
    down, refusing, good = (booked.on(name) for name in ("sim0001", "sim0002", "sim0003"))
    assert {it.proc_id for it, _ in report.compensated} == {down.proc_id, refusing.proc_id}
    assert report.launched == (good,)
    assert booked.frame(down) == ("WAITING", 299, None, 800)
    assert booked.frame(refusing) == ("WAITING", 299, None, 800)
    assert booked.frame(good) == ("RUNNING", -1, good.proc_id, 600)
    assert booked.states() == {good.proc_id: "CONFIRMED"}
    assert booked.booked_cores() == CORES
    assert all(error.retriable and not error.outcome_unknown for _, error in report.compensated)


@pytest.mark.parametrize("answer", [Answer.CUT_OFF, Answer.NEVER])
def test_a_frame_that_runs_though_its_answer_was_lost_is_adopted(
    booked: Booked, connect: Callable[..., RqdChannels], farm: SimulatedFarm, answer: Answer
) -> None:
    farm.behave("sim0001", launch_answer=answer, setup_seconds=0.5)

    report = booked.launch_and_settle(connect(timeout=3.0))

    proc = booked.on("sim0001")
    assert (len(report.launched), report.compensated, report.left_unknown) == (3, (), ())
    assert booked.frame(proc) == ("RUNNING", -1, proc.proc_id, 600)
    assert booked.states()[proc.proc_id] == "CONFIRMED"
    assert farm.calls("sim0001")["KillRunningFrame"] == 0


def test_a_leftover_of_an_older_proc_is_killed_before_the_frame_waits_again(
    booked: Booked, channels: RqdChannels, farm: SimulatedFarm
) -> None:
    # given a host on which the frame still runs for a proc that no longer exists
    proc = booked.on("sim0001")
    (old,), _ = booked.requests([replace(proc, proc_id="gone")])
    assert launch_all(channels, [old])[0].error is None
    eventually(lambda: farm.host("sim0001").listed(proc.frame.id))

    # when the new proc's launch is settled, and somebody has its frame locked
    with ThreadPoolExecutor(1) as pool, booked.engine.begin() as other:
        other.execute(text("SELECT 1 FROM frame WHERE pk_frame = :id FOR UPDATE"), {"id": proc.frame.id})
        settling = pool.submit(booked.launch_and_settle, channels)
        waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
        eventually(lambda: other.execute(waiting).scalar(), what="an undoing that waits")
        running = farm.running()
        other.rollback()
        report = settling.result()

    # then the leftover was gone before PostgreSQL was touched, and was not killed afterwards
    assert [it.proc_id for it, _ in report.compensated] == [proc.proc_id]
    assert proc.frame.id not in running
    assert booked.frame(proc) == ("WAITING", 299, None, 800)
    assert farm.runs(proc.frame.id)[0].killed


def test_a_newer_run_of_the_frame_is_not_killed_for_a_proc_that_somebody_released(
    booked: Booked, channels: RqdChannels, farm: SimulatedFarm
) -> None:
    """A process that was stopped during its launch for so long that its frame was given to another on the same host."""
    proc = booked.on("sim0001")
    newer = replace(proc, proc_id=str(uuid.uuid4()))
    with booked.engine.begin() as connection:
        connection.execute(
            text("UPDATE proc SET pk_proc = :newer WHERE pk_proc = :old"),
            {"newer": newer.proc_id, "old": proc.proc_id},
        )
    (other,), _ = booked.requests([newer])
    assert launch_all(channels, [other])[0].error is None
    eventually(lambda: farm.host("sim0001").listed(newer.frame.id))

    report = booked.launch_and_settle(channels)

    assert [it.proc_id for it, _ in report.compensated] == [proc.proc_id]
    assert farm.calls("sim0001")["KillRunningFrame"] == 0
    assert farm.running()[newer.frame.id] == "sim0001"
    assert booked.frame(proc) == ("RUNNING", -1, newer.proc_id, 600)
    assert proc.proc_id not in booked.states()


def test_a_frame_that_was_taken_off_its_proc_is_left_to_whoever_did_that(
    booked: Booked, channels: RqdChannels, farm: SimulatedFarm
) -> None:
    farm.behave("sim0001", launch_answer=Answer.CUT_OFF)
    proc = booked.on("sim0001")
    with booked.engine.begin() as connection:
        connection.execute(text("UPDATE proc SET pk_frame = NULL WHERE pk_proc = :proc"), {"proc": proc.proc_id})

    report = booked.launch_and_settle(channels)

    assert [it.proc_id for it, _ in report.left_unknown] == [proc.proc_id]
    assert farm.calls("sim0001")["KillRunningFrame"] == 0


def test_nothing_is_freed_while_nobody_can_tell(
    booked: Booked, connect: Callable[..., RqdChannels], farm: SimulatedFarm
) -> None:
    # given a host that is connected and frozen
    channels = connect(timeout=1.5)
    proc = booked.on("sim0001")
    assert look(channels, RunningFrameRef("sim0001", "", "")).place is Whereabouts.ABSENT
    farm.freeze("sim0001")

    # when the launches are settled
    report = booked.launch_and_settle(channels)

    # then the proc stays booked everywhere, and the report says why
    ((left, error),) = report.left_unknown
    assert left == proc
    assert error.outcome_unknown
    assert "sim0001" in str(error)
    assert booked.frame(proc) == ("RUNNING", -1, proc.proc_id, 600)
    assert booked.states()[proc.proc_id] == "CONFIRMED"
    assert booked.booked_cores() == CORES * 3
    # and when the host comes to itself, its frame has an owner
    farm.thaw("sim0001")
    eventually(lambda: proc.frame.id in farm.running())


def refuse_to_delete(proc_id: str) -> str:
    """SQL of a trigger that raises when this proc is deleted."""
    return f"""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
        $$BEGIN RAISE EXCEPTION 'canceling statement due to statement timeout' USING ERRCODE = '57014'; END$$;
        CREATE TRIGGER refuse BEFORE DELETE ON proc FOR EACH ROW WHEN (OLD.pk_proc = '{proc_id}')
        EXECUTE FUNCTION refuse()"""


def test_a_compensation_postgresql_refuses_frees_nothing_and_holds_back_nobody(
    booked: Booked, channels: RqdChannels, farm: SimulatedFarm
) -> None:
    # given two hosts without power, and a database that refuses to undo one of them
    farm.crash("sim0001")
    farm.crash("sim0002")
    stubborn, other = booked.on("sim0001"), booked.on("sim0002")
    with booked.engine.begin() as connection:
        connection.exec_driver_sql(refuse_to_delete(stubborn.proc_id))

    report = booked.launch_and_settle(channels)

    # then only the other one is undone
    assert [it.proc_id for it, _ in report.compensated] == [other.proc_id]
    assert [it.proc_id for it, _ in report.left_unknown] == [stubborn.proc_id]
    assert booked.frame(stubborn) == ("RUNNING", -1, stubborn.proc_id, 600)
    assert booked.frame(other) == ("WAITING", 299, None, 800)
    assert stubborn.proc_id in booked.states()
    assert booked.booked_cores() == CORES * 2


def test_a_proc_somebody_else_released_is_only_forgotten(
    booked: Booked, channels: RqdChannels, farm: SimulatedFarm
) -> None:
    # given a proc whose frame was started again by somebody else meanwhile
    farm.crash("sim0001")
    proc = booked.on("sim0001")
    with booked.engine.begin() as connection:
        connection.execute(text("DELETE FROM proc WHERE pk_proc = :proc"), {"proc": proc.proc_id})
        connection.execute(
            text("UPDATE frame SET int_version = int_version + 1 WHERE pk_frame = :frame"),
            {"frame": proc.frame.id},
        )

    report = booked.launch_and_settle(channels)

    # then the frame is left to its new owner, the host is not given back twice, the ledger forgets the proc
    assert [it.proc_id for it, _ in report.compensated] == [proc.proc_id]
    assert booked.frame(proc) == ("RUNNING", -1, None, 600)
    assert proc.proc_id not in booked.states()


def test_a_redis_that_is_gone_is_reported_and_postgresql_is_undone_all_the_same(
    booked: Booked, channels: RqdChannels, farm: SimulatedFarm, redis_client: redis.Redis
) -> None:
    farm.crash("sim0001")
    redis_client.flushdb()

    with capture_logs() as logged:
        report = booked.launch_and_settle(channels)

    assert any("NotReady" in str(it.get("error")) for it in logged if it["event"] == "settlement_not_told_to_redis")
    assert booked.frame(booked.on("sim0001")) == ("WAITING", 299, None, 800)
    assert len(report.launched) == 2
