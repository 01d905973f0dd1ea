"""A cluster in the trash stays there under whatever key its postings have, and comes back when it is restored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from sqlalchemy import Engine

from opencue_sched.coordination.keys import BoardKeys
from opencue_sched.coordination.postings import ClaimRefused, ClusterPostings
from opencue_sched.dispatch.sweep import Sweeper
from opencue_sched.domain.clusters import Cluster
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.settings import Rqd, Settings
from tests.kit.passes import Passes, passes


@pytest.fixture
def here(engine: Engine, settings: Settings) -> Iterator[Passes]:
    """A process beside a farm with work for one cluster, whose tag has capitals."""
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=2, tags=["GPU"], hostname_tag=False, alloc_tag=False)
        farm.job([LayerSpec(frames=1, tags="GPU")])
    with passes(engine, settings.model_copy(update={"rqd": Rqd(dry_run_mode=True)})) as runner:
        yield runner


@pytest.fixture
def postings(here: Passes) -> ClusterPostings:
    return ClusterPostings(here.client, BoardKeys("cue", "clusters"))


@pytest.fixture
def now(here: Passes) -> Cluster:
    """The cluster as this release has it."""
    (cluster,) = here.clusters = [cluster for cluster, _ in here.sweeper.sweep().send]
    assert cluster.tags == ("gpu",)
    here.client.flushdb()
    return cluster


@pytest.fixture
def before(now: Cluster) -> Cluster:
    """The cluster as the release before had it, with its tags as they are spelled; a worker of it posts it so."""
    return replace(now, tags=("GPU",))


def new_process(here: Passes, postings: ClusterPostings) -> Sweeper:
    return Sweeper(here.engine, here.settings, postings)


def post(postings: ClusterPostings, cluster: Cluster) -> str:
    return postings.enqueue([cluster])[0].uuid


def states(postings: ClusterPostings) -> dict[str, str]:
    """Key -> state of each posting."""
    found = {key: postings.job(uuid) for key, uuid in postings.posted().items()}
    return {key: listing.fields["state"] for key, listing in found.items() if listing}


def test_a_cluster_that_an_earlier_release_put_into_the_trash_stays_there(
    here: Passes, postings: ClusterPostings, now: Cluster, before: Cluster
) -> None:
    # Given a posting of the release before that was put into the trash two days ago
    old = post(postings, before)
    postings.update(old, "trash", "bad hosts")
    key = postings.keys.job(old)
    since = int(here.client.hget(key, "modified")) - 2 * 86_400_000
    here.client.hset(key, "modified", since)
    here.client.zadd(postings.keys.of("trash"), {old: since})

    # When a process of this release sweeps, then no message is sent for the cluster, and it is in the trash
    assert new_process(here, postings).sweep().send == ()
    assert states(postings) == {before.key: "trash", now.key: "trash"}
    # and says why and since when, so that it leaves the trash when the other would
    assert {(it.reason, it.since) for it in postings.skipped()} == {("bad hosts", since / 1000)}
    assert isinstance(postings.claim(postings.posted()[now.key], "somebody", ttl_seconds=9), ClaimRefused)


@pytest.mark.parametrize("restored_as", ["now", "before"])
def test_it_is_restored_by_either_key(
    here: Passes, postings: ClusterPostings, now: Cluster, before: Cluster, restored_as: str
) -> None:
    postings.update(post(postings, before), "trash", "bad hosts")
    sweeper = new_process(here, postings)
    sweeper.sweep()

    # When an operator restores the cluster
    for uuid in postings.find_all({"now": now, "before": before}[restored_as].key):
        assert postings.update(uuid, "restore") == [1]

    # Then it is worked on, in this process and in one that starts, and what the release before posted goes
    assert postings.skipped() == []
    assert [cluster for cluster, _ in sweeper.sweep().send] == [now]
    new_process(here, postings).sweep()
    assert states(postings) == {now.key: "ready"}


@pytest.mark.parametrize("trashed_as", ["now", "before"])
def test_in_a_fleet_of_both_releases_it_stays_there_for_both(
    here: Passes, postings: ClusterPostings, now: Cluster, before: Cluster, trashed_as: str
) -> None:
    # Given a fleet in which workers of both releases post the cluster, each under its key
    sweeper = new_process(here, postings)
    sweeper.sweep()
    post(postings, before)
    claim = postings.claim(postings.posted()[now.key], "somebody", ttl_seconds=60)
    # When the posting of one is put into the trash, while the other is worked on, and clusters are read again
    trashed = {"now": now, "before": before}[trashed_as]
    postings.update(postings.posted()[trashed.key], "trash", "bad hosts", force=True)
    sweeper.reload()
    assert sweeper.sweep().send == ()

    # Then both are there, and stay there whoever sweeps
    post(postings, before)
    assert new_process(here, postings).sweep().send == ()
    assert states(postings) == {before.key: "trash", now.key: "trash"}
    assert not isinstance(claim, ClaimRefused)
    assert postings.extend([claim], ttl_seconds=60) == [], "its pass has lost it"


def test_what_an_earlier_release_posted_goes_when_it_is_not_in_the_trash(
    here: Passes, postings: ClusterPostings, now: Cluster, before: Cluster
) -> None:
    post(postings, before)
    assert [cluster for cluster, _ in new_process(here, postings).sweep().send] == [now]
    assert states(postings) == {now.key: "ready"}


def test_a_cluster_that_nobody_trashed_is_left_alone(here: Passes, postings: ClusterPostings, now: Cluster) -> None:
    other = replace(now, tags=("other",))
    postings.update(post(postings, other), "trash", "bad hosts")
    assert [cluster for cluster, _ in new_process(here, postings).sweep().send] == [now]
    assert states(postings) == {now.key: "ready", other.key: "trash"}
