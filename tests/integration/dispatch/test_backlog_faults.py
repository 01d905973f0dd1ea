"""What becomes of passes when notices of changed work are lost: nothing is booked wrongly, and all of it in the end."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.accounting import keys
from opencue_sched.accounting.show_handover import hand_back
from opencue_sched.dispatch.backlog_feed import RESYNC_SECONDS, WHOLE_ROUND_SECONDS
from opencue_sched.dispatch.cooldown import Cooldowns
from opencue_sched.dispatch.report import PassReport
from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobIds, LayerSpec, ShowIds
from opencue_sched.settings import Rqd, Settings
from opencue_sched.store.schema import downgrade, upgrade
from tests.kit.frozen_clock import Clock
from tests.kit.passes import Passes, passes
from tests.kit.plans import KB_PER_GB
from tests.kit.polling import eventually

CORES = 4
"""Of the only host."""


@dataclass
class Deaf:
    """A process that hears no notice, on a farm with one host."""

    passes: Passes
    clock: Clock
    cluster: Cluster
    show: ShowIds
    jobs: int = 0

    def job(self, *, frames: int = CORES, priority: int = 1, **layer: object) -> JobIds:
        self.jobs += 1
        with self.passes.engine.begin() as connection:
            layers = [LayerSpec(frames=frames, **layer)]
            return Farm(connection).job(layers, name=f"job{self.jobs}", show=self.show, priority=priority, os=None)

    def execute(self, sql: str, **parameters: object) -> None:
        with self.passes.engine.begin() as connection:
            connection.execute(text(sql), parameters)

    def lists(self) -> None:
        """Read all that waits, as it does when it starts."""
        self.passes.runner.backlog.follow()

    def run(self) -> PassReport:
        return self.passes.runner.run([self.cluster], alive=lambda: True)[0]

    def resyncs(self) -> None:
        """Make the round of the resync that is due by now."""
        self.clock.now += RESYNC_SECONDS
        self.passes.runner.backlog.resync()

    def everything_ends(self) -> None:
        """Whatever runs is taken off its host, and the process reads its hosts again."""
        self.execute("DELETE FROM proc")
        self.execute("UPDATE host SET int_cores_idle = int_cores, int_mem_idle = int_mem")
        self.passes.runner.hosts.missed()

    def is_overtaken(self) -> tuple[JobIds, set[str]]:
        """Run the first frames of a layer, and keep the next ones in memory while another process books these. All that
        ran has ended; returns the job and what the other process booked."""
        job = self.job(frames=5 * CORES)
        assert self.run().frames_booked == CORES
        self.everything_ends()
        with passes(self.passes.engine, self.passes.settings, "other", named=True) as other:
            assert other.run([self.cluster])[0].frames_booked == CORES
        booked = self.ids("SELECT pk_frame FROM proc")
        self.everything_ends()
        return job, booked

    def ids(self, query: str) -> set[str]:
        with self.passes.engine.connect() as connection:
            return set(connection.execute(text(query)).scalars())

    def booked(self, job: JobIds) -> int:
        with self.passes.engine.connect() as connection:
            query = text("SELECT count(*) FROM proc WHERE pk_job = :job")
            return int(connection.execute(query, {"job": job.id}).scalar() or 0)


@pytest.fixture
def deaf(engine: Engine, settings: Settings) -> Iterator[Deaf]:
    clock = Clock()
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=CORES, memory_gb=64)
        show = farm.default_show()
        cluster = Cluster(farm.facility(), show.id, ClusterKind.ALLOC, ("general",))
    dry = settings.model_copy(update={"rqd": Rqd(dry_run_mode=True)})
    with passes(engine, dry, named=True, clock=clock) as here:
        yield Deaf(here, clock, cluster, show)


def test_a_licence_that_a_layer_got_is_not_passed(deaf: Deaf) -> None:
    job = deaf.job()
    deaf.lists()
    with deaf.passes.engine.begin() as connection:
        limit_id = Farm(connection).limit("nuke", 1)
    deaf.execute(
        "INSERT INTO layer_limit (pk_layer_limit, pk_layer, pk_limit_record) VALUES (:id, :layer, :limit)",
        id=uuid.uuid4().hex,
        layer=job.layers[0].id,
        limit=limit_id,
    )

    # when it is planned as it was read, then nothing of it is booked, and what it stands under is known to the next
    assert deaf.run().losses["layer_changed"] == CORES
    assert deaf.booked(job) == 0
    deaf.clock.now += RESYNC_SECONDS
    deaf.run()
    assert deaf.booked(job) == 1


def test_the_cap_of_a_folder_that_a_job_was_moved_to_is_not_passed(deaf: Deaf) -> None:
    job = deaf.job()
    deaf.lists()
    with deaf.passes.engine.begin() as connection:
        folder_id = Farm(connection).folder(deaf.show, "tight", max_cores=1)
    deaf.execute("UPDATE job SET pk_folder = :folder", folder=folder_id)

    assert deaf.run().losses["layer_changed"] == CORES
    assert deaf.booked(job) == 0
    deaf.resyncs()
    deaf.run()
    assert deaf.booked(job) == 1


def test_nothing_starts_with_less_memory_than_it_asks_for_now(deaf: Deaf) -> None:
    job = deaf.job(frames=1, memory_gb=1)
    deaf.lists()
    deaf.execute("UPDATE layer SET int_mem_min = :memory", memory=8 * KB_PER_GB)

    assert deaf.run().losses["layer_changed"] == 1
    deaf.run()

    assert deaf.booked(job) == 1
    with deaf.passes.engine.connect() as connection:
        assert connection.execute(text("SELECT int_mem_reserved FROM proc")).scalar_one() == 8 * KB_PER_GB


@pytest.mark.parametrize(
    "change",
    [
        pytest.param("UPDATE job SET b_paused = true", id="job paused"),
        pytest.param("UPDATE job SET str_state = 'FINISHED'", id="job killed"),
        pytest.param("UPDATE show SET b_scheduler_managed = false", id="show handed back"),
        pytest.param("UPDATE show SET b_booking_enabled = false", id="show switched off"),
    ],
)
def test_what_may_not_run_any_more_starts_nothing(deaf: Deaf, change: str) -> None:
    job = deaf.job()
    deaf.lists()
    deaf.execute(change)

    assert deaf.run().losses["frame_lost"] == CORES
    for _ in range(2):
        deaf.resyncs()
        deaf.run()
    assert deaf.booked(job) == 0


def test_work_that_nobody_named_is_found_by_the_resync(deaf: Deaf) -> None:
    deaf.lists()
    job = deaf.job()
    deaf.run()
    assert deaf.booked(job) == 0

    deaf.resyncs()
    deaf.run()
    assert deaf.booked(job) == CORES


def test_a_priority_that_nobody_named_is_found_by_the_resync(deaf: Deaf) -> None:
    first, second = deaf.job(priority=9), deaf.job(priority=5)
    deaf.lists()
    deaf.execute("UPDATE job_resource SET int_priority = 99 WHERE pk_job = :job", job=second.id)

    deaf.resyncs()
    deaf.run()
    assert (deaf.booked(first), deaf.booked(second)) == (0, CORES)


def test_frames_that_somebody_keeps_locked_hold_no_host_from_others(deaf: Deaf) -> None:
    locked, other = deaf.job(priority=9), deaf.job(priority=1, frames=5 * CORES)
    deaf.lists()
    with deaf.passes.engine.connect() as somebody, somebody.begin():
        somebody.execute(text("SELECT FROM frame WHERE pk_job = :job FOR UPDATE"), {"job": locked.id})
        for _ in range(5):
            eventually(lambda: deaf.run().frames_booked, what="a booking beside the locked frames")
            assert (deaf.booked(locked), deaf.booked(other)) == (0, CORES)
            deaf.everything_ends()

    # when they are locked no longer
    eventually(lambda: deaf.run().frames_booked, what="a booking of the frames that were locked")
    assert deaf.booked(locked) == CORES


@pytest.mark.parametrize(("locked", "at_fault"), [("host", False), ("frame", True)])
def test_a_layer_is_at_fault_for_its_own_rows_and_not_for_those_of_hosts(
    deaf: Deaf, locked: str, at_fault: bool
) -> None:
    # given a layer, and rows of it or of its host that somebody keeps locked
    layer = deaf.job().layers[0].id
    deaf.lists()
    runner = replace(deaf.passes.runner, lost=Cooldowns[str](1.0, 1.0, Clock(), free=1))
    with deaf.passes.engine.connect() as somebody, somebody.begin():
        somebody.execute(text(f"SELECT FROM {locked} FOR UPDATE"))

        # when all its frames are lost twice
        reports = [runner.run([deaf.cluster], alive=lambda: True)[0] for _ in range(2)]

    # then it has a cooldown only where its own rows were the reason
    assert [sum(report.losses.values()) for report in reports] == [CORES, CORES]
    assert (layer in runner.lost.active()) is at_fault


def test_work_goes_on_when_our_tables_were_taken_back_and_are_there_again(deaf: Deaf, settings: Settings) -> None:
    # given a process that knows what waits, on a Cuebot's database
    job = deaf.job()
    deaf.lists()
    deaf.execute("UPDATE opencue_sched_origin SET origin = 'cuebot'")

    # when `migrate --down` is called, as before a migration of Cuebot's, then nothing is booked
    downgrade(settings.sqlalchemy_url)
    with pytest.raises(SQLAlchemyError):
        deaf.run()
    assert deaf.booked(job) == 0
    assert list(deaf.passes.runner.ledger.records()) == []

    # and when `migrate` has made them again, all of it
    upgrade(settings.sqlalchemy_url)
    eventually(lambda: deaf.run().frames_booked, what="a booking")
    assert deaf.booked(job) == CORES


def test_a_show_handed_back_in_the_middle_of_a_plan_starts_nothing(deaf: Deaf) -> None:
    job = deaf.job()
    deaf.lists()
    ledger = deaf.passes.runner.ledger

    def alive() -> bool:
        """Asked before the permits are taken, and after that again."""
        hand_back(deaf.passes.engine, ledger, deaf.show.id, wait_seconds=0, age_seconds=0)
        return True

    report = deaf.passes.runner.run([deaf.cluster], alive=alive)[0]

    assert (report.frames_booked, deaf.booked(job)) == (0, 0)
    assert list(ledger.records()) == []


class StoppedError(Exception):
    """Whatever a pass may end with."""


def test_what_a_pass_took_is_free_again_wherever_it_fails(deaf: Deaf) -> None:
    for step in count(1):
        # given a farm that is idle, and a pass that fails after so many of its steps
        job = deaf.job(frames=CORES)
        deaf.passes.runner.backlog.note(jobs=[job.id])
        steps = iter(range(step))

        def fails(steps: Iterator[int] = steps) -> None:
            if next(steps, None) is None:
                raise StoppedError

        with suppress(StoppedError):
            deaf.passes.runner.run([deaf.cluster], alive=lambda: True, progress=fails)
            break

        # then the next one books all that this one did not commit, and only of what is booked there are permits
        deaf.run()
        assert deaf.booked(job) == CORES, f"after {step} steps"
        left = {key.split(":")[2] for key in deaf.passes.client.scan_iter("cue:permit:*")}
        assert left <= deaf.ids("SELECT pk_frame FROM frame WHERE str_state = 'RUNNING'")
        deaf.everything_ends()
    assert step > 5


def test_a_process_that_stood_still_for_a_minute_books_nothing_twice(deaf: Deaf) -> None:
    # given a process that stood still with frames in its memory, while another one booked these
    job, booked = deaf.is_overtaken()
    deaf.clock.now += 60

    # then what it plans when it goes on is what waits still
    for _ in range(2):
        deaf.run()
    assert deaf.booked(job) == CORES
    assert booked.isdisjoint(deaf.ids("SELECT pk_frame FROM proc"))
    assert len(deaf.ids("SELECT pk_frame FROM frame WHERE str_state = 'RUNNING'")) == 3 * CORES


def test_a_permit_lives_for_as_long_as_others_may_plan_what_they_read_before_the_commit(
    deaf: Deaf,
) -> None:
    # given a process that has frames in its memory which another one has booked meanwhile
    job, _ = deaf.is_overtaken()
    client = deaf.passes.client
    permits = list(client.scan_iter("cue:permit:*"))
    deadline = deaf.passes.settings.accounting.commit_deadline
    assert min(map(client.pttl, permits)) > 1000 * deadline / 2

    # when they have run out, half as long after
    client.delete(*permits)
    deaf.clock.now += deadline / 2 + 1

    # then it plans others, and loses none
    report = deaf.run()
    assert (report.frames_booked, dict(report.losses)) == (CORES, {})
    assert deaf.booked(job) == CORES


def test_an_emptied_redis_lets_no_frame_be_booked_twice(deaf: Deaf) -> None:
    # given a process that has frames in its memory which another one has booked meanwhile, under permits
    job, booked = deaf.is_overtaken()

    # when the permits are gone, with all else but the counters' epoch
    client = deaf.passes.client
    epoch = client.get(keys.EPOCH)
    client.flushdb()
    client.set(keys.EPOCH, str(epoch))

    # then the commit decides, and other frames are planned
    assert deaf.run().losses["frame_lost"] == CORES
    deaf.run()
    assert deaf.booked(job) == CORES
    assert booked.isdisjoint(deaf.ids("SELECT pk_frame FROM proc"))


def test_what_a_worker_missed_of_the_part_of_others_is_found_by_itself(engine: Engine, settings: Settings) -> None:
    # given a worker to whose part of the layers none belongs, and that hears no notice
    clock = Clock()
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=CORES, memory_gb=64)
        show = farm.default_show()
        cluster = Cluster(farm.facility(), show.id, ClusterKind.ALLOC, ("general",))
    dry = settings.model_copy(update={"rqd": Rqd(dry_run_mode=True)})
    with passes(engine, dry, named=True, own=frozenset(), clock=clock) as here:
        deaf = Deaf(here, clock, cluster, show)
        deaf.lists()
        job = deaf.job()
        deaf.resyncs()
        deaf.run()
        assert deaf.booked(job) == 0

        # when it knows that it has missed something, or a minute has passed, then it has all of it
        here.runner.backlog.missed()
        deaf.resyncs()
        deaf.run()
        assert deaf.booked(job) == CORES
        other = deaf.job(priority=9)
        deaf.execute("DELETE FROM proc")
        clock.now += WHOLE_ROUND_SECONDS
        deaf.resyncs()
        assert other.layers[0].id in here.runner.backlog.backlog.versions()
