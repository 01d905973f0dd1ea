"""Any order of plans, commits, losses, releases and overlapping reads: the cache never gives out what is not there.

One process books on a database of two hosts. As long as only it books, each commit must find the idle it planned on,
whatever reads were under way; and after everything has ended, one read shows exactly what the database has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from opencue_sched.domain.hosts import Host
from opencue_sched.placement.host_cache import HostCache, HostGroups, HostOrder
from opencue_sched.settings import HostCacheSettings
from tests.kit.examples import examples
from tests.kit.values import make_host, make_need, take

CORES = 6
HOSTS = ["h1", "h2"]


@dataclass
class Read:
    began_at: float
    seen: dict[str, int] | None = None


@dataclass
class Proc:
    id: str
    host_id: str
    cores: int
    state: str = "planned"


def readings(seen: Mapping[str, int]) -> list[Host]:
    return [make_host(host_id, cores=CORES, idle_centicores=idle * 100) for host_id, idle in seen.items()]


class Model:
    """The database, what is under way, and the cache. Each method is one step; it does nothing if nothing fits it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.procs: list[Proc] = []
        self.reads: list[Read] = []
        self.numbers = 0
        self.cache = HostCache(
            HostCacheSettings(host_staleness_threshold=1e9),
            self.fetch,
            taken_seconds=1e9,
            instance="one",
            clock=lambda: self.now,
        )
        self.cache.refresh("fac", ["general"])

    def fetch(self, *_asked: object) -> Sequence[Host]:
        return readings(self.idle_in_database())

    def cores_of(self, host_id: str, *states: str) -> int:
        return sum(proc.cores for proc in self.procs if proc.host_id == host_id and proc.state in states)

    def idle_in_database(self) -> dict[str, int]:
        return {host_id: CORES - self.cores_of(host_id, "committed", "known") for host_id in HOSTS}

    def visible(self) -> dict[str, int]:
        seen: dict[str, int] = {}

        def look(host: Host) -> bool:
            seen[host.id] = host.idle_cores
            return False

        self.cache.find(HostGroups("fac", ["general"]), make_need(1), HostOrder(), look)
        return seen

    def pick(self, which: int, *states: str) -> Proc | None:
        procs = [proc for proc in self.procs if proc.state in states]
        return procs[which % len(procs)] if procs else None

    def tick(self, which: int) -> None:
        self.now += (0.0, 0.5, 20.0)[which % 3]

    def plan(self, which: int) -> None:
        cores = 1 + which
        host = self.cache.find(HostGroups("fac", ["general"]), make_need(cores), HostOrder(), lambda _: True)
        if host is not None:
            self.numbers += 1
            proc = Proc(f"p{self.numbers}", host.id, cores)
            self.procs.append(proc)
            assert self.cache.take(host, {proc.id: take(cores)})

    def commit(self, which: int) -> None:
        proc = self.pick(which, "planned")
        if proc is not None:
            assert self.idle_in_database()[proc.host_id] >= proc.cores, "the host was given out twice"
            proc.state = "committed"

    def hear_of_the_commit(self, which: int) -> None:
        proc = self.pick(which, "committed")
        if proc is not None:
            proc.state = "known"
            self.cache.settle(proc.host_id, proc.id, committed=True)

    def lose(self, which: int) -> None:
        proc = self.pick(which, "planned")
        if proc is not None:
            self.procs.remove(proc)
            self.cache.settle(proc.host_id, proc.id, committed=False)

    def end(self, which: int) -> None:
        proc = self.pick(which, "known")
        if proc is not None:
            self.procs.remove(proc)

    def invalidate(self, which: int) -> None:
        self.cache.invalidate(HOSTS[which % 2])

    def begin_to_read(self, _which: int) -> None:
        self.reads.append(Read(self.cache.instant()))

    def see(self, which: int) -> None:
        if self.reads:
            read = self.reads[which % len(self.reads)]
            read.seen = read.seen or self.idle_in_database()

    def answer(self, which: int) -> None:
        answered = [read for read in self.reads if read.seen is not None]
        if answered:
            read = answered[which % len(answered)]
            self.reads.remove(read)
            self.cache.apply(readings(read.seen or {}), [], read_at=read.began_at)

    def reread(self, _which: int) -> None:
        self.cache.reread()

    def check(self) -> None:
        idle = self.idle_in_database()
        for host_id, cores in self.visible().items():
            assert cores <= idle[host_id] - self.cores_of(host_id, "planned"), f"{host_id} is given out twice"


STEPS = [
    "tick",
    "plan",
    "commit",
    "hear_of_the_commit",
    "lose",
    "end",
    "invalidate",
    "begin_to_read",
    "see",
    "answer",
    "reread",
]


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 3)), min_size=30, max_size=80))
def test_the_cache_never_gives_out_what_is_not_there(steps: list[tuple[str, int]]) -> None:
    model = Model()

    for name, which in steps:
        getattr(model, name)(which)
        model.check()

    # when all bookings have ended one way or the other, one read shows what there is
    while model.pick(0, "planned") is not None:
        model.lose(0)
    while model.pick(0, "committed") is not None:
        model.hear_of_the_commit(0)
    model.cache.apply(readings(model.idle_in_database()), [], read_at=model.cache.instant())
    assert model.visible() == {host_id: idle for host_id, idle in model.idle_in_database().items() if idle}
