"""A farm whose hosts are divided: a posting for each shard, and every worker wakes its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from sqlalchemy import Engine, event

from opencue_sched.coordination.change_log import HostChanges
from opencue_sched.dispatch.clusters import FarmDivision
from opencue_sched.dispatch.host_feed import HostFeed
from opencue_sched.dispatch.sweep import Sweeper, SweepReport
from opencue_sched.domain import shards
from opencue_sched.domain.clusters import Cluster
from opencue_sched.domain.hosts import Host, Resources
from opencue_sched.domain.shards import Division, shard_of
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, LayerSpec
from opencue_sched.placement.host_cache import REREAD_SECONDS, HostGroups, HostOrder
from opencue_sched.settings import Rqd, Settings
from tests.kit.frozen_clock import Clock
from tests.kit.passes import Passes, passes
from tests.kit.patient_postings import patient_postings

TWO, THREE = ("one", "two"), ("one", "three", "two")


@dataclass
class Fleet:
    """The sweepers of some workers of one fleet, all of one mind about who is there. Their clock stands still: however
    slow the machine is, what a test does comes within every pause."""

    here: Passes
    division: Division = TWO
    host_ids: list[str] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.postings = patient_postings(self.here.client, division=lambda: self.division)
        self.sweepers = {name: self.worker(name) for name in THREE}

    def worker(self, name: str) -> Sweeper:
        settings = self.here.settings.model_copy(update={"instance": name})
        return Sweeper(self.here.engine, settings, self.postings, division=lambda: self.division, clock=self.clock)

    def posted(self) -> set[str]:
        return {key.partition("@")[2] for key in self.postings.posted()}

    def put_to_rest(self, report: SweepReport) -> None:
        for _, enqueued in report.send:
            self.postings.end(self.postings.claim(enqueued.uuid, "somebody", ttl_seconds=10), "sleep", delay_seconds=60)

    def held_back(self, name: str, host: str) -> SweepReport:
        """Sweep for a host that comes free again and again until its cluster, which sleeps each time, has to wait."""
        for _ in range(20):
            report = self.sweepers[name].sweep(wake_hosts=[host])
            if report.ask_again:
                return report
            assert sent(report) == {name}
            self.put_to_rest(report)
        pytest.fail("the cluster never had to wait")

    def host_of(self, shard: str) -> str:
        return next(host_id for host_id in self.host_ids if shard_of(host_id, self.division) == shard)


def sent(report: SweepReport) -> set[str]:
    return {cluster.shard for cluster, _ in report.send}


@pytest.fixture
def fleet(engine: Engine, settings: Settings) -> Iterator[Fleet]:
    with engine.begin() as connection:
        farm = Farm(connection)
        hosts = farm.hosts([HostSpec(cores=2, hostname_tag=False) for _ in range(24)])
        farm.job([LayerSpec(frames=100)])
    with passes(engine, settings.model_copy(update={"rqd": Rqd(dry_run_mode=True)})) as here:
        yield Fleet(here, host_ids=[host.id for host in hosts])


def test_a_cluster_with_work_has_a_posting_for_each_shard(fleet: Fleet) -> None:
    report = fleet.sweepers["one"].sweep()

    assert sent(report) == fleet.posted() == set(TWO)
    assert (report.active, report.sleeping) == (1, 0), "one cluster, on two shards"
    assert fleet.sweepers["two"].sweep().send == ()


def test_a_freed_host_wakes_the_shard_it_belongs_to_and_its_worker_alone_does(fleet: Fleet) -> None:
    for name in TWO:
        fleet.put_to_rest(fleet.sweepers[name].sweep())
    host = fleet.host_of("two")

    assert fleet.sweepers["one"].sweep(wake_hosts=[host]).send == ()
    assert fleet.sweepers["three"].sweep(wake_hosts=[host]).send == (), "it is no owner"
    report = fleet.sweepers["two"].sweep(wake_hosts=[host, fleet.host_of("one")])
    assert sent(report) == {"two"}
    fleet.put_to_rest(report)
    assert fleet.held_back("two", host).send == ()


def test_a_freed_host_of_another_shard_costs_no_scan(fleet: Fleet) -> None:
    fleet.sweepers["one"].sweep()
    with fleet.here.counted() as count:
        fleet.sweepers["one"].sweep(wake_hosts=[fleet.host_of("two")])
    assert (count.statements, count.packets) == (0, 0)


def test_hosts_that_come_free_cost_nothing_while_every_cluster_has_just_been_woken(fleet: Fleet) -> None:
    # given a worker whose only cluster was woken for a freed host as often as it may, and sleeps again
    one, host = fleet.sweepers["one"], fleet.host_of("one")
    fleet.put_to_rest(one.sweep())
    fleet.held_back("one", host)
    # when the host comes free again, then it has to wait, and nobody was asked for that
    with fleet.here.counted() as count:
        held = one.sweep(wake_hosts=[host])
    assert (count.statements, count.packets, held.send) == (0, 0, ())
    # and when the time is over that was said, the cluster is woken for it
    fleet.clock.advance(held.ask_again)
    assert sent(one.sweep(wake_hosts=[host])) == {"one"}


def test_new_work_wakes_every_shard_each_by_its_worker(fleet: Fleet) -> None:
    for name in TWO:
        fleet.put_to_rest(fleet.sweepers[name].sweep())
    (cluster,) = fleet.sweepers["one"].clusters

    assert {name: sent(fleet.sweepers[name].sweep(wake_shows=[cluster.show_id])) for name in THREE} == {
        "one": {"one"},
        "two": {"two"},
        "three": set(),
    }


def test_work_that_nobody_was_told_of_is_found_for_all_shards_by_any_sweep(fleet: Fleet) -> None:
    for sweeper in fleet.sweepers.values():
        fleet.put_to_rest(sweeper.sweep())

    assert sent(fleet.worker("one").sweep()) == set(TWO), "by a process that has just started"


def test_when_a_worker_comes_or_goes_its_postings_do_and_all_clusters_are_woken(fleet: Fleet) -> None:
    fleet.put_to_rest(fleet.sweepers["one"].sweep())

    fleet.division = THREE
    report = fleet.sweepers["one"].sweep()
    assert sent(report) == fleet.posted() == set(THREE)
    fleet.put_to_rest(report)

    fleet.division = ("one", "three")
    report = fleet.sweepers["one"].sweep()
    assert sent(report) == fleet.posted() == {"one", "three"}, "one of them has the hosts of two"
    fleet.put_to_rest(report)

    fleet.division = ()
    assert sent(fleet.sweepers["one"].sweep()) == fleet.posted() == {""}
    fleet.division = TWO
    assert sent(fleet.sweepers["one"].sweep()) == fleet.posted() == set(TWO)


def test_a_claimed_posting_of_a_shard_that_is_gone_goes_with_the_end_of_its_pass(fleet: Fleet) -> None:
    enqueued = [it for cluster, it in fleet.sweepers["one"].sweep().send if cluster.shard == "two"]
    claim = fleet.postings.claim(enqueued[0].uuid, "two", ttl_seconds=10)
    fleet.division = ()
    fleet.sweepers["one"].sweep()
    assert fleet.posted() == {"two", ""}

    assert fleet.postings.end(claim, "again") == 0
    assert fleet.posted() == {""}


def test_a_cluster_in_the_trash_stays_there_when_the_farm_is_divided_anew(fleet: Fleet) -> None:
    ((cluster, _), *_) = fleet.sweepers["one"].sweep().send
    name = cluster.key.partition("@")[0]
    for uuid in fleet.postings.find_all(name):
        assert fleet.postings.update(uuid, "trash", "bad hosts", force=True)[0]

    fleet.division = THREE
    fleet.sweepers["one"].sweep()
    trashed = {it.key for it in fleet.postings.skipped() if it.reason == "bad hosts"}
    assert trashed >= {f"{name}@{shard}" for shard in THREE}

    for uuid in fleet.postings.find_all(name):
        fleet.postings.update(uuid, "restore")
    assert fleet.postings.skipped() == []
    assert len(fleet.postings.find_all(name)) == len(fleet.postings.find_all(f"{name}@one")) * 3


def feed_of(fleet: Fleet, name: str, **options: Any) -> HostFeed:
    here = fleet.here
    changes = HostChanges(here.client, "cue")
    return HostFeed(
        here.engine, changes, here.settings.host_cache, instance=name, division=lambda: fleet.division, **options
    )


def read_again(feed: HostFeed) -> None:
    """What the thread in the background does, until there is nothing to do."""
    while not feed.reread():
        pass


@contextmanager
def rows_returned(engine: Engine) -> Iterator[list[int]]:
    """How many rows each statement returns meanwhile."""
    rows: list[int] = []

    def note(_connection: Any, cursor: Any, *_: Any) -> None:
        rows.append(cursor.rowcount)

    event.listen(engine, "after_cursor_execute", note)
    try:
        yield rows
    finally:
        event.remove(engine, "after_cursor_execute", note)


def shown(fleet: Fleet, feed: HostFeed) -> dict[str, Host]:
    """The hosts that passes over any shard find, by id."""
    found: dict[str, Host] = {}
    anything = Resources(cores=0, memory_kb=0)
    (cluster,) = fleet.sweepers["one"].clusters
    for shard in ("", *THREE):
        groups = HostGroups(cluster.facility_id, cluster.tags, shard)
        feed.cache.find(groups, anything, HostOrder(), lambda host: bool(found.update({host.id: host})))
    return found


def cluster_in(fleet: Fleet, shard: str) -> Cluster:
    fleet.sweepers["one"].sweep()
    (cluster,) = fleet.sweepers["one"].clusters
    return replace(cluster, shard=shard)


def test_a_worker_reads_the_hosts_of_the_shards_that_it_works_on_and_no_others(fleet: Fleet) -> None:
    feed = feed_of(fleet, "one")
    mine = {host_id for host_id in fleet.host_ids if shard_of(host_id, TWO) == "one"}
    feed.refresh(cluster_in(fleet, "one"))
    assert shown(fleet, feed).keys() == mine

    # when all hosts change, then its own are read again, and nothing is where only others did
    feed.follow()
    with fleet.here.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE host SET int_cores_idle = 0")
    feed_of(fleet, "two").changed(set(fleet.host_ids))
    feed.note(fleet.host_ids)
    feed.follow()
    assert {host.idle_cores for host in shown(fleet, feed).values()} == {0}
    feed_of(fleet, "two").changed(set(fleet.host_ids) - mine)
    with fleet.here.counted() as count:
        feed.follow()
    assert count.statements == 0


def test_a_worker_takes_over_the_hosts_of_one_that_is_gone_and_gives_up_those_of_one_that_comes(fleet: Fleet) -> None:
    feed = feed_of(fleet, "one")
    for division in (TWO, THREE, ("one", "three"), (), TWO):
        fleet.division = division
        shard = "one" if division else ""
        feed.refresh(cluster_in(fleet, shard))
        mine = {host_id for host_id in fleet.host_ids if shard_of(host_id, division) == shard}
        assert shown(fleet, feed).keys() == mine


def test_a_message_of_another_shard_is_worked_on_with_that_shards_hosts(fleet: Fleet) -> None:
    feed = feed_of(fleet, "one")
    for shard in ("two", "three"):
        feed.refresh(cluster_in(fleet, shard))
    assert shown(fleet, feed).keys() == {
        host_id for host_id in fleet.host_ids if shard_of(host_id, TWO) == "two" or shard_of(host_id, THREE) == "three"
    }


def test_a_farm_that_is_not_divided_is_read_again_by_the_one_worker_that_works_on_it(fleet: Fleet) -> None:
    # Given three workers, of which one gets all messages
    fleet.division = ()
    clock = Clock()
    working, *idle = (feed_of(fleet, name, clock=clock) for name in THREE)
    cluster = cluster_in(fleet, "")
    working.refresh(cluster)
    read_again(working)
    # When hosts change and nobody hears of it
    with fleet.here.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE host SET int_cores_idle = 0")
        connection.exec_driver_sql("UPDATE host SET str_lock_state = 'LOCKED' WHERE pk_host < '8'")
    clock.advance(10)
    with rows_returned(fleet.here.engine) as rows:
        for feed in (working, *idle):
            read_again(feed)
    # Then the one reads all hosts again with its next round, and the others none
    unlocked = {host_id for host_id in fleet.host_ids if host_id >= "8"}
    assert sum(rows) == len(unlocked)
    assert len(working.cache) == len(unlocked)
    assert working.cache.idle_cores([cluster]) == 0


@pytest.mark.parametrize("division", [(), TWO, THREE], ids=["one", "two", "three"])
def test_a_round_reads_each_host_once_however_many_workers_there_are(fleet: Fleet, division: Division) -> None:
    # Given workers of which each knows the hosts of all shards, by messages that came to it
    fleet.division = division
    clock = Clock()
    feeds = {name: feed_of(fleet, name, clock=clock) for name in division or ("one",)}
    for feed in feeds.values():
        for shard in division or ("",):
            feed.refresh(cluster_in(fleet, shard))
        read_again(feed)
    clock.advance(REREAD_SECONDS)
    # When all of them read again what it is time for
    read = {}
    for name, feed in feeds.items():
        with rows_returned(fleet.here.engine) as rows:
            read_again(feed)
        read[name] = sum(rows)
    # Then each has read its own hosts, which are those of no other
    assert read == {name: sum(shard_of(host, division) in ("", name) for host in fleet.host_ids) for name in feeds}
    assert sum(read.values()) == len(fleet.host_ids)


def test_what_a_worker_finds_of_its_own_shard_is_not_told_to_those_of_others(fleet: Fleet) -> None:
    # Given a worker that knows the hosts of its shard
    clock = Clock()
    feed = feed_of(fleet, "one", clock=clock)
    cluster = cluster_in(fleet, "one")
    feed.refresh(cluster)
    read_again(feed)
    changes = HostChanges(fleet.here.client, "cue")
    changes.publish(["another"], by="two")
    cursor, _ = changes.since(None)
    # When it reads them again and finds them changed
    with fleet.here.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE host SET int_cores_idle = 0")
    clock.advance(60)
    read_again(feed)
    # Then nobody else has to read them
    assert feed.cache.idle_cores([cluster]) == 0
    assert changes.since(cursor)[1] == frozenset()


def test_a_pass_over_a_shard_books_on_its_hosts_alone(fleet: Fleet, engine: Engine) -> None:
    cluster = cluster_in(fleet, "one")
    runner = replace(fleet.here.runner, hosts=feed_of(fleet, "one"))
    while runner.run([cluster], alive=lambda: True)[0].frames_booked:
        pass

    with engine.connect() as connection:
        hosts = set(connection.exec_driver_sql("SELECT DISTINCT pk_host FROM proc").scalars())
    assert hosts == {host_id for host_id in fleet.host_ids if shard_of(host_id, TWO) == "one"}


def add_hosts(engine: Engine, number: int) -> None:
    with engine.begin() as connection:
        Farm(connection).hosts(HostSpec(name=f"more{host}", hostname_tag=False) for host in range(number))


def test_a_farm_is_divided_by_how_many_hosts_there_are_for_each_instance(fleet: Fleet) -> None:
    instances = {"one"}
    division = FarmDivision(fleet.here.engine, fleet.here.settings, lambda: instances)
    assert division() == ()
    instances |= {"two"}
    assert division() == (), "24 hosts are too few"
    add_hosts(fleet.here.engine, 3 * shards.HOSTS_PER_SHARD)
    division = FarmDivision(fleet.here.engine, fleet.here.settings, lambda: set(THREE))
    assert division() == THREE
    with fleet.here.counted() as count:
        assert division() == THREE
    assert count.statements == 0


def test_an_instance_that_comes_is_in_the_division_at_once(fleet: Fleet) -> None:
    # given hosts that were counted no further than it took to divide them between two
    add_hosts(fleet.here.engine, 3 * shards.HOSTS_PER_SHARD)
    instances = set(TWO)
    division = FarmDivision(fleet.here.engine, fleet.here.settings, lambda: instances)
    assert division() == TWO
    # when a third comes, then there are hosts for all three
    instances |= {"three"}
    assert division() == THREE


def test_the_division_stays_in_force_while_redis_is_away(fleet: Fleet) -> None:
    add_hosts(fleet.here.engine, 2 * shards.HOSTS_PER_SHARD)
    away = False

    def instances() -> set[str]:
        if away:
            raise RedisConnectionError("away")
        return set(TWO)

    division = FarmDivision(fleet.here.engine, fleet.here.settings, instances)
    assert division() == TWO
    away = True
    assert division() == TWO
