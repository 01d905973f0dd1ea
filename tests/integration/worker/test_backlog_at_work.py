"""What people change of waiting work, as a worker that hears of it and books by its backlog follows it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, cycle

import pytest
import redis
from celery import Celery
from sqlalchemy import Engine, text

from opencue_sched.accounting.epoch import Epoch
from opencue_sched.accounting.imported_shows import note_imported
from opencue_sched.coordination.change_log import HostChanges
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobIds, JobSpec, LayerSpec, ShowIds
from opencue_sched.placement.backlog import MOST_FRAMES_OF_A_PORTION
from opencue_sched.reports.run_ends import CompletedFrame
from opencue_sched.settings import Rqd, Settings
from opencue_sched.store.accounting import managed_show_versions
from opencue_sched.worker.process import Process
from tasks import dispatch
from tests.kit.listening import eventually_listen
from tests.kit.polling import eventually
from tests.kit.runs import complete_frame
from tests.kit.tasks import run_task

FIRST_CORES, CORES = 240, 20
"""Of the farm that the worker fills first, and of what of that goes on ending."""
FAILED = 1


@dataclass
class AtWork:
    """A worker that listens, and a show on one host."""

    process: Process
    engine: Engine
    show: ShowIds

    def jobs(self, *jobs: JobSpec) -> list[JobIds]:
        with self.engine.begin() as connection:
            return Farm(connection).jobs(jobs)

    def execute(self, sql: str, **parameters: object) -> None:
        with self.engine.begin() as connection:
            connection.execute(text(sql), parameters)

    def passes(self) -> None:
        """A pass over each cluster of the show."""
        self.process.sweep(wake_shows=[self.show.id])
        for posting in self.process.postings.posted().values():
            run_task(dispatch.dispatch_cluster, self.process, posting)

    def running(self) -> dict[str, CompletedFrame]:
        """For each frame that runs what its host says when it has ended well."""
        query = text("SELECT pk_frame, pk_proc, str_name FROM proc JOIN host USING (pk_host) ORDER BY pk_proc")
        with self.engine.connect() as connection:
            rows = connection.execute(query).all()
        return {row.pk_frame: CompletedFrame(row.pk_proc, row.pk_frame, row.str_name, 0) for row in rows}

    def books(self, frames: int) -> None:
        """Pass after pass until so many frames run."""

        def enough() -> bool:
            self.passes()
            return len(self.running()) >= frames

        eventually(enough, 20, f"{frames} frames that run")

    def ends(self, *completed: CompletedFrame) -> None:
        changes = HostChanges(self.process.client, "cue")
        for run in completed:
            complete_frame(self.engine, run, ledger=self.process.ledger, changes=changes)


@pytest.fixture
def at_work(settings: Settings, engine: Engine, redis_client: redis.Redis) -> Iterator[AtWork]:
    redis_client.set("acct:epoch", Epoch.new(redis_client.info("server")["run_id"]).text)
    with engine.begin() as connection:
        farm = Farm(connection)
        show, alloc = farm.show("demo"), farm.default_alloc()
        farm.subscription(show, alloc, size=1_000)
        farm.host(cores=FIRST_CORES, memory_gb=4 * FIRST_CORES, hostname_tag=False)
        note_imported(redis_client, managed_show_versions(connection))
    app = Celery("at-work", broker="memory://", set_as_current=False)
    process = Process(settings.model_copy(update={"rqd": Rqd(dry_run_mode=True)}), app)
    process.listen()
    eventually_listen(engine)
    yield AtWork(process, engine, show)
    process.close()
    app.close()


def test_a_retried_frame_of_a_long_layer_is_among_the_next_that_are_started(at_work: AtWork) -> None:
    # given a farm full of frames of a layer of which 10,000 wait
    at_work.jobs(JobSpec([LayerSpec(frames=10_000 + FIRST_CORES)], show=at_work.show, os=None))
    at_work.books(FIRST_CORES)
    failed, *others = list(at_work.running().values())[:CORES]

    # when one fails and waits again, while others end all the time
    at_work.ends(replace(failed, exit_status=FAILED))
    started = 0
    while True:
        before = at_work.running()
        at_work.ends(*others)
        at_work.books(FIRST_CORES)
        others = [run for frame_id, run in at_work.running().items() if frame_id not in before]
        if failed.frame_id in at_work.running():
            break
        started += len(others)
        # then it is among the next of the layer
        assert started <= MOST_FRAMES_OF_A_PORTION


def test_a_job_that_is_lowered_has_its_new_place_when_that_is_heard(at_work: AtWork) -> None:
    # given a farm full of frames of the first of two jobs
    first, second = at_work.jobs(
        *(JobSpec([LayerSpec(frames=2_000)], show=at_work.show, priority=100, os=None) for _ in range(2))
    )
    at_work.books(FIRST_CORES)
    steps = count(start=99, step=-1)

    def goes_to(job: JobIds) -> bool:
        """Whether what is freed is the job's alone."""
        before = at_work.running()
        at_work.ends(next(iter(before.values())))
        at_work.books(FIRST_CORES)
        return at_work.running().keys() - before <= set(job.frames)

    def heard(lower: JobIds, other: JobIds) -> bool:
        """Whether what is freed goes to the other job before all that waits is listed anew, as it is every 10 s."""
        began = time.monotonic()
        at_work.execute(
            "UPDATE job_resource SET int_priority = :new WHERE pk_job = :job", new=next(steps), job=lower.id
        )
        eventually(lambda: goes_to(other), what="frames of the job that comes first")
        return at_work.process.backlog.age_seconds() > time.monotonic() - began

    # when one is lowered below the other, and that one below it again, then the worker knows by what it hears
    turns = cycle(((first, second), (second, first)))
    for _ in range(3):
        eventually(lambda: heard(*next(turns)), what="a change that no listing found")
