"""What is read of a host that came free: not what runs there, as long as this process knows."""

from __future__ import annotations

import pytest
import redis
from sqlalchemy import Engine

from opencue_sched.coordination.change_log import HostChanges
from opencue_sched.dispatch.host_feed import HostFeed
from opencue_sched.domain.clusters import Cluster
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostIds, LayerSpec
from opencue_sched.placement.host_cache import HostGroups, HostOrder
from opencue_sched.settings import Settings
from opencue_sched.store.hosts import fetch_hosts_by_id
from tests.kit.frozen_clock import Clock
from tests.kit.gathering import cluster_of, reads_by_table
from tests.kit.values import make_need

FRAMES = 40


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def running(engine: Engine) -> tuple[HostIds, Cluster]:
    """A host of 64 cores on which FRAMES run, each of a layer of its own."""
    with engine.begin() as connection:
        farm = Farm(connection)
        host = farm.host(cores=64, memory_gb=256)
        run_there(farm, host)
        return host, cluster_of(farm)


def run_there(farm: Farm, host: HostIds, *, cores: float = 1) -> None:
    job = farm.job([LayerSpec(frames=1, name=f"layer{number}") for number in range(FRAMES)])
    farm.run(job.frames, host, cores=cores)


@pytest.fixture
def feed(
    engine: Engine, redis_client: redis.Redis, settings: Settings, clock: Clock, running: tuple[HostIds, Cluster]
) -> HostFeed:
    """Of a worker that knows the host."""
    changes = HostChanges(redis_client, "cue")
    changes.publish(["another"])
    feed = HostFeed(engine, changes, settings.host_cache, instance="one", clock=clock)
    feed.follow()
    feed.refresh(running[1])
    return feed


def frames_there(feed: HostFeed, cluster: Cluster) -> int:
    """How many frames run on the host, by what the worker knows."""
    host = feed.cache.find(HostGroups(cluster.facility_id, cluster.tags), make_need(1), HostOrder(), lambda _: True)
    assert host is not None
    return sum(host.running.values())


def test_procs_are_read_only_where_they_are_asked_for(engine: Engine, running: tuple[HostIds, Cluster]) -> None:
    host = running[0].id
    with engine.connect() as connection, reads_by_table(connection) as read:
        (found,) = fetch_hosts_by_id(connection, [host], 3600, but_running=[host])
    assert (read["proc"], found.running) == ((0, 0), {})
    # then by an index or from end to end: on so small a farm both cost the same
    with engine.connect() as connection, reads_by_table(connection) as read:
        (found,) = fetch_hosts_by_id(connection, [host], 3600)
    assert any(read["proc"])
    assert sum(found.running.values()) == FRAMES


def test_a_host_that_comes_free_is_read_without_its_procs_for_a_minute(
    engine: Engine, running: tuple[HostIds, Cluster], feed: HostFeed, clock: Clock
) -> None:
    host, cluster = running
    assert frames_there(feed, cluster) == FRAMES
    with engine.begin() as connection:
        run_there(Farm(connection), host, cores=0.1)
    for _ in range(3):
        clock.advance(18)
        feed.note([host.id])
        feed.follow()
        assert frames_there(feed, cluster) == FRAMES
    clock.advance(18)
    feed.note([host.id])
    feed.follow()
    assert frames_there(feed, cluster) == 2 * FRAMES


def test_a_host_on_which_another_worker_booked_is_read_with_its_procs(
    engine: Engine, redis_client: redis.Redis, running: tuple[HostIds, Cluster], feed: HostFeed
) -> None:
    host, cluster = running
    with engine.begin() as connection:
        run_there(Farm(connection), host, cores=0.1)
    HostChanges(redis_client, "cue").publish([host.id])
    feed.follow()
    assert frames_there(feed, cluster) == FRAMES
    HostChanges(redis_client, "cue").publish([host.id], by="two")
    feed.follow()
    assert frames_there(feed, cluster) == 2 * FRAMES
