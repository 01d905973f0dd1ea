"""What people change of waiting work, as a worker that hears of it and books by its backlog follows it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import pytest
import redis
from celery import Celery
from sqlalchemy import Engine, text

from opencue_sched.accounting import keys
from opencue_sched.accounting.epoch import Epoch
from opencue_sched.accounting.imported_shows import note_imported
from opencue_sched.coordination.change_log import HostChanges
from opencue_sched.domain.units import CENTICORES_PER_CORE
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobIds, JobSpec, LayerSpec, ShowIds
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
NEXT_FRAMES = 200
"""A frame that is retried is among so many of its layer that are started next."""


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

    def knows_cap(self, job: JobIds, cores: int) -> bool:
        """Whether the counters have this cap for the job."""
        key = keys.job(job.id)
        return self.process.ledger.caps([key])[key].max_cores == cores

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
    by_rank = settings.queue.model_copy(update={"priority_draw": 0.0, "layer_host_share": False})
    process = Process(settings.model_copy(update={"rqd": Rqd(dry_run_mode=True), "queue": by_rank}), app)
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
        assert started <= NEXT_FRAMES


def test_a_job_that_is_lowered_has_its_new_place_with_the_first_pass_after_that_is_heard(at_work: AtWork) -> None:
    # given a farm full of frames of the first of two jobs
    first, second = at_work.jobs(
        *(JobSpec([LayerSpec(frames=2_000)], show=at_work.show, priority=100, os=None) for _ in range(2))
    )
    at_work.books(FIRST_CORES)

    for priority, lowered, other in ((99, first, second), (98, second, first), (97, first, second)):
        # when one is lowered below the other, and the worker has heard of it, of which its new cap tells
        at_work.execute(
            "UPDATE job_resource SET int_priority = :new, int_max_cores = :cap WHERE pk_job = :job",
            new=priority,
            cap=CENTICORES_PER_CORE * (1_000 + priority),
            job=lowered.id,
        )
        eventually(partial(at_work.knows_cap, lowered, 1_000 + priority), 20, "a cap that was heard of")

        # then whatever comes free from now on is the other's
        before = at_work.running()
        at_work.ends(*list(before.values())[:CORES])
        at_work.books(FIRST_CORES)
        started = at_work.running().keys() - before.keys()
        assert len(started) == CORES
        assert started <= set(other.frames)
