"""What happens between the commit of a plan and its launch: stores that go away, and pauses."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from redis.exceptions import ConnectionError
from sqlalchemy import event, text

from opencue_sched.coordination.permits import FramePermits
from opencue_sched.dispatch.commit import CommitQueue
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.embedded.rqds.simulated_rqd import SimulatedFarm, host_specs
from opencue_sched.insight.audit import run_audit
from opencue_sched.settings import Rqd
from tests.kit.passes import passes
from tests.kit.polling import MOST_SECONDS

FRAMES = 6


@pytest.fixture
def farm():
    with SimulatedFarm(host_specs(1, cores=8)) as found:
        yield found


@pytest.fixture
def one(engine, settings, farm):
    rqd = Rqd(addresses=farm.addresses, timeout=5.0)
    with passes(engine, settings.model_copy(update={"rqd": rqd})) as found:
        yield found


@pytest.fixture
def show(engine, farm):
    """A show with as many frames as its burst has cores."""
    with engine.begin() as connection:
        planted = Farm(connection)
        show = planted.show()
        planted.subscription(show, planted.default_alloc(), size=FRAMES)
        planted.host(name=farm.specs[0].name, cores=8, hostname_tag=False)
        planted.job([LayerSpec(frames=FRAMES)], show=show, os=None)
        return show, planted.default_alloc()


def run_pass(one, **changes):
    (cluster,) = [cluster for cluster, _ in one.sweeper.sweep().send]
    return replace(one.runner, **changes).run([cluster], alive=lambda: True)[0]


def states(engine):
    with engine.connect() as connection:
        return dict(connection.execute(text("SELECT str_state, count(*) FROM frame GROUP BY str_state")).all())


def test_a_pause_while_the_commit_is_answered_counts_against_the_launch(one, engine, farm, show):
    """Whoever was stopped there may find its frames given to others: it sends nothing and takes its procs back."""
    paused = 0.0

    def pause(connection):
        nonlocal paused
        if connection.exec_driver_sql("SELECT count(*) FROM proc").scalar():
            paused = 60.0

    event.listen(engine, "commit", pause)
    try:
        report = run_pass(one, clock=lambda: time.monotonic() + paused)
    finally:
        event.remove(engine, "commit", pause)
    assert (report.frames_booked, report.frames_launched) == (FRAMES, 0)
    assert farm.runs() == []
    assert states(engine) == {"WAITING": FRAMES}
    assert not run_audit(engine, one.client, one.settings).failed


def test_permits_that_cannot_be_given_back_do_not_undo_what_a_pass_says_of_itself(one, engine, farm, show):
    # given a Redis that answers to no permit that is given back
    class NoAnswer(FramePermits):
        def drop(self, frames, owner):
            raise ConnectionError("gone")

    # when a pass loses one of its frames
    def lose_one(_reports):
        with engine.begin() as connection:
            connection.execute(text("UPDATE frame SET int_version = int_version + 1 WHERE int_number = 1"))

    (cluster,) = [cluster for cluster, _ in one.sweeper.sweep().send]
    fill_plans_with(FRAMES - 1, one, cluster)
    runner = replace(one.runner, permits=NoAnswer(one.client, "cue"))
    (report,) = runner.run([cluster], alive=lambda: True, end=lose_one)

    # then the others run
    assert (report.frames_booked, report.frames_launched) == (FRAMES - 2, FRAMES - 2)
    assert report.losses == {"frame_lost": 1}


def test_other_passes_over_the_clusters_may_begin_while_rqds_take_their_time(one, engine, farm, show):
    # given an RQD that answers only when the claims have ended
    host = farm.specs[0].name
    farm.freeze(host)

    def end(reports):
        if reports[0].frames_booked:
            farm.thaw(host)

    # when a pass books and launches there
    (cluster,) = [cluster for cluster, _ in one.sweeper.sweep().send]
    (report,) = one.runner.run([cluster], alive=lambda: True, end=end)

    # then it ended the claims with what it booked, and launched that
    assert (report.frames_booked, report.frames_launched) == (FRAMES, FRAMES)


def fill_plans_with(frames, one, cluster):
    """The next plan is full with so many frames: the commit of one with twice as many took too long."""
    one.runner.plan_sizes.cancelled(cluster.shard, 2 * frames)


class WatchedQueue(CommitQueue):
    """Tells that a second commit has asked for its turn."""

    def __init__(self):
        super().__init__()
        self.asked, self._first = threading.Event(), True

    def on(self, ids, *, wait_seconds):
        if not self._first:
            self.asked.set()
        self._first = False
        return super().on(ids, wait_seconds=wait_seconds)


def test_the_next_pass_begins_during_the_commit_of_a_full_plan_and_leaves_its_frames_alone(one, engine, farm, show):
    # given a second layer behind the one that fills a plan
    show, _ = show
    with engine.begin() as connection:
        connection.execute(text("UPDATE subscription SET int_burst = 100 * :cores"), {"cores": FRAMES + 2})
        planted = Farm(connection)
        other = planted.job([LayerSpec(frames=2)], show=show, os=None, priority=1).id
    (cluster,) = [cluster for cluster, _ in one.sweeper.sweep().send]
    nothing_committed = {"WAITING": FRAMES + 2}
    next_passes = ThreadPoolExecutor(1)
    between = []

    def end(reports):
        assert states(engine) == nothing_committed
        between.append((reports[0].go_on, next_passes.submit(one.run, [cluster])))

    # when a pass ends its claims before its commit, and another one begins in between
    fill_plans_with(FRAMES, one, cluster)
    with next_passes:
        (report,) = one.runner.run([cluster], alive=lambda: True, end=end)

    # then that one has booked what the first had not, and neither lost anything
    ((goes_on, next_pass),) = between
    (next_report,) = next_pass.result()
    assert (goes_on, next_report.frames_booked, next_report.losses) == (True, 2, {})
    assert (report.frames_booked, report.losses) == (FRAMES, {})
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM proc WHERE pk_job = :job"), {"job": other}).scalar() == 2
    assert not run_audit(engine, one.client, one.settings).failed


def test_no_pass_begins_while_a_full_plan_waits_for_another_commit(one, engine, farm, show):
    # given a commit of this process that has the host
    (cluster,) = [cluster for cluster, _ in one.sweeper.sweep().send]
    with engine.connect() as connection:
        host_id = connection.execute(text("SELECT pk_host FROM host")).scalar()
    queue, ended, passes_under_way = WatchedQueue(), threading.Event(), ThreadPoolExecutor(1)
    fill_plans_with(FRAMES - 1, one, cluster)
    with passes_under_way:
        with queue.on({host_id}, wait_seconds=0):
            # when a plan for the host is full
            runner = replace(one.runner, queue=queue)
            under_way = passes_under_way.submit(runner.run, [cluster], alive=lambda: True, end=lambda _: ended.set())
            assert queue.asked.wait(MOST_SECONDS)
            # then other passes begin only when its turn has come
            assert not ended.is_set()
        assert ended.wait(MOST_SECONDS)
    (report,) = under_way.result()
    assert (report.frames_booked, report.losses) == (FRAMES - 1, {})


def test_hosts_of_what_such_a_commit_loses_are_told_of_as_free(one, engine, farm, show):
    # given frames that somebody takes between the end of the claims and the commit
    def end(_reports):
        with engine.begin() as connection:
            connection.execute(text("UPDATE frame SET int_version = int_version + 1"))

    # when the commit finds that
    freed = []
    (cluster,) = [cluster for cluster, _ in one.sweeper.sweep().send]
    fill_plans_with(FRAMES - 1, one, cluster)
    runner = replace(one.runner, freed=freed.append)
    (report,) = runner.run([cluster], alive=lambda: True, end=end)

    # then its clusters, which may sleep by now, hear of the host again
    assert report.losses == {"frame_lost": FRAMES - 1}
    with engine.connect() as connection:
        assert freed == [set(connection.execute(text("SELECT pk_host FROM host")).scalars())]
