"""Filling the store: when, by whom, and what happens to those who come in between."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine
from structlog.testing import capture_logs

from opencue_sched.accounting import bootstrap, keys
from opencue_sched.accounting.bootstrap import (
    ROWS_PER_RENEWAL,
    Action,
    StoreState,
    ensure_bootstrapped,
    server_run_id,
    store_state,
)
from opencue_sched.accounting.caps import make_ledger
from opencue_sched.accounting.epoch import Epoch, guarded_redis, look_at_store
from opencue_sched.accounting.imported_shows import imported_shows
from opencue_sched.accounting.keys import Booking
from opencue_sched.accounting.ledger import Ledger, epoch_set_call
from opencue_sched.clients.lua_scripts import call_scripts
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobSpec, LayerSpec
from opencue_sched.embedded.servers.services import EmbeddedRedis
from opencue_sched.errors import InvalidInput, NotReady, StoreUnusable
from opencue_sched.insight.health import check_redis
from opencue_sched.settings import Accounting, Settings
from tests.integration.accounting.stepping import Actor, SteppedRedis, about_to, around, interrupted
from tests.kit.counters import VERTICES, Store
from tests.kit.mutants import changed_code
from tests.kit.statements import listening, once_after_snapshot
from tests.kit.world import World


@pytest.fixture
def emptied(world: World) -> World:
    """Three procs are running, and Redis has lost everything."""
    world.run(3)
    world.store.client.flushdb()
    with pytest.raises(NotReady):
        world.ledger.learn_epoch()
    return world


def newcomer(world: World) -> Ledger:
    return make_ledger(world.engine, world.store.client, owner="newcomer", accounting=Accounting())


def stepped_newcomer(world: World) -> Ledger:
    """The ledger of an actor."""
    client = SteppedRedis(connection_pool=world.store.client.connection_pool)
    return make_ledger(world.engine, client, owner="newcomer", accounting=Accounting())


def test_an_empty_store_is_filled_from_one_snapshot_and_opened(emptied: World) -> None:
    """A show that a Cuebot hands over while it is read is not taken for counted: its procs were not seen."""
    with emptied.engine.begin() as connection:
        theirs = Farm(connection).show("theirs", managed=False)

    def hand_over() -> None:
        emptied.sql("UPDATE show SET b_scheduler_managed = true WHERE pk_show = :show", show=theirs.id)

    assert store_state(emptied.store.client) is StoreState.LOST
    with once_after_snapshot(emptied.engine, hand_over):
        assert ensure_bootstrapped(emptied.engine, emptied.ledger, wait_age=0) is Action.FILLED
    assert len(emptied.store.ids()) == 3
    assert imported_shows(emptied.store.client).keys() == {emptied.show.id}
    assert store_state(emptied.store.client) is StoreState.OPEN
    assert emptied.job_cores() == 6
    assert {record.state for record in emptied.ledger.records()} == {"C"}
    assert int(str(emptied.store.client.get(keys.RECOMPUTED_AT))) > 0, "as good as a recompute"
    emptied.exact()
    vertices = emptied.entry(emptied.procs[0]).vertices
    assert len(emptied.ledger.book([Booking("new", vertices, 1)]).accepted) == 1


@pytest.mark.parametrize("asks", [True, False], ids=["ours", "naive"])
def test_a_store_is_not_filled_before_postgresql_has_ended_the_commits_of_before(emptied: World, asks: bool) -> None:
    """Naive is our filler without its question: the control that shows what is lost then."""
    unasked = {"while may_still_commit(self._engine, self._age):": "while False:"}
    with changed_code(bootstrap, {} if asks else unasked), emptied.stalled_commit() as (booked, finish):
        ensure_bootstrapped(emptied.engine, emptied.ledger, wait_age=0, sleep=lambda _: finish())
    assert len(emptied.store.ids()) == (4 if asks else 3)
    assert (booked.proc_id in emptied.store.ids()) == asks
    if asks:
        emptied.exact()


def test_after_a_loss_one_age_passes_before_the_snapshot(emptied: World) -> None:
    """A booking made before the loss commits while the filler waits, and is in the snapshot."""
    slept: list[float] = []

    def committing(seconds: float) -> None:
        if not slept:
            emptied.run(1)
        slept.append(seconds)
        threading.Event().wait(seconds)

    ensure_bootstrapped(emptied.engine, emptied.ledger, wait_age=0.3, sleep=committing)
    assert sum(slept) >= 0.25
    assert len(emptied.store.ids()) == 4
    emptied.exact()


def test_a_worker_that_joins_a_live_fleet_only_verifies(world: World) -> None:
    world.run(1)
    seq = world.store.seq()
    assert ensure_bootstrapped(world.engine, newcomer(world), wait_age=60) is Action.VERIFIED
    assert world.store.seq() == seq


def test_the_first_worker_of_a_fleet_reconciles_an_open_store(world: World) -> None:
    world.run(2)
    vertices = world.entry(world.procs[0]).vertices
    world.ledger.book([Booking("young", vertices, 4)])
    assert ensure_bootstrapped(world.engine, newcomer(world), fleet_start=True, wait_age=60) is Action.RECONCILED
    assert world.store.ids() == {*world.procs, "young"}
    assert world.job_cores() == 8, "it is no rebuild: the booking in flight stays"


def test_at_a_fleets_start_the_second_worker_waits_until_the_first_has_reconciled(world: World) -> None:
    client, slept = world.store.client, []
    client.set(keys.BOOTSTRAP_LEASE, "the first", px=60_000)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            client.delete(keys.BOOTSTRAP_LEASE)

    action = ensure_bootstrapped(world.engine, newcomer(world), fleet_start=True, wait_age=0, sleep=sleep)
    assert (action, len(slept)) == (Action.WAITED, 3)


def test_what_a_restarted_redis_still_holds_is_thrown_away(world: World) -> None:
    world.run(1)
    world.recompute()
    world.store.client.set(keys.EPOCH, Epoch.new("0" * 40).text)
    world.store.client.hincrby(keys.job(world.job.id), "int_cores", 50)
    assert store_state(world.store.client) is StoreState.LOST
    assert ensure_bootstrapped(world.engine, newcomer(world), wait_age=0) is Action.FILLED
    assert world.job_cores() == 2
    world.exact()


def test_an_epoch_of_another_type_closes_the_store_and_is_written_over(world: World, settings_url: str) -> None:
    world.run(1)
    client, newcomer = world.store.client, guarded_redis(settings_url, Settings())
    world.ledger.epoch()
    client.delete(keys.EPOCH)
    client.rpush(keys.EPOCH, "somebody", "else")
    with contextlib.closing(newcomer):
        assert (store_state(newcomer), store_state(client)) == (StoreState.LOST, StoreState.LOST)
        assert not look_at_store(newcomer)[0]
        for attempt in (world.ledger.mark, lambda: world.ledger.book([Booking("p", VERTICES, 1)])):
            with pytest.raises(NotReady):
                attempt()
        with capture_logs() as said:
            action = ensure_bootstrapped(
                world.engine, make_ledger(world.engine, newcomer, owner="new", accounting=Accounting()), wait_age=0
            )
    assert action is Action.FILLED
    assert [line["log_level"] for line in said if line["event"] == "store_closed"] == ["warning"]
    world.exact()


def test_exactly_one_of_many_fills_and_the_others_wait(emptied: World, settings_url: str) -> None:
    reports: list[Action] = []
    failures: list[BaseException] = []

    def start() -> None:
        client = guarded_redis(settings_url, Settings())
        try:
            ledger = make_ledger(emptied.engine, client, owner="worker", accounting=Accounting())
            reports.append(ensure_bootstrapped(emptied.engine, ledger, wait_age=0.4))
        except BaseException as error:
            failures.append(error)
        finally:
            client.close()

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []
    # on a slow machine one may come when the first has filled it already
    assert sorted(reports)[0] is Action.FILLED
    assert {*sorted(reports)[1:]} <= {Action.WAITED, Action.VERIFIED}
    emptied.exact()


class Waits(Exception):
    """The caller waits for another filler."""


def waits(_seconds: float) -> None:
    raise Waits


def test_nobody_books_while_the_store_is_filled(emptied: World) -> None:
    client = emptied.store.client
    client.set(keys.EPOCH, Epoch.new(server_run_id(client), state="filling").text)
    client.set(keys.BOOTSTRAP_LEASE, "somebody", px=60_000)
    assert store_state(client) is StoreState.FILLING
    with pytest.raises(NotReady):
        emptied.ledger.book([Booking("p", emptied.entry(emptied.procs[0]).vertices, 1)])
    with pytest.raises(Waits):
        ensure_bootstrapped(emptied.engine, emptied.ledger, wait_age=0, sleep=waits)


def test_a_filler_that_died_is_followed_by_another(emptied: World) -> None:
    client = emptied.store.client
    client.set(keys.EPOCH, Epoch.new(server_run_id(client), state="filling").text)
    client.hset(keys.LEDGER, "half", "1|C|1|1|dead|9|0|s|a|f|j|l|d|")
    assert ensure_bootstrapped(emptied.engine, emptied.ledger, wait_age=0) is Action.FILLED
    emptied.exact()


def test_a_filler_that_is_slower_than_its_lease_goes_on_if_nobody_has_taken_it(emptied: World) -> None:
    """Otherwise a large farm on a slow machine is never filled: the next one is as slow."""

    def expire(*_: object) -> None:
        emptied.store.client.delete(keys.BOOTSTRAP_LEASE)

    with listening(emptied.engine, "before_cursor_execute", expire):
        assert ensure_bootstrapped(emptied.engine, emptied.ledger, wait_age=0) is Action.FILLED
    assert not emptied.store.client.exists(keys.BOOTSTRAP_LEASE)
    emptied.exact()


def test_a_filler_that_lost_its_lease_before_it_closed_the_store_leaves_it_to_the_next(emptied: World) -> None:
    client = emptied.store.client
    filler = stepped_newcomer(emptied)
    with pytest.raises(Waits):
        interrupted(
            lambda: ensure_bootstrapped(emptied.engine, filler, wait_age=0, sleep=waits),
            [lambda _: client.exists(keys.BOOTSTRAP_LEASE)],
            lambda: client.set(keys.BOOTSTRAP_LEASE, "somebody", px=60_000),
        )
    assert store_state(client) is StoreState.LOST


def test_a_store_that_was_opened_before_the_next_filler_had_the_lease_stays_open(emptied: World) -> None:
    # given a filler that has found the store lost, and is about to take the lease
    filler = stepped_newcomer(emptied)
    opened: list[Epoch] = []

    def fill() -> None:
        assert ensure_bootstrapped(emptied.engine, emptied.ledger, wait_age=0) is Action.FILLED
        opened.append(emptied.ledger.epoch())

    # when another one fills the store meanwhile
    action = interrupted(
        lambda: ensure_bootstrapped(emptied.engine, filler, wait_age=0),
        [about_to("EVALSHA")],
        fill,
    )
    assert action is Action.VERIFIED
    assert [emptied.ledger.learn_epoch()] == opened


@pytest.mark.parametrize("slow", ["caps", "reconcile"])
def test_a_filler_keeps_its_lease_while_it_writes(emptied: World, slow: str) -> None:
    """However long that takes: a piece of it took all but a second of the lease."""
    # given more jobs with caps, and more procs, than are written in one piece
    client, filler = emptied.store.client, stepped_newcomer(emptied)
    with emptied.engine.begin() as connection:
        farm = Farm(connection)
        jobs = farm.jobs([JobSpec([LayerSpec()], name=f"many{number}") for number in range(ROWS_PER_RENEWAL + 1)])
        farm.run([job.frames[0] for job in jobs], farm.host(name="wide", cores=len(jobs), memory_gb=len(jobs)))
    left: list[int] = []

    def slowly() -> None:
        left.append(int(str(client.pttl(keys.BOOTSTRAP_LEASE))))
        client.pexpire(keys.BOOTSTRAP_LEASE, 1000)

    with around(filler, slow, before=slowly):
        assert ensure_bootstrapped(emptied.engine, filler, wait_age=0) is Action.FILLED
    assert len(left) > 1
    assert min(left) > 1000


def test_a_filler_that_was_overtaken_in_a_pause_cannot_open_or_write(emptied: World) -> None:
    client = emptied.store.client
    mine = Epoch.new(server_run_id(client), state="filling")
    client.set(keys.EPOCH, mine.text)
    ensure_bootstrapped(emptied.engine, emptied.ledger, wait_age=0)
    answers, _ = call_scripts(client, [epoch_set_call(mine.text, Epoch.new("x").text)])
    assert answers == [0]
    with pytest.raises(NotReady):
        emptied.ledger.write_caps("test|1", [(keys.job("j"), ["int_max_cores", "1"])], epoch=mine)
    assert store_state(client) is StoreState.OPEN


def test_a_filler_that_pauses_before_it_wipes_cannot_wipe_what_its_successor_filled(
    emptied: World, settings_url: str
) -> None:
    client = emptied.store.client
    client.hset(keys.LEDGER, "stale", "1|C|1|1|dead|9|0|s|a|f|j|l|d|")
    stepped = SteppedRedis.from_url(settings_url, decode_responses=True)
    with contextlib.closing(stepped):
        slow = make_ledger(emptied.engine, stepped, owner="slow", accounting=Accounting())
        paused = Actor("filler", lambda: ensure_bootstrapped(emptied.engine, slow, wait_age=0))
        while paused.boundary != "redis SCAN":
            paused.step()
        while paused.boundary == "redis SCAN":
            paused.step()
        client.delete(keys.BOOTSTRAP_LEASE)
        assert ensure_bootstrapped(emptied.engine, emptied.ledger, wait_age=0) is Action.FILLED
        with pytest.raises(NotReady):
            while paused.step():
                pass
    assert store_state(client) is StoreState.OPEN
    assert emptied.job_cores() == 6
    emptied.exact()


def test_a_store_emptied_while_it_is_filled_is_not_opened(emptied: World) -> None:
    def flush(_: float) -> None:
        emptied.store.client.flushdb()

    with pytest.raises(NotReady):
        ensure_bootstrapped(emptied.engine, emptied.ledger, wait_age=0.01, sleep=flush)
    assert store_state(emptied.store.client) is StoreState.LOST


def test_a_different_release_feed_than_the_fleets_is_refused_and_taken_over_at_fleet_start(world: World) -> None:
    with pytest.raises(InvalidInput, match="release_feed"):
        ensure_bootstrapped(world.engine, newcomer(world), dual=True, wait_age=0)
    action = ensure_bootstrapped(world.engine, newcomer(world), dual=True, fleet_start=True, wait_age=0)
    assert (action, world.ledger.learn_epoch().dual) == (Action.FILLED, True)


@pytest.fixture
def own_redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


def test_a_restarted_redis_stops_bookings_until_it_is_filled_again(engine: Engine, own_redis: EmbeddedRedis) -> None:
    client = guarded_redis(own_redis.url, Settings())
    try:
        world = World.make(engine, Store(client))
        ensure_bootstrapped(engine, world.ledger, wait_age=0)
        world.run(1)
        first = world.ledger.epoch()
        own_redis.restart()
        with pytest.raises(NotReady):
            world.ledger.book([world.entry(world.procs[0])])
        assert ensure_bootstrapped(engine, world.ledger, wait_age=0) is Action.FILLED
        assert world.ledger.epoch().run_id != first.run_id
        world.exact()
    finally:
        client.close()


def test_a_redis_that_evicts_is_refused_at_a_workers_start_with_its_cure(own_redis: EmbeddedRedis) -> None:
    with contextlib.closing(guarded_redis(own_redis.url, Settings())) as client:
        check_redis(client, Settings())
        for policy in ("allkeys-lru", "volatile-ttl"):
            client.config_set("maxmemory-policy", policy)
            with pytest.raises(StoreUnusable, match=r"maxmemory-policy.*noeviction"):
                check_redis(client, Settings())
