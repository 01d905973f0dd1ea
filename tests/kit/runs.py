"""A farm with running frames, and what every release test looks at afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Engine, text

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostIds, JobIds, LayerSpec
from opencue_sched.reports.completion import Releaser
from opencue_sched.reports.run_ends import CompletedFrame, RunOutcome
from opencue_sched.rqd.kill import Fate
from opencue_sched.settings import Release
from tests.kit.polling import eventually


class FarmView:
    """Reads a farm the way a person in psql would."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @contextmanager
    def farm(self) -> Iterator[Farm]:
        with self.engine.begin() as connection:
            yield Farm(connection)

    def rows(self, sql: str, **parameters: Any) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.execute(text(sql), parameters))

    def one(self, sql: str, **parameters: Any) -> Any:
        (row,) = self.rows(sql, **parameters)
        return row

    def run_sql(self, sql: str, **parameters: Any) -> None:
        with self.engine.begin() as connection:
            connection.execute(text(sql), parameters)

    def frame(self, frame_id: str) -> Any:
        return self.one("SELECT * FROM frame WHERE pk_frame = :frame", frame=frame_id)

    def states(self, frames: Sequence[str]) -> list[str]:
        found = {
            row.pk_frame: row.str_state
            for row in self.rows("SELECT pk_frame, str_state FROM frame WHERE pk_frame = ANY(:f)", f=list(frames))
        }
        return [found[frame] for frame in frames]

    def job_state(self, job: JobIds) -> str:
        return str(self.one("SELECT str_state FROM job WHERE pk_job = :job", job=job.id).str_state)

    def procs(self) -> list[str]:
        return [row.pk_proc for row in self.rows("SELECT pk_proc FROM proc ORDER BY pk_proc")]

    def host(self, host: HostIds) -> Any:
        return self.one("SELECT * FROM host JOIN host_stat USING (pk_host) WHERE pk_host = :host", host=host.id)

    def wait_for_waiters(self, count: int, seconds: float = 20.0) -> None:
        """Until that many sessions of this database wait for a lock."""
        waiting = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        eventually(lambda: len(self.rows(waiting)) >= count, seconds, f"{count} sessions that wait for a lock")

    def assert_consistent(self) -> None:
        """The rows agree: host idle = total - sum(procs), *_stat = the states of the frames."""
        hosts = self.rows(
            """
            SELECT str_name FROM host
              LEFT JOIN (SELECT pk_host, sum(int_cores_reserved) AS c, sum(int_mem_reserved) AS m,
                                sum(int_gpus_reserved) AS g, sum(int_gpu_mem_reserved) AS gm
                           FROM proc GROUP BY pk_host) used USING (pk_host)
             WHERE int_cores - coalesce(c, 0) <> int_cores_idle OR int_mem - coalesce(m, 0) <> int_mem_idle
                OR int_gpus - coalesce(g, 0) <> int_gpus_idle OR int_gpu_mem - coalesce(gm, 0) <> int_gpu_mem_idle
                OR int_cores_idle < 0 OR int_mem_idle < 0
            """
        )
        assert hosts == [], "host idle is not total minus the procs"
        counts = self.rows(
            """
            SELECT pk_layer FROM layer_stat JOIN (
              SELECT pk_layer, count(*) FILTER (WHERE str_state = 'WAITING') AS waiting,
                     count(*) FILTER (WHERE str_state = 'RUNNING') AS running,
                     count(*) FILTER (WHERE str_state = 'DEAD') AS dead,
                     count(*) FILTER (WHERE str_state = 'DEPEND') AS depend,
                     count(*) FILTER (WHERE str_state = 'EATEN') AS eaten,
                     count(*) FILTER (WHERE str_state = 'SUCCEEDED') AS succeeded
                FROM frame GROUP BY pk_layer) real USING (pk_layer)
             WHERE (int_waiting_count, int_running_count, int_dead_count, int_depend_count, int_eaten_count,
                    int_succeeded_count) IS DISTINCT FROM (waiting, running, dead, depend, eaten, succeeded)
            """
        )
        assert counts == [], "layer_stat is not what the frames are"
        jobs = self.rows(
            """
            SELECT pk_job FROM job_stat JOIN (
              SELECT pk_job, sum(int_waiting_count) AS w, sum(int_running_count) AS r, sum(int_dead_count) AS d,
                     sum(int_depend_count) AS dep, sum(int_succeeded_count) AS s
                FROM layer_stat GROUP BY pk_job) real USING (pk_job)
             WHERE (int_waiting_count, int_running_count, int_dead_count, int_depend_count, int_succeeded_count)
                   IS DISTINCT FROM (w, r, d, dep, s)
            """
        )
        assert jobs == [], "job_stat is not the sum of layer_stat"
        owned = self.rows(
            "SELECT pk_frame FROM frame WHERE str_state = 'RUNNING' AND pk_frame NOT IN"
            " (SELECT pk_frame FROM proc WHERE pk_frame IS NOT NULL)"
        )
        assert owned == [], "a RUNNING frame has no proc"


@dataclass
class Running:
    """A job whose first frames run on one host."""

    job: JobIds
    host: HostIds
    frames: tuple[str, ...]
    procs: tuple[str, ...]

    def report(self, index: int = 0, **values: Any) -> CompletedFrame:
        """The report of the end of a running frame: exit 0 unless something else is asked for."""
        fields = {"exit_status": 0, "max_rss_kb": 500_000, **values}
        return CompletedFrame(self.procs[index], self.frames[index], self.host.name, **fields)


def complete_frame(
    engine: Engine, report: CompletedFrame, ledger: Any = None, changes: Any = None, **settings: Any
) -> RunOutcome:
    """Apply one report; raises what the database refused it with."""
    (answer,) = Releaser(engine, Release(**settings), ledger, changes).end([report])
    if answer.error is not None:
        raise answer.error
    return answer


@dataclass
class RecordedLedger:
    """Stands for accounting's ledger: release is idempotent, what it was told is kept."""

    released: list[str] = field(default_factory=list)

    def release(self, proc_ids: Sequence[str]) -> int:
        self.released += proc_ids
        return len(proc_ids)


@dataclass
class RecordedChanges:
    """Stands for placement's change log."""

    published: list[str] = field(default_factory=list)

    def publish(self, host_ids: Sequence[str]) -> None:
        self.published += host_ids


@dataclass
class ScriptedKiller:
    """Stands for RQD: answers ``fate`` (or what ``fates`` says for a host), and keeps what it was asked."""

    fate: Fate = Fate.NOT_RUNNING
    fates: dict[str, Fate] = field(default_factory=dict)
    stopped: list[tuple[str, str]] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)
    probed: list[str] = field(default_factory=list)
    looked_for: list[str] = field(default_factory=list)

    def answers(self, host_name: str, seconds: float) -> bool:
        self.probed.append(host_name)
        return self.fates.get(host_name, self.fate) is not Fate.UNREACHABLE

    def ask(self, host_name: str, frame_id: str, reason: str) -> bool:
        self.asked.append((host_name, frame_id))
        return self.fates.get(host_name, self.fate) is not Fate.UNREACHABLE

    def stop(self, host_name: str, frame_id: str, proc_id: str, reason: str) -> Fate:
        self.stopped.append((host_name, frame_id))
        return self.fates.get(host_name, self.fate)

    def confirm_gone(self, host_name: str, frame_id: str, proc_id: str) -> Fate:
        self.looked_for.append(frame_id)
        return self.fates.get(host_name, self.fate)


def start(
    view: FarmView,
    *layers: LayerSpec,
    running: int = 1,
    cores: float = 2,
    memory_gb: float = 2,
    gpus: int = 0,
    **job: Any,
) -> Running:
    """A job of these layers with its first ``running`` frames running on a host of 16 cores."""
    with view.farm() as farm:
        host = farm.host(cores=16, memory_gb=64, gpus=4, gpu_memory_gb=8)
        ids = farm.job(layers or (LayerSpec(frames=2),), **job)
        frames = ids.frames[:running]
        procs = farm.run(frames, host, cores=cores, memory_gb=memory_gb, gpus=gpus, gpu_memory_gb=gpus)
    return Running(ids, host, frames, tuple(procs))
