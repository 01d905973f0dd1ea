"""Two workers on a farm that is divided between them, and what becomes of the hosts of one that is killed."""

from __future__ import annotations

from sqlalchemy import text

from opencue_sched.coordination.keys import BoardKeys
from opencue_sched.coordination.postings import ClusterPostings
from opencue_sched.domain.shards import HOSTS_PER_SHARD, shard_of
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, LayerSpec, ShowIds
from tests.chaos.conftest import Site
from tests.kit.polling import eventually

HOSTS = 2 * HOSTS_PER_SHARD + 12
TWO = ("w1", "w2")


def plant(site: Site) -> ShowIds:
    with site.engine.begin() as connection:
        farm = Farm(connection, seed=1)
        show = farm.show("show", managed=True)
        farm.subscription(show, farm.default_alloc(), burst=10_000)
        farm.hosts([HostSpec(name=f"h{number}", cores=8, hostname_tag=False) for number in range(HOSTS)])
    return show


def add_work(site: Site, show: ShowIds, name: str, hosts: int) -> None:
    """Work that fills so many hosts, one frame each."""
    with site.engine.begin() as connection:
        Farm(connection).job([LayerSpec(frames=hosts, cores=8)], show=show, name=name)


def shards_booked(site: Site) -> list[str]:
    """The shard of each host that runs something."""
    with site.engine.connect() as connection:
        return [shard_of(host, TWO) for host in connection.execute(text("SELECT pk_host FROM proc")).scalars()]


def shards_posted(site: Site) -> set[str]:
    postings = ClusterPostings(site.client, BoardKeys("cue", "clusters"))
    return {key.partition("@")[2] for key in postings.posted()}


def test_the_hosts_of_a_killed_worker_are_used_by_the_other_and_the_farm_is_one_again(site: Site) -> None:
    # given two workers, each of which fills hosts of its own
    show = plant(site)
    site.fleet.beat("b1")
    for name in TWO:
        site.fleet.worker(name)
    with site.engine.begin() as connection:  # work that no host takes, so that the cluster stays posted
        Farm(connection).job([LayerSpec(frames=1, cores=512)], show=show, name="wide")
    eventually(lambda: shards_posted(site) == set(TWO), 60, "a posting for each worker")
    add_work(site, show, "first", HOSTS // 2)
    eventually(lambda: len(shards_booked(site)) == HOSTS // 2, 60, "frames on half of the hosts")

    # when one is killed, and there is work for every host that is left
    site.fleet.processes["w2"].kill()
    add_work(site, show, "second", HOSTS - HOSTS // 2)

    # then the other uses them all
    eventually(lambda: len(shards_booked(site)) == HOSTS, 60, "frames on all hosts")
    assert set(shards_booked(site)) == set(TWO)
    eventually(lambda: shards_posted(site) <= {""}, 60, "the end of the postings of shards")
