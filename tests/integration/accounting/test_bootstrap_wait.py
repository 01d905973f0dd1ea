"""The age that passes before a lost store is filled: from when it was closed, whoever waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from opencue_sched.accounting import bootstrap, keys
from opencue_sched.accounting.bootstrap import LEASE_SECONDS, ensure_bootstrapped, server_run_id
from opencue_sched.accounting.caps import make_ledger
from opencue_sched.accounting.epoch import Epoch
from opencue_sched.errors import NotReady
from opencue_sched.settings import Accounting
from tests.integration.accounting.stepping import Actor, Clock, SteppedRedis
from tests.kit.world import World

AGE = 40.0

MakeFiller = Callable[[], Actor]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The boot clock of every filler."""
    clock = Clock()
    monkeypatch.setattr(bootstrap, "time", clock)
    return clock


@pytest.fixture
def filler(world: World, clock: Clock, settings_url: str) -> Iterator[MakeFiller]:
    """Makes processes that fill the store. Three procs run, and Redis has lost everything."""
    world.run(3)
    world.store.client.flushdb()
    stepped = SteppedRedis.from_url(settings_url, decode_responses=True)
    made: list[Actor] = []

    def make() -> Actor:
        ledger = make_ledger(world.engine, stepped, owner=f"filler{len(made)}", accounting=Accounting())
        made.append(Actor("filler", lambda: ensure_bootstrapped(world.engine, ledger, wait_age=AGE, sleep=clock.sleep)))
        return made[-1]

    with contextlib.closing(stepped):
        yield make
        for actor in made:
            actor.kill()


def wait(actor: Actor, clock: Clock, seconds: float = float("inf")) -> float:
    """Let so much time pass for a filler, or as much as it needs to fill the store; how much that was."""
    begun = clock.now
    while actor.alive and (actor.boundary != "sleep" or actor.asleep_until <= begun + seconds):
        if actor.boundary == "sleep":
            clock.now = max(clock.now, actor.asleep_until)
        actor.step()
    if actor.alive:
        clock.now = begun + seconds
    return clock.now - begun


def until(actor: Actor, boundary: str) -> None:
    """Let a filler come so far that it does this next."""
    while actor.boundary != boundary:
        actor.step()


def dies(actor: Actor, world: World) -> None:
    """It is killed, and its lease runs out."""
    actor.kill()
    world.store.client.delete(keys.BOOTSTRAP_LEASE)


def test_a_filler_waits_one_age_and_keeps_its_lease(filler: MakeFiller, clock: Clock, world: World) -> None:
    client, only = world.store.client, filler()
    waited = wait(only, clock, AGE / 2)
    assert LEASE_SECONDS * 500 < client.pttl(keys.BOOTSTRAP_LEASE) <= LEASE_SECONDS * 1000
    waited += wait(only, clock, AGE / 2 - 1)
    clock.now += 1
    until(only, "redis SCAN")
    assert client.pttl(keys.BOOTSTRAP_LEASE) > LEASE_SECONDS * 500
    assert wait(only, clock) == 0
    assert waited == pytest.approx(AGE - 1)
    world.exact()


def test_what_passes_before_the_store_is_closed_does_not_count(filler: MakeFiller, clock: Clock, world: World) -> None:
    """A filler is stopped on its way to close it; whoever has the epoch may be booking until then."""
    slow = filler()
    until(slow, "redis EVALSHA")
    clock.now += AGE
    assert wait(slow, clock) == pytest.approx(AGE)


def half_written(world: World) -> None:
    """It had begun to write."""
    world.store.client.hset(keys.LEDGER, "p", "half an entry")


def flushed(world: World) -> None:
    world.store.client.flushdb()


def filled_since(world: World) -> None:
    """Another has begun to fill the store, of whom we know nothing."""
    world.store.client.set(keys.EPOCH, Epoch.new(server_run_id(world.store.client), state="filling").text)


def open_since(world: World) -> None:
    """Somebody has opened it, and it was lost again."""
    world.store.open()
    world.store.client.delete(keys.EPOCH)


def test_who_follows_a_filler_that_died_waits_for_an_age(filler: MakeFiller, clock: Clock, world: World) -> None:
    """While it waited or at work, and whatever became of the store since."""
    for since in (half_written, flushed, filled_since, open_since):
        world.store.client.delete(keys.EPOCH)
        first = filler()
        wait(first, clock, AGE - 1)
        dies(first, world)
        since(world)
        assert wait(filler(), clock) == pytest.approx(AGE), since.__name__
        world.exact()


def test_a_store_that_was_open_a_moment_ago_is_closed_for_an_age(
    filler: MakeFiller, clock: Clock, world: World, settings_url: str
) -> None:
    """Also when it is closed on purpose."""
    wait(filler(), clock)
    world.ledger.learn_epoch()
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.now += seconds

    ensure_bootstrapped(world.engine, world.ledger, dual=True, fleet_start=True, wait_age=AGE, sleep=sleep)
    assert sum(slept) == pytest.approx(AGE)


def test_a_filler_that_was_overtaken_ends(filler: MakeFiller, clock: Clock, world: World) -> None:
    slow = filler()
    wait(slow, clock, 10)
    world.store.client.delete(keys.BOOTSTRAP_LEASE)
    second = filler()
    wait(second, clock, 1)
    with pytest.raises(NotReady, match="lease"):
        wait(slow, clock, 10)
    wait(second, clock)
    world.exact()
