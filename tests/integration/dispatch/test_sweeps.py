"""What a sweep changes: under a leader's fence, after a failure, and for clusters that are no more."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from sqlalchemy import Engine, text

from opencue_sched.clients.lua_scripts import Fence
from opencue_sched.clients.postgres import ask, make_engine
from opencue_sched.dispatch.sweep import NAP_SECONDS, Sweeper, SweepReport
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.errors import FencedOff
from opencue_sched.settings import Rqd, Settings
from opencue_sched.store.pending import waiting_tags
from tests.kit.frozen_clock import Clock
from tests.kit.gathering import counted_statements
from tests.kit.passes import Passes, passes
from tests.kit.statements import failing_statements

FENCE_KEY = "cue:leader:beat:fence"


@pytest.fixture
def clock() -> Clock:
    """That of pauses and naps."""
    return Clock()


@pytest.fixture
def here(engine: Engine, settings: Settings, clock: Clock) -> Iterator[Passes]:
    with passes(engine, settings.model_copy(update={"rqd": Rqd(dry_run_mode=True)})) as runner:
        runner.sweeper = Sweeper(engine, runner.settings, runner.postings, clock=clock)
        yield runner


def plant(engine: Engine) -> None:
    """Work for one cluster."""
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=2, hostname_tag=False)
        farm.job([LayerSpec(frames=1)])


def contents(here: Passes) -> dict[str, int]:
    parts = ("ready", "delayed", "claimed", "trash", "names", "seq", "events")
    return {part: here.client.exists(f"cue:board:clusters:{part}") for part in parts}


def put_to_rest(here: Passes, report: SweepReport, seconds: float = 600) -> None:
    postings = here.postings
    for _, enqueued in report.send:
        claim = postings.claim(enqueued.uuid, "somebody", ttl_seconds=10)
        assert claim is not None
        postings.end(claim, "sleep", delay_seconds=seconds)


def test_a_sweep_of_a_former_leader_posts_nothing_and_one_of_the_present_leader_does(
    here: Passes, engine: Engine
) -> None:
    plant(engine)
    here.client.set(FENCE_KEY, 6)
    before = contents(here)
    with pytest.raises(FencedOff, match=r"\b5\b.*\b6\b"):
        here.sweeper.sweep(fence=Fence(FENCE_KEY, 5))
    assert contents(here) == before
    assert len(here.sweeper.sweep(fence=Fence(FENCE_KEY, 6)).send) == 1
    # nor does one that has nothing to rouse
    here.client.set(FENCE_KEY, 7)
    with pytest.raises(FencedOff, match=r"\b6\b.*\b7\b"):
        here.sweeper.sweep(fence=Fence(FENCE_KEY, 6))


def test_new_work_rouses_a_cluster_that_rests_for_being_empty(here: Passes, engine: Engine) -> None:
    # given a cluster that rests, is seen without work, and gets some
    plant(engine)
    put_to_rest(here, here.sweeper.sweep())
    _set_waiting(engine, "DEPEND")
    assert here.sweeper.sweep().send == ()
    _set_waiting(engine, "WAITING")

    # then the next sweep sends for it, and the one after does not again
    assert len(here.sweeper.sweep().send) == 1
    assert here.sweeper.sweep().send == ()


def test_clusters_that_a_reload_keeps_go_on_resting_and_one_that_is_new_is_sent_for(
    here: Passes, engine: Engine
) -> None:
    # given a cluster that rests, and a show with work that is not managed yet
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=2, hostname_tag=False)
        farm.job([LayerSpec(frames=1)])
        other = farm.show(managed=False)
        farm.subscription(other, farm.default_alloc())
        farm.job([LayerSpec(frames=1)], show=other)
    put_to_rest(here, here.sweeper.sweep())
    assert here.sweeper.sweep().send == ()

    # when that show is handed over
    with engine.begin() as connection:
        connection.execute(text("UPDATE show SET b_scheduler_managed = true"))
    here.sweeper.reload()

    # then its cluster alone is sent for
    assert [cluster.show_id for cluster, _ in here.sweeper.sweep().send] == [other.id]


def test_the_clusters_are_read_at_their_interval_and_at_once_for_a_show_nobody_knew(
    here: Passes, engine: Engine, clock: Clock
) -> None:
    plant(engine)
    readings: list[float] = []
    queue = here.settings.queue.model_copy(update={"cluster_reload_interval": 8, "active_scan_interval": 3})
    settings = here.settings.model_copy(update={"queue": queue})
    sweeper = Sweeper(engine, settings, here.postings, on_reading=lambda: readings.append(clock()), clock=clock)

    def next_reading(wake_shows: Collection[str] = ()) -> float:
        """Seconds from one reading of the clusters to the next, with a sweep each second."""
        known = len(readings)
        while len(readings) == known:
            clock.advance(1)
            sweeper.sweep(wake_shows=wake_shows)
        return readings[-1] - readings[-2]

    sweeper.sweep()
    assert next_reading() == 8
    known = len(readings)
    sweeper.sweep(wake_shows=["a show nobody knew"])
    assert len(readings) == known + 1
    assert next_reading(wake_shows=["the next of such"]) == 3
    assert next_reading() == 8


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "found by a scan"])
@pytest.mark.parametrize("spelled", ["new", "Ne W"])
def test_a_tag_that_a_host_got_makes_its_cluster_with_the_next_sweep(
    here: Passes, engine: Engine, clock: Clock, spelled: str, announced: bool
) -> None:
    # given work for a tag that no host has, on a farm whose clusters were read a moment ago
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=2, hostname_tag=False)
        farm.job([LayerSpec(), LayerSpec(tags="new")])
    assert [cluster.tags for cluster, _ in here.sweeper.sweep().send] == [("general",)]

    # when a host comes that has it
    with engine.begin() as connection:
        host = Farm(connection).host(name="new", tags=[spelled], hostname_tag=False)

    # then its cluster is sent for; what is not announced is asked for once an active_scan_interval
    if not announced:
        clock.advance(here.settings.queue.active_scan_interval)
    report = here.sweeper.sweep(wake_hosts=[host.id] if announced else [])
    assert ("new",) in [cluster.tags for cluster, _ in report.send]


def test_work_that_no_cluster_could_reach_has_the_clusters_read_no_more_often(
    here: Passes, engine: Engine, clock: Clock
) -> None:
    # given work for a tag on a host of an allocation without a subscription of its show, and for one on no host
    with engine.begin() as connection:
        farm = Farm(connection)
        host = farm.host(name="new", alloc=farm.alloc("elsewhere"), tags=["new"], hostname_tag=False)
        farm.job([LayerSpec(tags="new"), LayerSpec(tags="nowhere")])
    asked: list[int] = []
    for _ in range(3):
        with counted_statements(here.engine) as statements:
            here.sweeper.sweep(wake_hosts=[host.id])
            clock.advance(here.settings.queue.active_scan_interval)
            here.sweeper.sweep()
        asked.append(len(statements))
    first, *later = asked
    assert first > max(later) == min(later)


def test_clusters_that_cannot_be_read_are_read_with_the_next_sweep(here: Passes, engine: Engine) -> None:
    plant(engine)
    with failing_statements(here.engine, RedisConnectionError("gone")), pytest.raises(RedisConnectionError):
        here.sweeper.sweep()
    assert len(here.sweeper.sweep().send) == 1


def test_a_process_of_one_connection_sweeps_by_what_it_knows(here: Passes, engine: Engine) -> None:
    # given a process that reads PostgreSQL to say where work waits, and has one connection
    plant(engine)
    alone = make_engine(here.settings, pool_size=1)
    sweeper = Sweeper(alone, here.settings, here.postings, waiting=lambda: ask(alone, waiting_tags, None))
    # then its sweeps find the work, with and without a freed host
    assert [sweeper.sweep(wake_hosts=hosts).active for hosts in ([], hosts_of(engine))] == [1, 1]
    alone.dispose()


def test_a_sweep_for_freed_hosts_plans_anew_what_somebody_has_discarded(
    here: Passes, engine: Engine, clock: Clock
) -> None:
    # given a sweep that has had its question of hosts planned, and a pool that gives its session to another
    plant(engine)
    alone = make_engine(here.settings, pool_size=1)
    sweeper = Sweeper(alone, here.settings, here.postings, clock=clock)
    put_to_rest(here, sweeper.sweep(wake_hosts=hosts_of(engine)))
    with alone.connect() as connection:
        connection.execute(text("DEALLOCATE ALL"))
    clock.advance(1)
    # when hosts come free, then their cluster is woken
    assert len(sweeper.sweep(wake_hosts=hosts_of(engine)).send) == 1
    alone.dispose()


def hosts_of(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT pk_host FROM host")).scalars())


def scans(*reports: SweepReport) -> int:
    """How many of the sweeps have asked PostgreSQL where work waits."""
    return sum(report.scan_seconds is not None for report in reports)


def test_while_every_cluster_rests_periodic_sweeps_do_without_a_scan(here: Passes, engine: Engine) -> None:
    # given work whose cluster is sent for, and so does not rest
    plant(engine)
    first, second = (here.sweeper.sweep(may_nap=True) for _ in range(2))
    assert scans(first, second) == 2

    # when it rests, then one scan says so and the next sweeps do without
    put_to_rest(here, first)
    naps = [here.sweeper.sweep(may_nap=True) for _ in range(4)]
    assert [nap.sleeping for nap in naps] == [1, 1, 1, 1]
    assert scans(*naps) == 1

    # but one that was asked for scans, and so does one after the clusters were read
    assert scans(here.sweeper.sweep(wake_hosts=["nobody"])) == 1
    here.sweeper.reload()
    assert scans(here.sweeper.sweep(may_nap=True)) == 1


def test_sweeps_for_freed_hosts_share_a_scan_that_found_work_for_them_for_a_second(
    here: Passes, engine: Engine, clock: Clock
) -> None:
    plant(engine)
    with engine.connect() as connection:
        host = connection.execute(text("SELECT pk_host FROM host")).scalar_one()
    first = here.sweeper.sweep()
    put_to_rest(here, first)
    clock.advance(0.9)
    for_freed = here.sweeper.sweep(wake_hosts=[host])
    assert len(for_freed.send) == 1
    assert (scans(first), scans(for_freed)) == (1, 0)

    # but not one for new work, one for hosts for which it found none, or when it is too old
    assert scans(here.sweeper.sweep(wake_shows=["new"], wake_hosts=[host])) == 1
    clock.advance(0.1)
    assert scans(here.sweeper.sweep(wake_hosts=["nobody"])) == 1
    clock.advance(1.1)
    assert scans(here.sweeper.sweep(wake_hosts=[host])) == 1


def test_periodic_sweeps_scan_only_for_new_clusters_where_the_process_knows_what_waits(
    here: Passes, engine: Engine, clock: Clock
) -> None:
    # Given a sweeper of a process that knows where work waits, and a farm whose cluster does not sleep
    plant(engine)
    with engine.connect() as connection:
        waiting = waiting_tags(connection, None)
    sweeper = Sweeper(here.engine, here.settings, here.postings, waiting=lambda: waiting, clock=clock)
    # When periodic sweeps follow each other, then the first one scans, and each finds the work
    reports = [sweeper.sweep(may_nap=True) for _ in range(5)]
    assert [report.active for report in reports] == [1] * 5
    assert (scans(reports[0]), scans(*reports)) == (1, 1)
    # And so does one after the clusters were read anew
    sweeper.reload()
    assert scans(sweeper.sweep(may_nap=True)) == 1
    clock.advance(here.settings.queue.cluster_reload_interval - 1)
    assert scans(sweeper.sweep(may_nap=True)) == 0
    clock.advance(1)
    assert scans(sweeper.sweep(may_nap=True)) == 1


def test_a_rest_that_ends_in_a_nap_is_sent_for_and_ends_the_nap(here: Passes, engine: Engine) -> None:
    # given a farm that naps while the rest of its only cluster comes to its end
    plant(engine)
    report = here.sweeper.sweep()
    put_to_rest(here, report)
    assert here.sweeper.sweep(may_nap=True).sleeping == 1
    here.client.zincrby("cue:board:clusters:delayed", -600_000, report.send[0][1].uuid)

    # then it is sent for without a scan, and the sweep after scans
    nap = here.sweeper.sweep(may_nap=True)
    assert (len(nap.send), scans(nap)) == (1, 0)
    assert scans(here.sweeper.sweep(may_nap=True)) == 1


def test_a_nap_ends_by_itself(here: Passes, engine: Engine, clock: Clock) -> None:
    # given a farm whose clusters rest, and one with work nobody tells of
    plant(engine)
    put_to_rest(here, here.sweeper.sweep())
    _set_waiting(engine, "DEPEND")
    assert here.sweeper.sweep(may_nap=True).send == ()
    _set_waiting(engine, "WAITING")
    assert here.sweeper.sweep(may_nap=True).send == ()

    # then it is found after the nap
    clock.advance(NAP_SECONDS)
    assert len(here.sweeper.sweep(may_nap=True).send) == 1


@pytest.mark.parametrize("fence", [Fence(FENCE_KEY, 5), None], ids=["leader-succeeded", "redis-refuses-writes"])
def test_new_work_seen_by_a_sweep_that_failed_is_roused_by_the_next(
    here: Passes, engine: Engine, fence: Fence | None
) -> None:
    # given a cluster that ran out of work and rests
    plant(engine)
    put_to_rest(here, here.sweeper.sweep())
    _set_waiting(engine, "DEPEND")
    here.sweeper.sweep()
    _set_waiting(engine, "WAITING")

    # when the sweep that sees its new work cannot post
    here.client.set(FENCE_KEY, 6)
    here.client.config_set("min-replicas-to-write", 0 if fence else 1)
    try:
        with pytest.raises(FencedOff if fence else ResponseError):
            here.sweeper.sweep(fence=fence)
    finally:
        here.client.config_set("min-replicas-to-write", 0)

    # then the next one rouses it
    assert len(here.sweeper.sweep().send) == 1


def _set_waiting(engine: Engine, state: str) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE frame SET str_state = :state"), {"state": state})


def test_the_posting_of_a_cluster_that_is_no_more_goes_though_a_worker_held_it_at_first(
    here: Passes, engine: Engine
) -> None:
    # given a posting that is worked on while its show is handed back
    plant(engine)
    postings = here.postings
    ((_, enqueued),) = here.sweeper.sweep().send
    claim = postings.claim(enqueued.uuid, "somebody", ttl_seconds=60)
    assert claim is not None
    with engine.begin() as connection:
        connection.execute(text("UPDATE show SET b_scheduler_managed = false"))
    here.sweeper.reload()
    here.sweeper.sweep()
    assert postings.posted().get(enqueued.cluster.key) == enqueued.uuid

    # when that is over, then the next reading of the clusters takes it down
    postings.end(claim, "sleep", delay_seconds=600)
    here.sweeper.reload()
    here.sweeper.sweep()
    assert postings.posted().get(enqueued.cluster.key) is None


def test_a_sweep_of_a_former_leader_takes_no_posting_down(here: Passes, engine: Engine) -> None:
    # given a posting of a show that was handed back
    plant(engine)
    ((_, enqueued),) = here.sweeper.sweep().send
    with engine.begin() as connection:
        connection.execute(text("UPDATE show SET b_scheduler_managed = false"))
    here.sweeper.reload()

    # when a sweep gets to it after its leader was succeeded, then the posting stays, until a present one comes
    here.client.set(FENCE_KEY, 6)
    with pytest.raises(FencedOff, match=r"\b5\b.*\b6\b"):
        here.sweeper.sweep(fence=Fence(FENCE_KEY, 5))
    assert here.postings.posted().get(enqueued.cluster.key) == enqueued.uuid
    here.sweeper.sweep(fence=Fence(FENCE_KEY, 6))
    assert here.postings.posted().get(enqueued.cluster.key) is None


def test_a_pass_is_over_all_that_has_work_or_not(here: Passes, engine: Engine) -> None:
    plant(engine)
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(name="fast", tags=["fast"], hostname_tag=False)
        farm.job([LayerSpec(frames=1, tags="fast")], name="fast")
    assert not here.sweeper.are_all(here.sweeper.clusters), "nobody has swept yet"
    first, *others = (cluster for cluster, _ in here.sweeper.sweep().send)
    assert not here.sweeper.are_all([first])
    assert here.sweeper.are_all([first, *others])
