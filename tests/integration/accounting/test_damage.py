"""A store whose own keys somebody damaged is lost, as an emptied one: closed by whoever meets it, and filled anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import redis

from opencue_sched.accounting import keys
from opencue_sched.accounting.bootstrap import Action, StoreState, ensure_bootstrapped, store_state
from opencue_sched.accounting.caps import make_ledger
from opencue_sched.accounting.epoch import look_at_store
from opencue_sched.accounting.show_handover import ImportedShows
from opencue_sched.clock import boot_id
from opencue_sched.errors import NotReady, StoreDamaged
from opencue_sched.settings import Accounting
from tests.kit.counters import Store
from tests.kit.world import World


def other_type(key: str) -> Callable[[redis.Redis], object]:
    """Damage: the key is a list."""

    def damage(client: redis.Redis) -> None:
        client.delete(key)
        client.rpush(key, "somebody", "else")

    return damage


def text(value: str) -> Callable[[redis.Redis], object]:
    """Damage: acct:seq has this value."""
    return lambda client: client.set(keys.SEQ, value)


def tombstones_of_another_type(client: redis.Redis) -> None:
    for bucket in keys.tombstones(int(client.time()[0])):
        other_type(bucket)(client)


COUNT: dict[str, Callable[[redis.Redis], object]] = {
    "a number that is text": text("somebody"),
    "a number of another type": other_type(keys.SEQ),
    "the largest number": text("9223372036854775807"),
    "a number too long for a record": text("1000000000000000"),
    "a number below zero": text("-7"),
}
DAMAGE = COUNT | {
    "a ledger of another type": other_type(keys.LEDGER),
    "tombstones of another type": tombstones_of_another_type,
    "marks of another type": other_type(keys.MARKS_PREFIX + boot_id()),
    "imports of another type": other_type(keys.IMPORTED),
}
MEETS: dict[str, Callable[[World], object]] = {
    "a booking": lambda world: world.ledger.book([world.entry(world.run()[0])]),
    "a settled proc": lambda world: world.ledger.settle([world.entry(world.run()[0])]),
    "a release": lambda world: world.ledger.release([world.procs[0]]),
    "a recompute": lambda world: world.recompute(),
}


@pytest.fixture
def world(engine, store: Store) -> Iterator[World]:  # type: ignore[no-untyped-def]
    """A filled store that counts two procs."""
    made = World.make(engine, store)
    made.run(2)
    store.client.flushdb()
    assert ensure_bootstrapped(engine, made.ledger, wait_age=0) is Action.FILLED
    yield made


def fill(world: World) -> Action:
    ledger = make_ledger(world.engine, world.store.client, owner="filler", accounting=Accounting())
    return ensure_bootstrapped(world.engine, ledger, wait_age=0)


def works(world: World) -> None:
    """Bookings, releases and recomputes go on, and all agrees."""
    (proc,) = world.run()
    assert world.ledger.book([world.entry(proc)]).accepted == {proc}
    world.ledger.settle([world.entry(proc)])
    world.delete(world.procs[0])
    world.ledger.release([world.procs[0]])
    world.recompute()
    world.exact()


@pytest.mark.parametrize("damage", [name for name in DAMAGE if name != "tombstones of another type"])
def test_a_recompute_that_meets_damage_closes_the_store_and_it_is_filled_anew(world: World, damage: str) -> None:
    DAMAGE[damage](world.store.client)
    with pytest.raises(NotReady):
        world.recompute()
        ImportedShows(world.engine, world.ledger, quarantine_seconds=0, age_seconds=40).import_all()
    assert store_state(world.store.client) is StoreState.LOST
    assert fill(world) is Action.FILLED
    works(world)


@pytest.mark.parametrize("damage", [*COUNT, "a ledger of another type"])
@pytest.mark.parametrize("met", MEETS)
def test_whoever_meets_it_closes_the_store(world: World, damage: str, met: str) -> None:
    DAMAGE[damage](world.store.client)
    with pytest.raises(StoreDamaged):
        MEETS[met](world)
    assert store_state(world.store.client) is StoreState.LOST


@pytest.mark.parametrize("met", ["a booking", "a release"])
def test_tombstones_that_cannot_be_read_close_the_store(world: World, met: str) -> None:
    tombstones_of_another_type(world.store.client)
    with pytest.raises(StoreDamaged):
        MEETS[met](world)
    assert store_state(world.store.client) is StoreState.LOST
    assert fill(world) is Action.FILLED
    works(world)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("fleet_start", [False, True])
def test_a_worker_that_starts_on_a_damaged_store_fills_it(world: World, damage: str, fleet_start: bool) -> None:
    DAMAGE[damage](world.store.client)
    ledger = make_ledger(world.engine, world.store.client, owner="new", accounting=Accounting())
    assert ensure_bootstrapped(world.engine, ledger, wait_age=0, fleet_start=fleet_start) is Action.FILLED
    works(world)


@pytest.mark.parametrize("damage", COUNT)
def test_a_store_that_is_closed_already_is_filled_all_the_same(world: World, damage: str) -> None:
    """Deleting the epoch by hand is what an operator tries first."""
    COUNT[damage](world.store.client)
    world.store.client.delete(keys.EPOCH)
    assert fill(world) is Action.FILLED
    works(world)


@pytest.mark.parametrize("set_back", ["deleted", "set to 3"])
def test_a_number_that_was_set_back_keeps_no_entry_of_a_vanished_proc(world: World, set_back: str) -> None:
    # given entries with higher numbers than the store's
    for _ in range(5):
        world.store.client.incr(keys.SEQ)
    world.ledger.release([world.procs[1]])
    (proc,) = world.run()
    world.ledger.book([world.entry(proc)])
    world.ledger.settle([world.entry(proc)])
    # when somebody sets that back, and a proc vanishes unheard
    if set_back == "deleted":
        world.store.client.delete(keys.SEQ)
    else:
        world.store.client.set(keys.SEQ, "3")
    world.delete(proc)
    # then a recompute closes the store
    with pytest.raises(StoreDamaged, match=keys.SEQ):
        world.recompute()
    assert store_state(world.store.client) is StoreState.LOST
    # and once it is filled nothing is counted that is not there
    assert fill(world) is Action.FILLED
    assert proc not in world.store.ids()
    world.exact()


def test_a_spoilt_vertex_closes_no_store(world: World) -> None:
    """That is one counter, which a recompute corrects."""
    other_type(keys.job(world.job.id))(world.store.client)
    (proc,) = world.run()
    assert world.ledger.book([world.entry(proc)]).accepted == frozenset()
    assert store_state(world.store.client) is StoreState.OPEN


def test_a_store_that_is_being_filled_is_left_to_its_filler(world: World) -> None:
    client = world.store.client
    client.set(keys.EPOCH, f"filling|token|{client.info('server')['run_id']}")
    other_type(keys.LEDGER)(client)
    with pytest.raises(NotReady):
        world.recompute()
    assert store_state(client) is StoreState.FILLING


def test_a_time_of_the_last_recompute_that_is_none_is_unknown(world: World) -> None:
    """It decides nothing, and the next recompute writes it."""
    world.store.client.set(keys.RECOMPUTED_AT, "yesterday")
    assert look_at_store(world.store.client) == (True, None)
